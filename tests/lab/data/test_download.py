"""Downloads from a server that breaks off, lies or is asked by many: a file is whole or is fetched again."""

import http.server
import io
import shutil
import struct
import tarfile
import threading
import zipfile
from contextlib import suppress
from socket import SO_LINGER, SOL_SOCKET

import pytest

from gtracer.lab import files
from gtracer.lab.data import download
from gtracer.lab.data.download import Source, ensure
from gtracer.lab.errors import LabError

CONTENT = "".join(f"{number}\n" for number in range(20_000))


def zipped(names=("data/train.txt", "data/test.txt")):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, CONTENT)
    return made.getvalue()


def tarred():
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name in ("data/train.txt", "data/test.txt"):
            member = tarfile.TarInfo(name)
            member.size = len(CONTENT)
            archive.addfile(member, io.BytesIO(CONTENT.encode()))
    return made.getvalue()


WHOLE = {"a.zip": zipped(), "a.tar.gz": tarred()}
WANTED = ["data/train.txt", "data/test.txt"]


def whole(handler, content):
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def broken_off(handler, content):
    """Half of what the header says."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])


def broken_off_without_a_length(handler, content):
    """As a server of the old kind sends a file: its end is that of the connection."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])


def broken_off_in_a_chunk(handler, content):
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n%s" % (len(content), content[: len(content) // 2]))


def reset(handler, content):
    """The connection is gone in the middle, and says so."""
    broken_off(handler, content)
    handler.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def silent(handler, content):
    """No answer at all."""


def nonsense(handler, content):
    handler.wfile.write(b"what?\r\n\r\n")


def changed(handler, content):
    """One byte of the data is another."""
    middle = len(content) // 4
    whole(handler, content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])


def a_page(handler, content):
    """A login page, as some networks answer everything."""
    whole(handler, b"<html>Please log in</html>")


@pytest.fixture
def server():
    """Answers each request with the next of `answers`, and then with the whole file."""

    class Scripted(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.server.requests += 1
            answer = self.server.answers.pop(0) if self.server.answers else whole
            answer(self, WHOLE[self.path.rsplit("/", 1)[-1]])

        def handle(self):
            try:
                super().handle()
            except (OSError, ValueError):  # its connection was closed by an answer
                self.close_connection = True

        def finish(self):
            with suppress(OSError, ValueError):
                super().finish()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as running:
        running.requests, running.answers = 0, []
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def source(server, name="a.zip"):
    return Source(f"http://127.0.0.1:{server.server_port}/{name}")


def holds_the_data(folder):
    return all((folder / name).read_text() == CONTENT for name in WANTED)


BREAKS = [
    (broken_off, r"the connection broke off after [\d,]+ of [\d,]+ bytes: try again"),
    (broken_off_without_a_length, "cannot be unpacked: "),
    (broken_off_in_a_chunk, "IncompleteRead"),
    (reset, "Connection reset by peer|the connection broke off"),
    (silent, "Remote end closed connection without response"),
    (nonsense, "what"),
    (changed, "cannot be unpacked: "),
    (a_page, "cannot be unpacked: "),
]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("answer", "message"), BREAKS, ids=[answer.__name__ for answer, _ in BREAKS])
def test_what_broke_off_is_fetched_again(server, tmp_path, name, answer, message):
    """One line says what happened; nothing stays; the next time it is whole."""
    server.answers = [answer]
    with pytest.raises(LabError, match=rf"data/train\.txt is missing and could not be downloaded \(.*({message})"):
        ensure(tmp_path, WANTED, [source(server, name)])
    assert [path.name for path in tmp_path.iterdir()] == [files.TURN]
    paths = ensure(tmp_path, WANTED, [source(server, name)])
    assert paths == [tmp_path / name for name in WANTED]
    assert holds_the_data(tmp_path)
    assert server.requests == 2


