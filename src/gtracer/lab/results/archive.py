"""A study's records in one compressed file, a line for each file of the folder they were written to. It needs no torch.

A line is JSON: `path`, below the folder, and what the file holds: as `json` where that, laid out as gtracer does it,
gives the same bytes again (with `ascii` false where other letters stand for themselves), as `text` otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from gtracer.lab import files
from gtracer.lab.errors import LabError, unknown

SUFFIX = ".jsonl.xz"
PACKED = "*.json"  # records and studies; not checkpoints and reports, which are large, or made of these
BYTES = ("utf-8", "surrogateescape")  # gives any bytes back, also those that are no text


def is_packed(path: Path) -> bool:
    """Whether the path is that of an archive rather than of a folder."""
    return path.name.endswith(SUFFIX) and path.name != SUFFIX and not files.is_folder(path)


def archive_of(folder: Path) -> Path:
    """Where a folder is packed to if nothing else is said.

    >>> archive_of(Path("runs/table1")).as_posix()
    'runs/table1.jsonl.xz'
    """
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.with_name(named.name + SUFFIX)


def folder_of(path: Path) -> Path:
    """Where an archive is unpacked to if nothing else is said; a folder is its own.

    >>> folder_of(Path("runs/table1.jsonl.xz")).as_posix(), folder_of(Path("runs/table1")).as_posix()
    ('runs/table1', 'runs/table1')
    """
    return path.with_name(path.name.removesuffix(SUFFIX)) if is_packed(path) else path


def contents(path: Path, name: str, *, deep: bool = True) -> Iterator[tuple[Path, Callable[[], bytes]]]:
    """The files of this name in an archive, or in a folder and its archives: the folder of each, and how to read it.

    Args:
        path: Folder or archive.
        name: Of the files.
        deep: Also those that lie deeper than in a run's folder.

    Raises:
        LabError: Where an archive is damaged; what cannot be read in a folder says so when it is read.
    """
    if is_packed(path):
        for place, content in unpacked(path).items():
            if PurePosixPath(place).name == name and (deep or place.count("/") == 1):
                yield (path / place).parent, partial(bytes, content)
        return
    places = [*path.rglob(name), *path.rglob(f"*{SUFFIX}")] if deep else path.glob(f"*/{name}")
    for found in sorted(places):
        if is_packed(found):
            yield from contents(found, name)
        else:
            yield found.parent, partial(files.read, found)


def pack(folder: Path, archive: Path) -> list[str]:
    """Write the folder's JSON files into one archive; give the names of the files that are not in it.

    The same folder gives the same bytes. The folder stays.
    """
    if not files.is_folder(folder):
        raise LabError(f"{folder} is no folder: give the one that gtracer sweep or train wrote to")
    _check_name(archive)
    found = [path for path in sorted(folder.rglob(PACKED)) if path.is_file()]
    if not found:
        raise LabError(f"{folder} holds no {PACKED}: there is nothing to pack")
    content = {path.relative_to(folder).as_posix(): files.read(path) for path in found}
    if files.exists(archive) and (lost := unpacked(archive).keys() - content.keys()):
        raise LabError(
            f"{archive} holds {len(lost)} files that are not in {folder}, such as {min(lost)}: unpack it there first "
            f"(gtracer records unpack {archive} -o {folder}), or choose another name"
        )
    lines = [json.dumps(_line(name, text), separators=(",", ":")) + "\n" for name, text in content.items()]
    files.write(archive, _lzma().compress("".join(lines).encode()))
    others = {path for path in folder.rglob("*") if path.is_file()} - {*found, archive}
    return sorted(path.relative_to(folder).as_posix() for path in others if path.name not in (files.LOCK, files.TURN))


def unpack(archive: Path, folder: Path, runs: Collection[str] = ()) -> int:
    """Restore the folder, byte for byte, or some of its runs alone; give the number of files.

    Raises:
        LabError: Where the archive is damaged or has no such run, or a file is there with other content.
    """
    content = unpacked(archive)
    known = {PurePosixPath(name).parent.as_posix() for name in content} - {"."}
    for run in runs:
        if run not in known:
            raise unknown(f"run in {archive}", run, known)
    wanted = {name: text for name, text in content.items() if not runs or PurePosixPath(name).parent.as_posix() in runs}
    for name, text in wanted.items():
        if files.exists(folder / name) and files.read(folder / name) != text:
            raise LabError(f"{folder / name} is there with other content: nothing was unpacked, choose another folder")
    for name, text in wanted.items():
        files.write(folder / name, text)
    return len(wanted)


def unpacked(archive: Path) -> dict[str, bytes]:
    """What an archive holds, by the paths below the folder; refused, with its line, where it is damaged."""
    _check_name(archive)
    lzma, content, number = _lzma(), dict[str, bytes](), 0
    try:
        with lzma.open(archive) as file:
            while line := file.readline():
                number += 1
                name, text = _read(line)
                if name in content:
                    raise ValueError(f"{name} stands in it twice")
                content[name] = text
        if not content:
            raise ValueError("it is empty")
    except (lzma.LZMAError, EOFError) as error:  # that line was not reached
        raise LabError(_damaged(archive, number + 1, error)) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise LabError(_damaged(archive, max(number, 1), error)) from error
    except OSError as error:
        raise LabError(f"cannot read {archive}: {error.strerror}") from error
    return content


def _check_name(archive: Path) -> None:
    if not is_packed(archive):
        raise LabError(f"{archive} is no archive: it is a file whose name ends in {SUFFIX}")


def _damaged(archive: Path, line: int, error: Exception) -> str:
    return f"{archive} is damaged in line {line} ({error}): take it from its repository again, or pack its folder anew"


def _line(name: str, content: bytes) -> dict[str, Any]:
    for ascii_only in (True, False):
        try:
            value = json.loads(content)
            is_so = _laid_out(value, ascii_only) == content
        except (ValueError, RecursionError):
            break
        if is_so:
            return {"path": name, "json": value} | ({} if ascii_only else {"ascii": False})
    return {"path": name, "text": content.decode(*BYTES)}


def _read(line: bytes) -> tuple[str, bytes]:
    read = json.loads(line)
    if not isinstance(read, dict) or set(read) not in ({"path", "json"}, {"path", "json", "ascii"}, {"path", "text"}):
        raise ValueError("it is not a path with json or text")
    name, text = read["path"], read.get("text", "")
    if not (isinstance(name, str) and isinstance(text, str)):
        raise TypeError("its path or text is no string")
    place = PurePosixPath(name)
    if str(place) != name or place.is_absolute() or ".." in place.parts or not place.name:
        raise ValueError(f"{name!r} is no path below a folder")
    if "text" in read:
        return name, text.encode(*BYTES)
    return name, _laid_out(read["json"], read.get("ascii", True))


def _laid_out(value: Any, ascii_only: bool) -> bytes:
    """As records and studies are written."""
    return (json.dumps(value, indent=1, ensure_ascii=ascii_only) + "\n").encode(*BYTES)


def _lzma() -> Any:
    import lzma  # some builds of Python lack it, and folders are read without

    return lzma
