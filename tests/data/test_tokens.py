"""Token files that do not match their header are rejected, and the error names the file."""

import numpy as np
import pytest

from gpt4d.config import ConfigError
from gpt4d.data import prepare
from gpt4d.data.tokens import TokenFiles
from gpt4d.runtime.errors import RankError
from tests.support.data_files import flip_bit, json_edit, one_line


@pytest.fixture
def files(small, tmp_path):
    return prepare.prepare(small, tmp_path / "out")


INVALID_HEADERS = {
    "a list": lambda h: [h],
    "another format": lambda h: h.update(format="2"),
    "a format with other names of files": lambda h: h.update(format=3),
    "floats": lambda h: h.update(dtype="float16"),
    "a wider dtype": lambda h: h.update(dtype="uint32"),
    "vocabulary true": lambda h: h.update(vocabulary=True),
    "a vocabulary below 0": lambda h: h.update(vocabulary=-1),
    "another vocabulary": lambda h: h.update(vocabulary=h["vocabulary"] + 1),
    "another end": lambda h: h.update(end_of_text=h["end_of_text"] + 1),
    "no end": lambda h: h.pop("end_of_text") and None,
    "no identity": lambda h: h.pop("identity") and None,
    "parts as text": lambda h: h.update(parts="none"),
    "another token": lambda h: h["parts"][0]["train"].update(tokens=h["parts"][0]["train"]["tokens"] + 1),
    "another document": lambda h: h["parts"][0]["train"].update(documents=h["parts"][0]["train"]["documents"] + 1),
    "half a document": lambda h: h["parts"][0]["train"].update(documents=0.5),
    "a file elsewhere": lambda h: h["parts"][0]["files"].update({"../a": {"bytes": 0, "xxh3_128": ""}}),
    "a missing file": lambda h: h["parts"][0]["files"].pop("train_00000.idx") and None,
    "no checksum": lambda h: h["parts"][0]["files"]["train_00000.idx"].update(xxh3_128=None),
}


@pytest.mark.parametrize("change", INVALID_HEADERS)
def test_an_invalid_header_is_rejected(files, change):
    json_edit("header.json", INVALID_HEADERS[change])(files.directory)
    with one_line(r"header\.json: (no token files there|its)"):
        TokenFiles.open(files.directory)


@pytest.mark.parametrize("damage", ["truncated", "missing", "another tokenizer", "no header"])
def test_the_error_for_incomplete_token_files_names_the_file(files, damage):
    victim = {"another tokenizer": "tokenizer.json", "no header": "header.json"}.get(damage, "train_00000.tokens")
    path = files.directory / victim
    if damage in ("missing", "no header"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=victim):
        TokenFiles.open(files.directory)


def test_verify_detects_a_flipped_bit(files):
    flip_bit(files.directory / "validation_00000.tokens")
    with pytest.raises(ConfigError, match=r"validation_00000\.tokens: damaged"):
        prepare.main([f"verify={files.directory}"])


def test_an_id_beyond_the_vocabulary_is_rejected_with_its_file_and_offset(files):
    path = files.directory / "train_00000.tokens"
    content = np.fromfile(path, np.uint16)
    content[200] = 65535
    content.tofile(path)
    tokens, vocabulary = files.tokens("train"), files.header["vocabulary"]
    assert tokens.rows(np.array([0, 201]), 200).shape == (2, 200)
    message = rf"{path}: damaged, the token at byte 400 is 65535, but the vocabulary has {vocabulary} tokens; prepare"
    with pytest.raises(RankError, match=message):
        tokens.rows(np.array([0, 150]), 60)
