import json

import numpy as np
import torch

from gpt4d.config import DataConfig


def small_corpus(corpus, tmp_path) -> DataConfig:
    """Return the data configuration of the tests' small corpus, encoded in this process."""
    paths = {"path": corpus, "cache_dir": str(tmp_path / "c")}
    return DataConfig("words", "text", tokenizer_vocab=300, validation_fraction=0.2, processes=1, **paths)


def batch(data, first, size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of ``size`` samples from ``first`` on."""
    rows = torch.from_numpy(data.rows(np.arange(first, first + size))).long()
    return rows[:, :-1], rows[:, 1:]


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def json_edit(name, change):
    """Return a function that applies ``change`` to the JSON file ``name`` of a directory."""

    def edit(directory):
        content = json.loads((directory / name).read_bytes())
        (directory / name).write_text(json.dumps(change(content) or content))

    return edit
