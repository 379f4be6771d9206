"""Files at URLs give the documents of local files, and errors are one line."""

import gzip
import io
import json
import re
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from gpt4d import dry_run
from gpt4d.config import DataConfig, check_data
from gpt4d.data import corpus_files
from gpt4d.data.documents import documents, identity, size
from gpt4d.validation import validate
from tests.support.data_files import one_line
from tests.support.grids import metric_lines, train_in_rank
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


def texts(path):
    return [document.text for document in documents(DataConfig(source="files", path=path))]


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
        monkeypatch.setattr("gpt4d.data.documents.corpus_files", lambda _: files)
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
