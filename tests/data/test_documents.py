"""All sources yield the same documents, and errors name file and line."""

import ast
import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import datasets
import pyarrow
import pytest
import zstandard
from pyarrow import ipc, parquet

from gpt4d.config import DataConfig, patterns, written_source
from gpt4d.data import sources
from gpt4d.data.checks import check_data
from gpt4d.data.conversations import ROWS, Unread
from gpt4d.data.documents import documents, files, identity, is_held_out, readers, size
from tests.support.data_files import flip_bit, one_line
from tests.support.environment import REPOSITORY
from tests.support.grids import full
from tests.support.settings import configured

TEXTS = ["one\ntwo", "drei, vier – fünf", "六 " * 3 + "end"]
zst = zstandard.compress


def lines_of_json(key="text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in TEXTS).encode()


def table(write, texts=TEXTS, batch_rows=2) -> bytes:
    """Return a file of batches that one of pyarrow's writers has written."""
    content, rows = io.BytesIO(), pyarrow.table({"id": [*range(len(texts))], "text": texts})
    with write(content, rows.schema) as writer:
        for batch in rows.to_batches(max_chunksize=batch_rows):
            writer.write_batch(batch)
    return content.getvalue()


def csv_of_excel() -> bytes:
    rows = csv.writer(content := io.StringIO(newline=""))
    rows.writerows([["id", "text"], *enumerate(TEXTS)])
    return content.getvalue().encode("utf-8-sig")


def saved_dataset(directory):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(directory / "d"))


ENCODED = [text.encode() for text in TEXTS]
JSON, PARTS = lines_of_json(), [f"d/train-{number:05}-of-00003.jsonl" for number in range(3)]
KINDS = {  # source, paths, content of each file, and the column
    "text": ("text", ["*.txt"], {f"{number}.txt": text for number, text in enumerate(ENCODED)}),
    "compressed text": (
        "text", ["*"], {"0.txt.gz": gzip.compress(ENCODED[0]), "1.txt.zst": zst(ENCODED[1]), "2.txt": ENCODED[2]},
    ),
    "JSON": ("jsonl", ["a.jsonl"], {"a.jsonl": lines_of_json("body")}, "body"),
    "compressed JSON": ("jsonl", ["*.zst"], {"a.jsonl.zst": zst(JSON)}),
    "parquet": ("parquet", ["*.parquet"], {"a.parquet": table(parquet.ParquetWriter)}),
    "CSV": ("csv", ["*.csv"], {"a.csv": csv_of_excel()}),
    "arrow": ("arrow", ["a.arrow"], {"a.arrow": table(ipc.new_file)}),
    "several formats": (  # the globs match the second text twice
        "files", ["b/**/*", "0.txt.xz", "b/1*"],
        {
            "0.txt.xz": lzma.compress(ENCODED[0]),
            "b/1.jsonl.bz2": bz2.compress(json.dumps({"text": TEXTS[1]}).encode() + b"\n"),
            "b/2.csv.gz": gzip.compress(f'text\n"{TEXTS[2]}"\n'.encode()),
        },
    ),
    "compressed arrow": ("arrow", ["a.arrow.*"], {"a.arrow.zst": zst(table(ipc.new_stream))}),
    "saved dataset": ("hub", ["d"], {}),
    "hub copy": ("hub", ["d"], {"d/train.jsonl": JSON}),
    "hub copy of several files": ("hub", ["d"], dict(zip(PARTS, JSON.splitlines(), strict=True))),
}  # fmt: skip


def written(kind, directory):
    """Write the texts as a kind of source in ``directory``, and return its settings."""
    source, globs, contents, *column = KINDS[kind]
    for name, content in contents.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    if not contents:
        saved_dataset(directory)
    paths = [str(directory / glob) for glob in globs]
    return DataConfig("c", source, paths if len(paths) > 1 else paths[0], column=column[0] if column else "text")


def texts_of(path, source="files", **settings):
    return [document.text for document in documents(DataConfig(source=source, path=str(path), **settings))]


