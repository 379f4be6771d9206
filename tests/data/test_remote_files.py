"""Files at URLs give the documents of local files, and errors are one line."""

import gzip
import io
import json
import re
import socket
import struct
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from unittest.mock import Mock

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from gpt4d.config import DataConfig
from gpt4d.config.commands import one_line_errors
from gpt4d.data import corpus_files, prepare, remote_files, sources
from gpt4d.data.checks import check_data
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.documents import documents, identity, size
from gpt4d.runtime.errors import Unavailable
from gpt4d.task.reading import ReadingTask
from gpt4d.training import dry_run
from gpt4d.validation import validate
from tests.support.data_files import one_line
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.jobs import ended_job
from tests.support.settings import configured

TEXTS = ["one", "zwei ü", "三 three"]


def contents():
    """Return a file of each kind, with one text each."""
    parquet.write_table(pyarrow.table({"text": TEXTS[2:]}), table := io.BytesIO())
    lines = gzip.compress(json.dumps({"text": TEXTS[1]}).encode())
    return {"0.txt": TEXTS[0].encode(), "1.jsonl.gz": lines, "2.parquet": table.getvalue()}


@pytest.fixture
def memory(request):
    """Return the URL of an empty directory in memory."""
    system, path = fsspec.filesystem("memory"), f"/{request.node.name}"
    system.makedirs(path)
    yield f"memory://{path}"
    system.rm(path, recursive=True)


