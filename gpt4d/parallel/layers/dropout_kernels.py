"""The kernels of dropout."""

import torch

from gpt4d.parallel import random


def dropped(x, rows, offset: int, p: float):
    return torch.where(random.keep_mask(rows, x.shape[-1], offset, p), x / (1 - p), 0)


def row_keys(samples, places, key: int):
    return random.fold(random.fold(key, samples), places)
