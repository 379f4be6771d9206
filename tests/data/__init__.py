import json

import numpy as np
import torch

from gpt4d.config import DataConfig


def words(corpus, tmp_path) -> DataConfig:
    """The small corpus of the tests, prepared in this process."""
    where = {"path": corpus, "cache_dir": str(tmp_path / "c")}
    return DataConfig("words", "text", tokenizer_vocab=300, validation_fraction=0.2, processes=1, **where)


def batch(data, first, size) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of sequences ``first`` … of the run."""
    rows = torch.from_numpy(data.rows(np.arange(first, first + size))).long()
    return rows[:, :-1], rows[:, 1:]


def flip(path):
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


def rewrite(name, change):
    """A function that changes what a file of JSON says."""

    def harm(directory):
        content = json.loads((directory / name).read_bytes())
        (directory / name).write_text(json.dumps(change(content) or content))

    return harm