@pytest.mark.parametrize("kind", KINDS)
def test_all_sources_and_their_readers_yield_the_same_documents_in_order(tmp_path, kind):
    config = written(kind, tmp_path)
    found = [*documents(config)]
    assert [document.text for document in found] == TEXTS
    read = [[document.text for document in reader()] for reader in readers(config, files_of(config))]
    assert list(itertools.chain(*read)) == TEXTS
    assert len(read) == 3 or kind not in ("text", "hub copy of several files")
    if config.source != "hub" and kind != "compressed arrow":
        bytes_read = [document.bytes_read for document in found]
        assert bytes_read == sorted(bytes_read) and bytes_read[0] > 0 and bytes_read[-1] == size(config)


def files_of(config):
    return [] if config.source == "hub" else files(config)


DAMAGED_GZ = gzip.compress(JSON, mtime=0)[:10] + b"\x07" + gzip.compress(JSON, mtime=0)[11:]  # a block of no type
NOT_UTF8 = table(parquet.ParquetWriter, pyarrow.array([b"fine", b"\xff\xfe"]).view(pyarrow.string()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: invalid JSON .* fix or remove the line"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', r"a\.jsonl:2: no text in data\.column=text; .* \(here: body\)"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: a list in place of a row; write each object"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: byte 10 is not UTF-8; convert the file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": " "}\n', r"a\.jsonl:2: an empty document; .* data\.skip_empty=true"),
        ("a.jsonl", b'{"text": "a \\ud800"}\n', r"a\.jsonl:1: character 2 of data\.column=text is half of a surrogate"),
        ("a.jsonl", b'{"text": "x", "id": ' + b"1" * 5000 + b"}\n", r"a\.jsonl:1: invalid JSON .* fix or remove"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl:1: invalid JSON .* fix or remove the line"),
        ("a.jsonl.gz", gzip.compress(JSON, mtime=0)[:-9], r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", DAMAGED_GZ, r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz: cannot be read \(the file is empty\)"),
        ("a.jsonl.zst", b"nonsense", r"a\.jsonl\.zst: cannot be read"),
        ("a.jsonl.zst", zst(JSON)[:-3], r"a\.jsonl\.zst: cannot be read \(the file is truncated\)"),
        ("a.jsonl.zst", zst(JSON) * 2 + zst(b"{}")[:-3], r"cannot be read \(the file is truncated\)"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst: cannot be read \(the file is empty\)"),
        ("a.jsonl.xz", lzma.compress(JSON)[:-9], r"a\.jsonl\.xz: cannot be read"),
        ("a.jsonl.xz", b"nonsense", r"a\.jsonl\.xz: cannot be read"),
        ("a.jsonl.bz2", bz2.compress(JSON)[:-9], r"a\.jsonl\.bz2: cannot be read"),
        ("a.jsonl.bz2", b"", r"a\.jsonl\.bz2: cannot be read \(the file is empty\)"),
        ("a.jsonl.xz", lzma.compress(JSON) + b"garbage", r"a\.jsonl\.xz: cannot be read"),
        ("a.jsonl.bz2", bz2.compress(JSON) + b"garbage", r"a\.jsonl\.bz2: cannot be read"),
        ("a.jsonl.gz", gzip.compress(JSON) + b"garbage", r"a\.jsonl\.gz: cannot be read"),
        (
            "a.json",
            b'[{"text": "x"},\n{"text": "y"}]\n',
            r"a\.json:1: invalid JSON .* or write each object in a",
        ),
        ("a.jsonl", b'{"text": null}\n', r"a\.jsonl:1: an empty document; .* data\.skip_empty=true"),
        ("a.jsonl", b'{"a\\nb": "x"}\n', r"a\.jsonl:1: no text in data\.column=text; .* \(here: a b\)"),
        ("a.tar.gz", gzip.compress(b"x"), r"a\.tar\.gz: the suffix \.tar is not known to data=files; leave .* or read"),
        ("a.csv", b'text\n"fine"\n"open\n', r"a\.csv:3: invalid CSV \(unexpected end of data\); fix or remove the"),
        ("a.csv", b"id,body\n1,x\n", r"a\.csv:2: no text in data\.column=text; .* \(here: id, body\)"),
        ("a.csv", b"text,id,text\na,1,b\n", r"a\.csv: two columns are named text; rename one"),
        ("a.csv", b"text,id\n\xff,1\n", r"a\.csv:2: byte 0 is not UTF-8"),
        ("a.arrow", b"nonsense", r"a\.arrow: cannot be read"),
        ("a.arrow", b"", r"a\.arrow: cannot be read"),
        ("a.parquet", b"nonsense", r"a\.parquet: cannot be read"),
        ("a.parquet", NOT_UTF8, r"a\.parquet: cannot be read \(.*UTF8"),
    ],
    ids=itertools.count(),
)
def test_errors_name_the_file_the_line_and_a_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with one_line(message):
        texts_of(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json.gz", gzip.compress(JSON)),
        ("A.JSONL", b"\xef\xbb\xbf" + JSON + b"\n \n"),
        ("a.NDJSON.GZ", gzip.compress(JSON) + bytes(8)),
        ("a.jsonl.xz", lzma.compress(JSON[:9]) + bytes(4) + lzma.compress(JSON[9:]) + bytes(8)),
        ("a.jsonl.bz2", bz2.compress(JSON[:9]) + bz2.compress(JSON[9:]) + bytes(8)),
        ("a.jsonl", b'{"text": null}\n\n{"text": ""}\n' + JSON),
    ],
    ids=itertools.count(),
)
def test_suffixes_of_any_case_blank_lines_marks_and_padding_add_no_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts_of(tmp_path / name, skip_empty=True) == TEXTS
    check_data(DataConfig(source="files", path=str(tmp_path / name), tokenizer_vocab=300), "gpt_tiny")


@pytest.mark.parametrize("content", ["x\u2028y\x0cz\x85w", "\ufeffx"])
def test_a_line_ends_at_a_newline_and_a_mark_at_the_beginning_is_no_text(tmp_path, content):
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": content.lstrip("\ufeff")}, ensure_ascii=False))
    assert texts_of(tmp_path / "a.*") == [content.lstrip("\ufeff")] * 2


def test_no_line_of_a_users_file_is_split_by_splitlines():
    """str.splitlines also splits at U+2028, form feeds and further characters."""
    own = {"evaluation/tasks.py", "runtime/machine.py", "runtime/files.py", "runs/history.py", "data/tokenizers.py"}
    package, found = REPOSITORY / "gpt4d", set()
    for path in package.rglob("*.py"):
        calls = (node.attr for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Attribute))
        found |= {str(path.relative_to(package))} if "splitlines" in calls else set()
    assert found <= own, "messages of errors, files of the system, logs of gpt4d, and GPT-2's merges"


