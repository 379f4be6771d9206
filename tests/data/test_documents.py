"""Every kind of source gives the same documents, and what is wrong with one is told with its file and line."""

import gzip
import json
from pathlib import Path

import pytest

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data.documents import documents, size

TEXTS = ["one\ntwo", "drei, vier – fünf", "六 " * 3 + "end"]


def zst(content: bytes) -> bytes:
    import zstandard

    return zstandard.compress(content)


def lines_of_json(key="text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in TEXTS).encode()


def as_text(directory):
    for number, text in enumerate(TEXTS):
        (directory / f"{number}.txt").write_text(text, encoding="utf-8")
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


def as_copy_of_the_hub(directory):
    (directory / "d").mkdir()
    (directory / "d" / "train.jsonl").write_bytes(lines_of_json())
    return DataConfig(source="hub", path=str(directory / "d"))


KINDS = [as_text, as_compressed_text, as_json, as_compressed_json, as_parquet, as_saved_dataset, as_copy_of_the_hub]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_documents_are_the_same_from_every_source(tmp_path, kind):
    assert [document.text for document in documents(kind(tmp_path))] == TEXTS


@pytest.mark.parametrize("kind", KINDS[:5], ids=lambda kind: kind.__name__)
def test_documents_say_how_much_of_the_files_is_read(tmp_path, kind):
    config = kind(tmp_path)
    read = [document.read for document in documents(config)]
    assert read == sorted(read) and read[0] > 0 and read[-1] == size(config)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl:2: not JSON .* mend the line, or remove it"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', r"a\.jsonl:2: no text under data.column=text; .* under: body"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: no text under data.column=text; .* nothing"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: byte 10 is not UTF-8; convert the file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": " "}\n', r"a\.jsonl:2: an empty document; .* data\.skip_empty=true"),
        ("a.jsonl.gz", gzip.compress(lines_of_json())[:-9], r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.zst", b"nonsense", r"a\.jsonl\.zst: cannot be read"),
        ("a.parquet", b"nonsense", r"a\.parquet: cannot be read"),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_mend(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    source = "parquet" if name.endswith("parquet") else "jsonl"
    with pytest.raises(ConfigError, match=said):
        list(documents(DataConfig(source=source, path=str(tmp_path / name))))


def test_empty_documents_are_skipped_where_that_is_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": " "}\n{"text": "y"}\n')
    config = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), skip_empty=True)
    assert [document.text for document in documents(config)] == ["x", "y"]


def test_a_dataset_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"data.path=no/such: no such dataset can be loaded"):
        list(documents(DataConfig(source="hub", path="no/such")))


def test_a_corpus_larger_than_memory_is_read_as_it_is_needed(tmp_path):
    """The first document comes before the second is looked at."""
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\nnonsense\n')
    assert next(documents(DataConfig(source="jsonl", path=str(Path(tmp_path) / "a.jsonl")))).text == "x"
