"""Official files: found in the user's folder, or downloaded with progress and checked."""

from __future__ import annotations

import gzip
import http.client
import shutil
import tarfile
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from gtracer.lab import files
from gtracer.lab.errors import LabError

TARS = (".tar.gz", ".tgz")
# What Python's readers raise on an archive that is cut, changed, encrypted or none at all.
DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    shutil.ReadError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
)


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
    try:
        if _missing(paths):
            # The runs of a sweep want the same files at the same moment: one downloads, the others wait.
            with files.in_turn(folder):
                for source in sources if _missing(paths) else ():
                    _unpack(fetch(source, folder), folder, checksums or {})
    except LabError as error:
        lost = f"the folder {folder} is missing or empty: " if _is_empty(folder) else ""
        raise LabError(
            f"{lost}{_missing(paths)} is missing and could not be downloaded ({error}): put the files of "
            f"{' '.join(s.url for s in sources)} there, or name their folder with --data"
        ) from error
    if missing := _missing(paths):
        raise LabError(f"{missing} is missing, also after unpacking {' '.join(s.name for s in sources)}")
    return paths


def _missing(paths: list[Path]) -> Path | None:
    return next((path for path in paths if not files.exists(path)), None)


def _is_empty(folder: Path) -> bool:
    """Whether there is nothing in it, or it is not there; an attempt to download may have made it, with its lock."""
    return not files.exists(folder) or (folder.is_dir() and not any(path.name[0] != "." for path in folder.iterdir()))


def fetch(source: Source, folder: Path) -> Path:
    """Download with progress into the folder. Only a whole file is kept; what is there and is not, is replaced."""
    target, part = folder / source.name, folder / f"{source.name}.part"
    if target.exists() and _problem(target, source) is None:
        return target
    try:
        _receive(source, part)
        if problem := _problem(part, source):
            raise LabError(f"{source.url}: {problem}")
        part.replace(target)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise LabError(f"{source.url}: {reason or type(error).__name__}") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _receive(source: Source, part: Path) -> None:
    """Write what the server sends; refused where that is less than it said."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        urllib.request.urlopen(source.url, timeout=30) as reply,
        part.open("wb") as out,
        Progress(*columns, transient=True) as progress,
    ):
        promised, received = int(reply.headers.get("Content-Length") or 0), 0
        task = progress.add_task(source.name, total=promised or None)
        while chunk := reply.read(1 << 16):  # at a broken connection it ends as at the file's end
            received += out.write(chunk)
            progress.advance(task, len(chunk))
    if received < promised:
        raise LabError(f"{source.url}: the connection broke off after {received:,} of {promised:,} bytes: try again")


def _problem(path: Path, source: Source) -> str | None:
    """Why the file is not the source, as far as can be known: by its checksum, else by those inside an archive."""
    if source.checksum:
        return None if _right(path, source.checksum) else f"the checksum is not {source.checksum}"
    try:
        if source.name.endswith((*TARS, ".gz")):
            with gzip.open(path) as file:
                while file.read(1 << 20):  # to the checksum at its end
                    pass
        elif source.name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
            return None if bad is None else f"cannot be unpacked: {bad} is damaged"
    except DAMAGE as error:
        return f"cannot be unpacked: {error}"
    return None


def _right(path: Path, checksum: str) -> bool:
    algorithm, _, expected = checksum.partition(":")
    return files.digest(path, algorithm) == expected


def _unpack(archive: Path, folder: Path, checksums: dict[str, str]) -> None:
    """Unpack what is an archive, each of its files whole or not at all; leave single files (also .gz) as they are."""
    if not archive.name.endswith((*TARS, ".zip")):
        return
    # Not in the folder itself: a file that was cut there would count as there the next time.
    aside = folder / f".{archive.name}.unpacked"
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    try:
        if archive.suffix == ".zip":
            shutil.unpack_archive(archive, aside)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(aside, filter="data")
        for name, checksum in checksums.items():
            if (aside / name).exists() and not _right(aside / name, checksum):
                raise LabError(f"{name}: the checksum is not {checksum}; remove {archive} to download it again")
        for path in sorted(p for p in aside.rglob("*") if p.is_file()):
            place = folder / path.relative_to(aside)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
    except DAMAGE as error:
        raise LabError(f"{archive} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