def test_the_suffix_of_a_glob_or_of_each_file_names_the_format_of_a_validation_set():
    globs = {
        "a/*": "files",
        "**": "files",
        "code/*.py": "text",
        "a/*.x": "text",
        "a.JSON.gz": "jsonl",
        "*.arrow": "arrow",
    }
    assert {glob: written_source(glob) for glob in globs} == globs


def test_whitespace_around_documents_is_kept_on_request(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "  x\n"}) + json.dumps({"text": " "}).join("\n\n"))
    settings = {"path": str(tmp_path / "a.jsonl"), "source": "jsonl", "skip_empty": True}
    kept, stripped = DataConfig(**settings, strip=False), DataConfig(**settings)
    assert [document.text for document in documents(kept)] == ["  x\n"] and texts_of(**settings) == ["x"]
    assert identity(kept) != identity(stripped)


def test_a_row_that_memory_cannot_hold_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(JSON)

    def loads(text, original=json.loads, **settings):
        if "drei" in text:
            raise MemoryError
        return original(text, **settings)

    monkeypatch.setattr(json, "loads", loads)
    with one_line(r"a\.jsonl:1: out of memory while this row or the next one is read; split it into shorter"):
        texts_of(tmp_path / "a.jsonl")


READ_DAMAGED = """
import random, sys
from pathlib import Path
from gpt4d.config import ConfigError, DataConfig
from gpt4d.data.conversations import ROWS, Unread
from gpt4d.data.documents import documents

(path, intact), (seeds, source, read) = map(Path, sys.argv[1:3]), sys.argv[3:]
for seed in map(int, seeds.split()):
    draw, content = random.Random(seed), bytearray(intact.read_bytes())
    for _ in range(draw.randint(1, 3)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path.write_bytes(content)
    print("seed", seed, flush=True)
    try:
        found = [document.text for document in documents(DataConfig(source=source, path=read))]
        assert source == "parquet" or all(text.encode() in content for text in found), "memory outside the file"
        print("read" if "".join(found) in intact.read_bytes().decode(errors="replace") else "changed")
    except ConfigError as error:
        assert "\\n" not in str(error)
        print("line")
"""


