"""Prepared data of tests: token files, Megatron's files, blends, damages, and the rows that are read of them."""

import json
import struct
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data.prepare import prepare
from gpt4d.data.tokens import TokenFiles, Tokens

END = 259  # the last token of each of random_documents
_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


@contextmanager
def one_line(message: str):
    """Expect a ConfigError of one line in which the regular expression ``message`` occurs."""
    with pytest.raises(ConfigError, match=message) as raised:
        yield
    assert "\n" not in str(raised.value)


def small_corpus(corpus: str, directory: Path) -> DataConfig:
    """Return the data configuration of the tests' small corpus, encoded in this process."""
    paths = {"path": corpus, "cache_dir": str(directory / "c")}
    return DataConfig("words", "text", tokenizer_vocab=300, validation_fraction=0.2, processes=1, **paths)


def three_sources(corpus: str, directory: Path) -> list[Path]:
    """Return the directories of three token files with one tokenizer and different words."""
    texts = {"words": corpus}
    for name, words in (("other", "kappa iota theta eta zeta "), ("digits", "0123 456 ")):
        (directory / f"{name}.txt").write_text(words * 300)
        texts[name] = str(directory / f"{name}.txt")
    found: list[Path] = []
    for name, path in texts.items():
        tokenizer = {"tokenizer": str(found[0]), "tokenizer_vocab": None} if found else {"tokenizer_vocab": 300}
        config = DataConfig(name, "text", path, validation_fraction=0, processes=1, **tokenizer)
        found.append(prepare(config, directory / name).directory)
    return found


def _weights(weights: dict) -> str:
    return "{" + ", ".join(f"{path}: {weight}" for path, weight in weights.items()) + "}"


def blend_of(weights: dict) -> list[str]:
    """Return the overrides of a blend with constant weights by path."""
    return ["data=blend", f"data.blend={_weights(weights)}"]


def blend(*stages: tuple[float, dict]) -> list[str]:
    """Return the overrides of a blend of stages: the fraction at which each begins, and weights by path."""
    return ["data=blend", f"data.blend={{{', '.join(f'{at}: {_weights(weights)}' for at, weights in stages)}}}"]


def batch(data, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of ``size`` samples from ``first`` on."""
    rows = torch.from_numpy(data.rows(np.arange(first, first + size))).long()
    return rows[:, :-1], rows[:, 1:]


def documents_of(files: TokenFiles, split: str) -> list[np.ndarray]:
    """Return the tokens of each document."""
    ends, tokens = files.document_ends(split).tolist(), files.tokens(split)
    return [tokens[start:stop] for start, stop in pairwise([0, *ends])]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def json_edit(name: str, change):
    """Return a function that applies ``change`` to the JSON file ``name`` of a directory."""

    def edit(directory: Path) -> None:
        content = json.loads((directory / name).read_bytes())
        (directory / name).write_text(json.dumps(change(content) or content))

    return edit


def write(prefix: Path, documents, dtype: str = "uint16", sentences: int = 1) -> str:
    """Write documents as Megatron's tools/preprocess_data.py does, each split into ``sentences`` sequences."""
    sequences = [part for ids in documents for part in np.array_split(np.array(ids, dtype), sentences)]
    lengths = np.array([len(part) for part in sequences], "<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(dtype).itemsize
    firsts = np.arange(len(documents) + 1, dtype="<i8") * sentences
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, _CODES[dtype], len(sequences), len(firsts))
    arrays = lengths, pointers.astype("<i8"), firsts
    prefix.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in sequences))
    return str(prefix)


def random_documents(seed: int = 0, count: int = 60, vocabulary: int = 259, end=(END,)) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    lengths = [0, 1, *draw.integers(1, 90, count - 2).tolist()]
    return [[*draw.integers(0, vocabulary, length).tolist(), *end] for length in lengths]


def in_parts(count: int, size: int = 37) -> Tokens:
    """Return tokens 0 to ``count`` - 1 in parts of several lengths, including an empty part."""
    ids = np.arange(count, dtype=np.uint16)
    cuts = sorted({0, count // 3, *range(0, count, size), count})
    parts = [ids[a:b] for a, b in pairwise(cuts)]
    return Tokens([*parts[:1], ids[:0], *parts[1:]], "uint16", [], 2**16)
