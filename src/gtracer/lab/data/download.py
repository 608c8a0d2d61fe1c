"""Official files: found in the user's folder, or downloaded with progress and checked."""

from __future__ import annotations

import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gtracer.lab import files
from gtracer.lab.errors import LabError


@dataclass(frozen=True)
class Source:
    """A file of the internet and its checksum, written `algorithm:hexadecimal`, where one is known."""

    url: str
    checksum: str = ""

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def ensure(
    folder: Path, wanted: list[str], sources: list[Source], checksums: dict[str, str] | None = None
) -> list[Path]:
    """The wanted files below the folder; where some are missing, download the sources into it and unpack them.

    `checksums` are those of unpacked files. They bind what was downloaded, not what the user has put there.
    """
    paths = [folder / name for name in wanted]
    if not all(map(files.exists, paths)):
        try:
            for source in sources:
                _unpack(fetch(source, folder), folder)
            for name, checksum in (checksums or {}).items():
                if (folder / name).exists() and not _right(folder / name, checksum):
                    (folder / name).unlink()
                    raise LabError(f"{name}: the checksum is not {checksum}")
        except LabError as error:
            missing = next(path for path in paths if not files.exists(path))
            lost = f"the folder {folder} is missing or empty: " if _is_empty(folder) else ""
            raise LabError(
                f"{lost}{missing} is missing and could not be downloaded ({error}): put the files of "
                f"{' '.join(s.url for s in sources)} there, or name their folder with --data"
            ) from error
    for path in paths:
        if not path.exists():
            raise LabError(f"{path} is missing, also after unpacking {' '.join(s.name for s in sources)}")
    return paths


def _is_empty(folder: Path) -> bool:
    """Whether there is nothing in it, or it is not there; an attempt to download may have made it."""
    return not files.exists(folder) or (folder.is_dir() and not any(folder.iterdir()))


def fetch(source: Source, folder: Path) -> Path:
    """Download with progress into the folder; a file whose checksum is wrong is removed."""
    target, part = folder / source.name, folder / f"{source.name}.part"
    if target.exists() and _right(target, source.checksum):
        return target
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(source.url, timeout=30) as reply,
            part.open("wb") as out,
            Progress(*columns, transient=True) as progress,
        ):
            task = progress.add_task(source.name, total=int(reply.headers.get("Content-Length") or 0) or None)
            while chunk := reply.read(1 << 16):
                out.write(chunk)
                progress.advance(task, len(chunk))
        if not _right(part, source.checksum):
            raise LabError(f"{source.url}: the checksum is not {source.checksum}")
        part.replace(target)
    except (OSError, urllib.error.URLError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise LabError(f"{source.url}: {reason}") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _right(path: Path, checksum: str) -> bool:
    algorithm, _, expected = checksum.partition(":")
    return not checksum or files.digest(path, algorithm) == expected


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack what is an archive; leave single files (also .gz) as they are."""
    try:
        if archive.name.endswith((".tar.gz", ".tgz")):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
        elif archive.suffix == ".zip":
            shutil.unpack_archive(archive, folder)
    except (tarfile.TarError, zipfile.BadZipFile, OSError, shutil.ReadError) as error:
        raise LabError(f"{archive} cannot be unpacked: {error}") from error
