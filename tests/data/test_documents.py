"""All sources yield the same documents, and errors name file and line."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpt4d.config import ConfigError, DataConfig, check_data, patterns
from gpt4d.data import sources
from gpt4d.data.documents import documents, files, identity, is_held_out, readers, size
from tests.data import flip_bit
from tests.support.settings import configured

TEXTS = ["one\ntwo", "drei, vier – fünf", "六 " * 3 + "end"]


def zst(content: bytes) -> bytes:
    import zstandard

    return zstandard.compress(content)


def lines_of_json(key="text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in TEXTS).encode()


def damaged_gz() -> bytes:
    """Return a file whose first block has an invalid type."""
    content = gzip.compress(lines_of_json(), mtime=0)
    return content[:10] + b"\x07" + content[11:]


def not_utf8_in_parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array([b"fine", b"\xff\xfe"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": text}), content := io.BytesIO())
    return content.getvalue()


def as_text(directory):
    for number, text in enumerate(TEXTS):
        (directory / f"{number}.txt").write_text(text, encoding="utf-8")
    return text_config(directory)


def text_config(directory):
    return DataConfig(source="text", path=str(directory / "*.txt"))


def as_compressed_text(directory):
    (directory / "0.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    (directory / "1.txt.zst").write_bytes(zst(TEXTS[1].encode()))
    (directory / "2.txt").write_bytes(TEXTS[2].encode())
    return DataConfig(source="text", path=str(directory / "*"))


def as_json(directory):
    (directory / "a.jsonl").write_bytes(lines_of_json("body"))
    return DataConfig(source="jsonl", path=str(directory / "a.jsonl"), column="body")


def as_compressed_json(directory):
    (directory / "a.jsonl.zst").write_bytes(zst(lines_of_json()))
    return DataConfig(source="jsonl", path=str(directory / "*.zst"))


def as_parquet(directory):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": TEXTS}), directory / "a.parquet")
    return DataConfig(source="parquet", path=str(directory / "*.parquet"))


def as_saved_dataset(directory):
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(str(directory / "d"))
    return DataConfig(source="hub", path=str(directory / "d"))


def as_hub_copy(directory):
    (directory / "d").mkdir()
    (directory / "d" / "train.jsonl").write_bytes(lines_of_json())
    return DataConfig(source="hub", path=str(directory / "d"))


def as_hub_copy_of_several_files(directory):
    (directory / "d").mkdir()
    for number, line in enumerate(lines_of_json().splitlines()):
        (directory / "d" / f"train-{number:05}-of-00003.jsonl").write_bytes(line)
    return DataConfig(source="hub", path=str(directory / "d"))


def as_csv(directory):
    with open(directory / "a.csv", "w", newline="", encoding="utf-8-sig") as file:  # as Excel writes it
        rows = csv.writer(file)
        rows.writerows([["id", "text"], *([number, text] for number, text in enumerate(TEXTS))])
    return DataConfig(source="csv", path=str(directory / "*.csv"))


def arrow(write) -> bytes:
    """Return an Arrow file in two batches, by one of pyarrow's writers."""
    import pyarrow

    table = pyarrow.table({"id": [1, 2, 3], "text": TEXTS})
    with write(content := io.BytesIO(), table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return content.getvalue()


def as_arrow(directory):
    from pyarrow import ipc

    (directory / "a.arrow").write_bytes(arrow(ipc.new_file))
    return DataConfig(source="arrow", path=str(directory / "a.arrow"))


def as_compressed_arrow(directory):
    from pyarrow import ipc

    (directory / "a.arrow.zst").write_bytes(zst(arrow(ipc.new_stream)))
    return DataConfig(source="arrow", path=str(directory / "a.arrow.*"))


def as_files_of_several_formats(directory):
    """Three texts in three formats and compressions, which a list of globs matches, the second text twice."""
    (directory / "b").mkdir()
    (directory / "0.txt.xz").write_bytes(lzma.compress(TEXTS[0].encode()))
    (directory / "b" / "1.jsonl.bz2").write_bytes(bz2.compress(json.dumps({"text": TEXTS[1]}).encode() + b"\n"))
    (directory / "b" / "2.csv.gz").write_bytes(gzip.compress(f'text\n"{TEXTS[2]}"\n'.encode()))
    patterns = [str(directory / pattern) for pattern in ("b/**/*", "0.txt.xz", "b/1*")]
    return DataConfig(source="files", path=patterns)


FILES = [
    as_text, as_compressed_text, as_json, as_compressed_json, as_parquet, as_csv, as_arrow, as_files_of_several_formats,
]  # fmt: skip
KINDS = [*FILES, as_compressed_arrow, as_saved_dataset, as_hub_copy]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_all_sources_yield_the_same_documents(tmp_path, kind):
    assert [document.text for document in documents(kind(tmp_path))] == TEXTS


@pytest.mark.parametrize("kind", [*KINDS, as_hub_copy_of_several_files], ids=lambda kind: kind.__name__)
def test_the_readers_of_all_files_yield_the_documents_in_order(tmp_path, kind):
    config = kind(tmp_path)
    found = [] if config.source == "hub" else files(config)
    read = [[document.text for document in reader()] for reader in readers(config, found)]
    assert list(itertools.chain(*read)) == TEXTS
    if kind in (as_text, as_hub_copy_of_several_files):
        assert len(read) == 3


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.__name__)
def test_documents_count_the_bytes_read_of_the_files(tmp_path, kind):
    config = kind(tmp_path)
    bytes_read = [document.bytes_read for document in documents(config)]
    assert bytes_read == sorted(bytes_read) and bytes_read[0] > 0 and bytes_read[-1] == size(config)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: invalid JSON .* fix or remove the line"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', r"a\.jsonl:2: no text in data\.column=text; .* \(here: body\)"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: no text in data\.column=text; .* \(here: none\)"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: byte 10 is not UTF-8; convert the file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": " "}\n', r"a\.jsonl:2: an empty document; .* data\.skip_empty=true"),
        ("a.jsonl", b'{"text": "a \\ud800"}\n', r"a\.jsonl:1: character 2 of data\.column=text is half of a surrogate"),
        ("a.jsonl", b'{"text": "x", "id": ' + b"1" * 5000 + b"}\n", r"a\.jsonl:1: invalid JSON .* fix or remove"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl:1: invalid JSON .* fix or remove the line"),
        ("a.jsonl.gz", gzip.compress(lines_of_json(), mtime=0)[:-9], r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", damaged_gz(), r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz: cannot be read \(the file is empty\)"),
        ("a.jsonl.zst", b"nonsense", r"a\.jsonl\.zst: cannot be read"),
        ("a.jsonl.zst", zst(lines_of_json())[:-3], r"a\.jsonl\.zst: cannot be read \(the file is truncated\)"),
        ("a.jsonl.zst", zst(lines_of_json()) * 2 + zst(b"{}")[:-3], r"cannot be read \(the file is truncated\)"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst: cannot be read \(the file is empty\)"),
        ("a.jsonl.xz", lzma.compress(lines_of_json())[:-9], r"a\.jsonl\.xz: cannot be read"),
        ("a.jsonl.xz", b"nonsense", r"a\.jsonl\.xz: cannot be read"),
        ("a.jsonl.bz2", bz2.compress(lines_of_json())[:-9], r"a\.jsonl\.bz2: cannot be read"),
        ("a.jsonl.bz2", b"", r"a\.jsonl\.bz2: cannot be read \(the file is empty\)"),
        (
            "a.csv",
            b'text\n"fine"\n"open\n',
            r"a\.csv:3: invalid CSV \(unexpected end of data\); fix or remove the line",
        ),
        ("a.csv", b"id,body\n1,x\n", r"a\.csv:2: no text in data\.column=text; .* \(here: id, body\)"),
        ("a.csv", b"text,id\n\xff,1\n", r"a\.csv:2: byte 0 is not UTF-8"),
        ("a.arrow", b"nonsense", r"a\.arrow: cannot be read"),
        ("a.arrow", b"", r"a\.arrow: cannot be read"),
        ("a.parquet", b"nonsense", r"a\.parquet: cannot be read"),
        ("a.parquet", not_utf8_in_parquet(), r"a\.parquet: cannot be read \(.*utf-8"),
    ],
)
def test_errors_name_the_file_the_line_and_a_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        list(documents(DataConfig(source="files", path=str(tmp_path / name))))
    assert "\n" not in str(raised.value)


