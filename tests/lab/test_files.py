"""Files are written in whole or not at all, whatever goes wrong on the disk."""

import errno
import os
import resource
import signal

import pytest

from gtracer.lab import files
from gtracer.lab.errors import LabError
from gtracer.lab.training.trainer import train
from support.runs import SMALL


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(LabError, match="cannot write .*Not a directory"):
        train(SMALL, tmp_path / "out" / "run", [])


def test_read_only_folder(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.Path, "mkdir", refused)
    with pytest.raises(LabError, match="cannot write .*Read-only file system"):
        train(SMALL, tmp_path, [])


def test_full_disk_leaves_the_old_file(tmp_path):
    """A limit on the size of files is the disk that fills up in the middle of a write."""
    files.write(tmp_path / "a", b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(LabError, match="cannot write .*untouched"):
            files.write(tmp_path / "a", b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_writer_left_is_tidied_up(tmp_path):
    left = [tmp_path / ".record.json.4711", tmp_path / ".checkpoint.pt.12"]
    kept = [tmp_path / "record.json", tmp_path / ".hidden.json", tmp_path / "notes.1"]
    for path in (*left, *kept):
        path.touch()
    with files.locked(tmp_path, "run"):
        assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)


def test_nothing_is_half_written(tmp_path, monkeypatch):
    """The new content takes the old one's place in one move, or not at all."""

    def refused(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files.write(tmp_path / "a", b"old")
    monkeypatch.setattr(files.Path, "replace", refused)
    with pytest.raises(LabError, match="untouched"):
        files.write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
