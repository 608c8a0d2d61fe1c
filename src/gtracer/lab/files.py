"""Files that are whole or not there at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gtracer.lab.errors import LabError

LOCK, TURN = ".lock", ".turn.lock"  # stay behind: who removed them could take them from under another process


def write(path: Path, content: bytes) -> None:
    """Write all or nothing: a reader, or a crash at any moment, sees the old file or the new one."""
    with replacing(path) as part:
        part.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of `path` once it is whole; if that fails, all is as it was."""
    part = path.parent / f".{path.name}.{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, ValueError) as error:
        raise LabError(f"cannot write {path}: {reason(error)}; what was there before is untouched") from error
    finally:
        with suppress(OSError, ValueError):
            part.unlink(missing_ok=True)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder to write to, whose files go to `folder` once all are there; if that fails, all is as it was."""
    part = folder.parent / f".{folder.name}.{os.getpid()}"
    try:
        part.mkdir(parents=True)
        yield part
        for file in sorted(file for file in part.rglob("*") if file.is_file()):
            place = folder / file.relative_to(part)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
    except (OSError, ValueError) as error:
        raise LabError(f"cannot write {folder}: {reason(error)}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read(path: Path) -> bytes:
    """Read a file, or say in one line why not."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        lost = isinstance(error, FileNotFoundError) and not is_folder(path.parent)
        why = f"there is no folder {path.parent}" if lost else reason(error)
        raise LabError(f"cannot read {path}: {why}{_in_the_way(path.parent)}") from error


def reason(error: OSError | ValueError) -> str:
    """Why a file is not available: the system's word, or Python's where the name itself cannot be."""
    return getattr(error, "strerror", None) or str(error)


def expanded(name: str) -> Path:
    """A path with its home folder written out."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # of a user that there is not
        raise LabError(f"there is no home folder for {name}") from error


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8: on Linux it may be any bytes, which no JSON file can hold."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; there is none of a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; as above."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Keep a folder to this process, for as long as it lives; refused in one line where another has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise LabError(f"another {what} is at work in {folder}: wait for it, or choose another folder") from error
    except (OSError, ValueError) as error:
        raise LabError(f"cannot write {folder}: {reason(error)}{_in_the_way(folder)}") from error
    _tidy(folder)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Let one process at a time bring files into a folder, which may be a run's own too; the others wait."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / TURN)
        lock.acquire()
    except (OSError, ValueError) as error:
        raise LabError(f"cannot write {folder}: {reason(error)}") from error
    try:
        yield
    finally:
        lock.release()


def _in_the_way(folder: Path) -> str:
    """What to do where a file has the place of a folder."""
    file = next((place for place in (folder, *folder.parents) if exists(place) and not is_folder(place)), None)
    hint = "choose a folder, or unpack the records that it holds: gtracer records unpack"
    return "" if file is None else f"; {file} is a file: {hint} {file}"


def _tidy(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left; the folder is ours."""
    for part in folder.glob(".*.*"):
        if part.suffix[1:].isdigit():
            with suppress(OSError):
                part.unlink()


def digest(path: Path, algorithm: str) -> str:
    """The file's checksum in hexadecimal."""
    so_far = hashlib.new(algorithm)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            so_far.update(chunk)
    return so_far.hexdigest()