def test_library_messages_of_several_lines_become_one_line(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    def failing(*_):
        raise pyarrow.ArrowInvalid("one\n  two\nthree")

    config = as_parquet(tmp_path)
    monkeypatch.setattr(parquet, "ParquetFile", failing)
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read \(one two three\); download or create"):
        list(documents(config))


@pytest.mark.parametrize("content", [b'{"text": "x"}\n{"text": \n', b'{"text": "\xff"}\n'], ids=["JSON", "UTF-8"])
def test_an_invalid_file_of_a_hub_copy_is_reported_in_one_line(tmp_path, content):
    config = as_hub_copy(tmp_path)
    (tmp_path / "d" / "train.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"d: row \d+: cannot be read \(.*fix the dataset") as raised:
        list(documents(config))
    assert "\n" not in str(raised.value)


def test_all_zst_frames_are_read_and_frames_without_text_skipped(tmp_path):
    """The tool pzstd writes one frame per piece of text, each after a frame that contains its length."""
    skippable = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"long"
    content = lines_of_json()
    frames = [skippable, zst(content[:20]), skippable, zst(b""), zst(content[20:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    config = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl.zst"))
    assert [document.text for document in documents(config)] == TEXTS


def test_zst_files_are_decompressed_lazily(tmp_path):
    """The first line is yielded before the truncated end is read."""
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(100_000))
    (tmp_path / "a.jsonl.zst").write_bytes(zst(lines)[:-3])
    assert next(documents(DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl.zst")))).text == "0"


def test_a_file_that_a_glob_matches_twice_is_read_once(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "one.txt").write_text("one")
    config = DataConfig(source="text", path=str(tmp_path / "**" / "**" / "*.txt"))
    assert [document.text for document in documents(config)] == ["one"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_only_changed_content_gives_a_corpus_another_identity(tmp_path, kind):
    (first := tmp_path / "first").mkdir()
    before = identity(config := kind(first))
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
    assert [document.text for document in documents(text_config(tmp_path))] == ["one\ntwo"]
    rows = documents(DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl")))
    assert [document.text for document in rows] == ["one", "two"]


def test_the_choice_of_held_out_documents_never_changes():
    """A change of this choice trains on documents that earlier runs kept for validation."""
    assert [number for number in range(20) if is_held_out(str(number), 0.2)] == [8, 9]


def test_empty_documents_are_skipped_on_request(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": " "}\n{"text": "y"}\n')
    config = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), skip_empty=True)
    assert [document.text for document in documents(config)] == ["x", "y"]


def test_a_missing_dataset_is_reported_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path=no/such: this dataset cannot be loaded"):
        list(documents(DataConfig(source="hub", path="no/such")))


def test_documents_are_read_lazily(tmp_path):
    """The first document is yielded before the second, which is invalid, is read."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\nnonsense\n')
    assert next(documents(DataConfig(source="jsonl", path=str(Path(tmp_path) / "a.jsonl")))).text == "x"


def test_a_list_of_globs_is_written_on_the_command_line():
    config = configured(["data=files", "data.path=[a/*.txt, b/**/*.jsonl]"]).data
    assert config.path == ["a/*.txt", "b/**/*.jsonl"]


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("text", [], r"data\.path=null|data\.path=\[\]"),
        ("text", ["README.md", "none/*.txt"], r"data\.path='none/\*\.txt': matches no file"),
        ("text", ["README.md", 3], r"data\.path=.*: neither a glob of files nor a list of globs; use \["),
        ("text", {"a": "b"}, r"data\.path=.*: neither a glob of files nor a list of globs; use \["),
        ("tokens", ["a", "b"], r"data\.path=.*: data\.source=tokens reads one path; set the directory"),
        ("text", "nosuch://bucket/a.txt", r"nosuch:// is not known; use s3://, gs://, https:// or a local path"),
    ],
)
def test_an_invalid_path_is_rejected(source, path, message):
    with pytest.raises(ConfigError, match=message):
        check_data(DataConfig(source=source, path=path, tokenizer_vocab=300), "gpt_tiny")