@pytest.mark.parametrize("seeds", [range(40), full(range(40, 2000))], ids=str)
@pytest.mark.parametrize("kind", ["arrow file", "arrow stream", "parquet", "saved dataset"])
def test_a_damaged_file_of_columns_gives_text_of_the_file_or_one_line(tmp_path, kind, seeds):
    texts = [f"text {number}" for number in range(100)]
    source, read = "parquet" if kind == "parquet" else "arrow", str(path := tmp_path / "a")
    if kind == "saved dataset":
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "d"))
        (path,) = (tmp_path / "d").glob("*.arrow")
        source, read = "hub", str(tmp_path / "d")
        content = path.read_bytes()
    else:
        write = {"arrow file": ipc.new_file, "arrow stream": ipc.new_stream}.get(kind, parquet.ParquetWriter)
        content = table(write, texts, 100)
    (tmp_path / "intact").write_bytes(content)
    words = [str(path), str(tmp_path / "intact"), " ".join(map(str, seeds)), source, read]
    done = subprocess.run([sys.executable, "-c", READ_DAMAGED, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-300:]} {done.stderr[-2000:]}"
    lines = done.stdout.split("\n")
    assert lines.count("line") and lines.count("line") + lines.count("read") + lines.count("changed") == len(seeds)


FAR = pyarrow.array([2**50], pyarrow.timestamp("ms"))  # after the last date of Python
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
READ = {"text": pyarrow.array(["a"]), "messages": pyarrow.array([TURNS])}


@pytest.mark.parametrize("column", READ)
@pytest.mark.parametrize("write", [ipc.new_file, ipc.new_stream, parquet.ParquetWriter])
def test_only_the_columns_that_are_read_must_have_one_name_and_values_of_python(tmp_path, write, column):
    chat, path = column == "messages", tmp_path / ("a.parquet" if write is parquet.ParquetWriter else "a.arrow")

    def read(names, *columns):
        found = pyarrow.table([*columns], names=names)
        with write(str(path), found.schema) as writer:
            writer.write_table(found)
        unread = Unread()
        (document,) = documents(DataConfig(source="chat" if chat else "files", path=str(path)), unread)
        return document.text, dict(unread)

    text, unread = read([column, "far", "far"], READ[column], FAR, FAR)
    assert (json.loads(text)[0] == TURNS if chat else text == "a") and set(unread) == {(ROWS, "far")}
    with one_line(rf"{path}: two columns are named {column}; rename one"):
        read([column, column], READ[column], READ[column])
    with one_line(rf"{path}: cannot be read \(date value out of range\)"):
        read([column, "tools"] if chat else [column], *([READ[column], FAR] if chat else [FAR]))


def test_library_messages_of_several_lines_become_one_line(tmp_path, monkeypatch):
    def failing(*_):
        raise pyarrow.ArrowInvalid("one\n  two\nthree")

    config = written("parquet", tmp_path)
    monkeypatch.setattr(parquet, "ParquetFile", failing)
    with one_line(r"a\.parquet: cannot be read \(one two three\); download or create"):
        list(documents(config))


@pytest.mark.parametrize("content", [b'{"text": "x"}\n{"text": \n', b'{"text": "\xff"}\n'], ids=["JSON", "UTF-8"])
def test_an_invalid_file_of_a_hub_copy_is_reported_in_one_line(tmp_path, content):
    config = written("hub copy", tmp_path)
    (tmp_path / "d" / "train.jsonl").write_bytes(content)
    with one_line(r"d: row \d+: cannot be read \(.*fix the dataset"):
        list(documents(config))


