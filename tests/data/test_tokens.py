"""Token files are refused, by name, unless they are what their header says."""

import pytest

from gpt4d.config import ConfigError
from gpt4d.data import prepare
from gpt4d.data.tokens import TokenFiles
from tests.data import flip, rewrite, words


@pytest.fixture
def config(corpus, tmp_path):
    return words(corpus, tmp_path)


LIES = {
    "a list": lambda h: [h],
    "another format": lambda h: h.update(format="2"),
    "floats": lambda h: h.update(dtype="float16"),
    "wider than they are": lambda h: h.update(dtype="uint32"),
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
    "a file less": lambda h: h["parts"][0]["files"].pop("train_00000.idx") and None,
    "no checksum": lambda h: h["parts"][0]["files"]["train_00000.idx"].update(xxh3_128=None),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_cannot_be_so_is_refused(config, tmp_path, lie):
    directory = prepare.prepare(config, tmp_path / "out").directory
    rewrite("header.json", LIES[lie])(directory)
    with pytest.raises(ConfigError, match=r"header\.json: (no token files there|its)") as raised:
        TokenFiles.opened(directory)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("harm", ["truncated", "missing", "another tokenizer", "no header"])
def test_token_files_that_are_not_whole_are_refused_by_name(config, tmp_path, harm):
    directory = prepare.prepare(config, tmp_path / "out").directory
    victim = {"another tokenizer": "tokenizer.json", "no header": "header.json"}.get(harm, "train_00000.bin")
    path = directory / victim
    if harm in ("missing", "no header"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=victim):
        TokenFiles.opened(directory)


def test_a_flipped_bit_is_found_by_verify(config, tmp_path):
    directory = prepare.prepare(config, tmp_path / "out").directory
    flip(directory / "validation_00000.bin")
    with pytest.raises(ConfigError, match=r"validation_00000\.bin: damaged"):
        prepare.main([f"verify={directory}"])