@pytest.fixture
def server(tmp_path):
    """Return the URL of a server of the files in ``tmp_path`` that rejects requests for a range of bytes."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_): ...

        def do_GET(self):
            return self.send_error(501) if self.headers["Range"] else super().do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path))) as running:
        threading.Thread(target=running.serve_forever).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def put(url, name, content):
    with fsspec.open(f"{url}/{name}", "wb") as file:
        file.write(content)


def texts(path, **settings):
    return [document.text for document in documents(DataConfig(source="files", path=path, **settings))]


def test_a_glob_of_a_file_system_matches_files_of_all_formats(memory):
    for name, content in contents().items():
        put(memory, name, content)
    config = DataConfig(source="files", path=f"{memory}/*")
    assert texts(config.path) == TEXTS
    read = [document.bytes_read for document in documents(config)]
    assert read == sorted(read) and read[-1] == size(config) == sum(map(len, contents().values()))


def test_files_of_a_web_server_are_read_without_ranges(server, tmp_path):
    for name, content in contents().items():
        (tmp_path / name).write_bytes(content)
    assert texts([f"{server}/{name}" for name in contents()]) == TEXTS
    assert texts(f"{server}/*.txt") == TEXTS[:1]


def test_local_and_remote_files_make_one_corpus(memory, tmp_path):
    put(memory, "1.txt", b"remote")
    (tmp_path / "0.txt").write_text("local")
    config = DataConfig(source="text", path=[f"{memory}/*.txt", str(tmp_path / "*.txt")])
    assert sorted(texts(config.path)) == ["local", "remote"] and identity(config) == identity(config)


def test_changed_content_of_equal_size_gives_another_identity(memory):
    config = DataConfig(source="text", path=f"{memory}/*.txt")
    put(memory, "a.txt", b"one")
    before = identity(config)
    assert identity(config) == before
    put(memory, "a.txt", b"two")
    assert identity(config) != before


def test_a_checksum_of_the_file_system_replaces_the_content(memory, monkeypatch):
    put(memory, "a.txt", b"one")
    config, listed = DataConfig(source="text", path=f"{memory}/*.txt"), corpus_files.corpus_files

    def with_tag(tag):
        files = [file._replace(tag=tag) for file in listed([config.path])]
        monkeypatch.setattr("gpt4d.data.documents.corpus_files", lambda *_: files)
        return identity(config)

    monkeypatch.setattr(corpus_files.CorpusFile, "open", lambda _: pytest.fail("read"))
    assert with_tag("1") == with_tag("1") != with_tag("2")


@pytest.mark.parametrize(
    ("url", "package"), [("s3://b/*.txt", "s3fs"), ("gs://b/*.txt", "gcsfs"), ("https://h/a.txt", "aiohttp")]
)
def test_a_missing_package_is_reported_before_a_run_with_its_command(monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)  # its import fails
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, url.partition(":")[0], raising=False)
    with one_line(rf"^data\.path={re.escape(url)}: .*its package is not installed; run pip install {package}$"):
        check_data(DataConfig(source="text", path=url, tokenizer_vocab=300), "gpt_tiny")


def test_files_that_cannot_be_listed_or_read_are_reported_in_one_line(memory, server, monkeypatch):
    with one_line(rf"data\.path={memory}/none: matches no file; use a URL"):
        texts(f"{memory}/none")
    with one_line(r"data\.path=http://127.*none\.txt: (matches no file|cannot be listed)"):
        texts(f"{server}/none.txt")
    put(memory, "a.txt", b"one")
    system = fsspec.filesystem("memory")

    def failing(*_, **__):
        raise RuntimeError("no\npermission")

    monkeypatch.setattr(type(system), "open", failing)
    with one_line(rf"{memory}/a\.txt: cannot be read \(no permission\); download"):
        texts(f"{memory}/a.txt")
    monkeypatch.setattr(type(system), "glob", failing)
    with one_line(r"cannot be listed \(no permission\); check the address, the network and the"):
        texts(f"{memory}/*")


ROWS = [{"text": f"text {number} " * 20} for number in range(2000)]
CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
HALF = len(CONTENT) // 2


@pytest.fixture
def faulty(monkeypatch):
    """Return a function that serves ``CONTENT`` and returns its URL, and the list of the offsets of all answers.

    ``faults``: what happens to each answer; further answers are complete. ``ranges``: what a request for a range gets.
    ``start``: what a request for the size gets.
    """
    monkeypatch.setattr(remote_files, "_PAUSE_S", 1e-3)
    ended, running = threading.Event(), []

    def serve(faults, ranges="kept", start=None):
        answered, faults = [], iter(faults)

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_): ...

            def answer(self, status, body, length=None):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.send_header("ETag", '"1"' if "changed" not in answered else '"2"')
                self.end_headers()
                self.wfile.write(body if self.command == "GET" else b"")
                self.wfile.flush()

            def fail(self, fault):
                if fault != "redirect":
                    return self.send_error(fault)
                self.send_response(302)
                self.send_header("Location", self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_HEAD(self):
                self.fail(start) if start else self.answer(200, CONTENT)

            def do_GET(self):
                begin = int(self.headers["Range"][6:-1]) if self.headers["Range"] else 0
                if begin and ranges == "rejected":
                    return self.send_error(501)
                begin = begin if ranges == "kept" else 0
                fault, rest = next(faults, "none"), CONTENT[begin:]
                answered.append(fault if fault == "changed" else begin)
                if fault == "redirect" or isinstance(fault, int):
                    return self.fail(fault)
                length = HALF if fault == "short" else len(rest)
                self.answer(206 if begin else 200, rest[: len(rest) if fault in ("none", "changed") else HALF], length)
                if fault == "stall":
                    ended.wait()
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}/a.jsonl", answered

    yield serve
    ended.set()
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("ranges", ["kept", "ignored", full("rejected")])
@pytest.mark.parametrize(
    "faults", [["reset"], ["stall"], [503, 429], ["short"], ["close"], full(["reset", 500, "close", "short"])], ids=str
)
def test_rows_are_complete_although_a_server_fails(faulty, capfd, monkeypatch, faults, ranges):
    if "stall" in faults:
        monkeypatch.setattr(remote_files, "_TIMEOUT_S", 0.5)
    url, answered = faulty(faults, ranges)
    assert texts(url) == [row["text"].strip() for row in ROWS]
    assert f"warning: {url}: " in capfd.readouterr().err and len(answered) > min(len(faults), 2)
    if ranges != "kept":
        assert {*answered} == {0}
    elif faults in (["short"], ["stall"]):  # a lost connection also loses what has arrived
        assert answered[0] == 0 and max(answered) >= HALF


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (
            [503] * 99,
            r"the server answers 503 Service Unavailable, since \d{4}-.*data\.retry_s=0\); check the",
        ),
        (["reset"] * 99, r"since \d{4}"),
        (["short"] * 99, r"the answer has ended after [\d,]+ of [\d,]+ bytes, since"),
    ],
)
def test_a_server_that_keeps_failing_ends_a_command_with_the_code_of_requeues(faulty, tmp_path, capfd, faults, message):
    url, _ = faulty(faults)
    words = ["data=jsonl", f"data.path={url}", "data.tokenizer_vocab=300", "data.retry_s=0", f"out={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as ended, one_line_errors():
        prepare.main(words)
    assert ended.value.code == 75
    (line,) = [line for line in capfd.readouterr().err.split("\n") if line.startswith("error")]
    assert re.search(f"^error: {re.escape(url)}: .*{message}", line)


def test_a_run_whose_server_keeps_failing_ends_with_the_code_of_requeues(ranks, tiny, faulty, tmp_path):
    url, _ = faulty(["none", *[503] * 99])  # the first answer is read for the columns
    words = ["data=jsonl", f"data.path={url}", "data.stream=true", "data.retry_s=0", "data.validation_fraction=0"]
    tokenizer = prepared(tiny().data).first.directory
    words += [f"data.tokenizer={tokenizer}", "train.validation_batches=0", f"data.cache_dir={tmp_path}"]
    job = ended_job(ranks.context, tiny(*words, "parallel.gdata=2"), [75, 75])
    assert f"{url}: the server answers 503 Service Unavailable, since" in job.outputs()[0]


def test_the_end_of_a_run_ends_the_repetition_of_a_read(faulty, monkeypatch):
    repeating, ended = threading.Event(), []
    monkeypatch.setattr(remote_files, "_PAUSE_S", 1e3)
    monkeypatch.setattr(remote_files, "warn", lambda _: repeating.set())

    def read(url):
        with pytest.raises(Unavailable):
            texts(url, retry_s=1e6)
        ended.append(url)

    url, _ = faulty([503] * 99)
    (thread := threading.Thread(target=read, args=[url])).start()
    assert repeating.wait(60)
    ReadingTask.close(Mock())
    thread.join(60)
    assert ended == [url]


def test_a_file_that_changes_while_it_is_read_and_wrong_answers_are_one_line(faulty):
    url, _ = faulty(["reset", "changed"])
    with one_line(r"a\.jsonl: cannot be read \(the file has changed on the server while it was read\)"):
        texts(url)
    url, _ = faulty([403])
    with one_line(r"a\.jsonl: cannot be read \(the server answers 403 Forbidden\)"):
        texts(url)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (500, r"the server answers 500 Internal Server Error, since .*; check the server"),
        (403, r"data\.path=.*: cannot be listed \(the server answers 403 Forbidden\); check the address"),
        ("redirect", r"data\.path=.*: cannot be listed \(the server redirects without an end\)"),
        (404, r"data\.path=.*: matches no file"),
    ],
)
def test_a_server_that_fails_at_the_start_is_named(faulty, status, message):
    url, _ = faulty([status] * 99, start=status)
    with one_line(message):
        texts(url, retry_s=0)


def test_a_slow_server_is_reported_while_the_command_waits(server, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    said, waited = [], threading.Event()

    def recorded(text, **_):
        said.append(text)
        waited.set()

    def checksum(file):
        assert waited.wait(60)
        return "0"

    monkeypatch.setattr(remote_files, "print", recorded, raising=False)
    monkeypatch.setattr(remote_files, "_SLOW_S", 0)
    monkeypatch.setattr(sources, "checksum", checksum)
    waited.clear()
    identity(DataConfig(source="text", path=f"{server}/a.txt"))
    assert f"{server}/a.txt: reading it to identify the corpus" in said


def test_images_are_read_from_local_files_only():
    with one_line(r"data\.path=s3://b/a\.png: images are read from local files; copy"):
        validate(configured(["model=unet_tiny", "data=pictures", "data.path='s3://b/a.png'"]), 1)


def test_a_run_prepares_and_trains_on_files_of_a_web_server(ranks, tiny, corpus, server, tmp_path):
    """The pool's ranks are other processes, so the files are not in memory."""
    lines = [json.dumps({"text": document.text}) for document in documents(DataConfig(source="text", path=corpus))]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    words = ["data=jsonl", f"data.path='{server}/a.jsonl.gz'", cache, "data.processes=1", "train.steps=2"]
    config = tiny(*words)
    assert "jsonl: 1 file(s)" in dry_run.report(validate(config, 1), config, {})
    ranks.run(2, train_in_rank, config)
    assert [line["step"] for line in metric_lines(config.run.dir)] == [1, 2]