def test_all_zst_frames_are_read_and_frames_without_text_skipped(tmp_path):
    """The tool pzstd writes one frame per piece of text, each after a frame that contains its length."""
    skippable = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"long"
    frames = [skippable, zst(JSON[:20]), skippable, zst(b""), zst(JSON[20:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert texts_of(tmp_path / "a.jsonl.zst") == TEXTS


@pytest.mark.parametrize("compress", [zst, lambda content: content], ids=["zst", "plain"])
def test_documents_are_read_and_decompressed_lazily(tmp_path, compress):
    """The first document is yielded before the invalid or truncated end is read."""
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(100_000))
    path = tmp_path / ("a.jsonl.zst" if compress is zst else "a.jsonl")
    path.write_bytes(compress(lines)[:-3])
    assert next(documents(DataConfig(source="jsonl", path=str(path)))).text == "0"


def test_a_file_that_a_glob_matches_twice_is_read_once(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "one.txt").write_text("one")
    assert texts_of(tmp_path / "**" / "**" / "*.txt") == ["one"]


@pytest.mark.parametrize("kind", [*KINDS][:-1])
def test_only_changed_content_gives_a_corpus_another_identity(tmp_path, kind):
    (first := tmp_path / "first").mkdir()
    before = identity(config := written(kind, first))
    assert identity(config) == before
    shutil.copytree(first, second := tmp_path / "elsewhere" / "second")  # with other times
    paths = [path.replace(str(first), str(second)) for path in patterns(config.path)]
    moved = replace(config, path=paths if isinstance(config.path, list) else paths[0])
    assert identity(moved) == before
    path = max((path for path in second.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    status = path.stat()
    flip_bit(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = identity(moved)
    path.write_bytes(path.read_bytes() + b"\n")
    assert len({before, changed, identity(moved)}) == 3


def test_a_large_corpus_is_identified_by_sizes_and_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "COMPARED_BYTES", 160)
    path = tmp_path / "large.txt"
    path.write_bytes(content := bytes(range(256)) * 4)
    config = DataConfig(source="text", path=str(path))
    before, detected = identity(config), []
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        if identity(config) != before:
            detected.append(index)
    assert len(detected) == 160 and detected[0] == 0 and detected[-1] == len(content) - 1
    path.write_bytes(content + b" ")
    assert identity(config) != before


def test_windows_line_endings_are_accepted(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\r\n{"text": "two"}\r\n')
    assert texts_of(tmp_path / "a.txt") == ["one\ntwo"] and texts_of(tmp_path / "a.jsonl") == ["one", "two"]


def test_the_choice_of_held_out_documents_never_changes():
    """A change of this choice trains on documents that earlier runs kept for validation."""
    assert [number for number in range(20) if is_held_out(str(number), 0.2)] == [8, 9]


def test_empty_documents_are_skipped_on_request(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": " "}\n{"text": "y"}\n')
    assert texts_of(tmp_path / "a.jsonl", skip_empty=True) == ["x", "y"]


def test_a_list_of_globs_is_written_on_the_command_line():
    config = configured(["data=files", "data.path=[a/*.txt, b/**/*.jsonl]"]).data
    assert config.path == ["a/*.txt", "b/**/*.jsonl"]


def test_an_invalid_path_is_rejected(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    existing, neither = str(tmp_path / "a.txt"), r"data\.path=.*: neither a glob of files nor a list of globs; use \["
    for source, path, message in (
        ("text", [], r"data\.path=null|data\.path=\[\]"),
        ("text", [existing, "none/*.txt"], r"data\.path='none/\*\.txt': matches no file"),
        ("text", [existing, 3], neither),
        ("text", {"a": "b"}, neither),
        ("tokens", ["a", "b"], r"data\.path=.*: data\.source=tokens reads one path; set the directory"),
        ("text", "nosuch://bucket/a.txt", r"nosuch:// is not known; use s3://, gs://, https:// or a local path"),
    ):
        with one_line(message):
            check_data(DataConfig(source=source, path=path, tokenizer_vocab=300), "gpt_tiny")
    with one_line(r"data\.path=no/such: this dataset cannot be loaded"):
        texts_of("no/such", source="hub")