@pytest.mark.parametrize("name", WHOLE)
def test_half_an_archive_from_before_is_replaced(server, tmp_path, name):
    """As it was kept until now. One that is whole, put there by the user, is not asked for again."""
    (tmp_path / name).write_bytes(WHOLE[name][:1000])
    ensure(tmp_path, WANTED, [source(server, name)])
    assert holds_the_data(tmp_path)
    assert (tmp_path / name).read_bytes() == WHOLE[name]
    shutil.rmtree(tmp_path / "data")
    ensure(tmp_path, WANTED, [source(server, name)])
    assert holds_the_data(tmp_path)
    assert server.requests == 1


def test_half_an_archive_stays_where_no_other_comes(server, tmp_path):
    """It may be all that its owner has."""
    (tmp_path / "a.zip").write_bytes(WHOLE["a.zip"][:1000])
    server.answers = [broken_off]
    with pytest.raises(LabError, match="the connection broke off"):
        ensure(tmp_path, WANTED, [source(server)])
    assert (tmp_path / "a.zip").read_bytes() == WHOLE["a.zip"][:1000]


@pytest.mark.parametrize("name", WHOLE)
def test_unpacking_that_is_cut_leaves_no_half_file(server, tmp_path, monkeypatch, name):
    """The disk fills up in the second file: the first and half of the second do not count as there."""

    def full(*_, **__):
        (folder,) = tmp_path.glob(".*.unpacked")
        (folder / "data").mkdir()
        (folder / "data" / "train.txt").write_text(CONTENT)
        (folder / "data" / "test.txt").write_text(CONTENT[:100])
        raise OSError(28, "No space left on device")

    def full_zip(archive, folder):
        folder.mkdir()
        full()

    def full_tar(tar, folder, **_):
        folder.mkdir()
        full()

    with monkeypatch.context() as patch:
        patch.setattr(download.shutil, "unpack_archive", full_zip)
        patch.setattr(tarfile.TarFile, "extractall", full_tar)
        with pytest.raises(LabError, match="cannot be unpacked: .*No space left on device"):
            ensure(tmp_path, WANTED, [source(server, name)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [files.TURN, name]
    ensure(tmp_path, WANTED, [source(server, name)])
    assert holds_the_data(tmp_path)
    assert server.requests == 1


def test_what_a_killed_process_left_is_in_nobodys_way(server, tmp_path):
    """Half of a download, and a folder that was being unpacked into."""
    (tmp_path / "a.zip.part").write_bytes(b"half")
    (tmp_path / ".a.zip.unpacked" / "data").mkdir(parents=True)
    (tmp_path / ".a.zip.unpacked" / "data" / "test.txt").write_text("half")
    (tmp_path / ".a.zip.unpacked" / "data" / "stray.txt").write_text("of an older archive")
    ensure(tmp_path, WANTED, [source(server)])
    assert holds_the_data(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [files.TURN, "a.zip", "data", "test.txt", "train.txt"]


def test_many_at_once_ask_once(server, tmp_path):
    """The runs of a sweep, each wanting the data that is not there yet."""
    found, start = [], threading.Barrier(4)

    def one():
        start.wait()
        ensure(tmp_path, WANTED, [source(server)])
        found.append(holds_the_data(tmp_path))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert server.requests == 1


def test_data_may_lie_in_the_folder_of_the_run(server, tmp_path):
    """A run keeps its folder from other runs, not from its own data."""
    with files.locked(tmp_path, "run"):
        ensure(tmp_path, WANTED, [source(server)])
    assert holds_the_data(tmp_path)


def test_wrong_content_says_which_archive_to_remove(server, tmp_path):
    """It is whole, so it is not fetched again by itself."""
    with pytest.raises(LabError, match=r"data/test\.txt: the checksum is not md5:00; remove .*a\.zip to download it"):
        ensure(tmp_path, WANTED, [source(server)], {"data/test.txt": "md5:00"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [files.TURN, "a.zip"]


def test_a_folder_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match=r"could not be downloaded \(cannot write .*\): put the files of .* --data"):
        ensure(tmp_path / "file" / "data", WANTED, [source(server)])
