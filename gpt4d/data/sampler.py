"""Which sequence is the i-th of a run: a pure function of (seed, i), whatever the grid."""

import hashlib

import numpy as np
import torch

_ROUNDS = 4


def permuted(index: int, size: int, *key: int) -> int:
    """Where ``index`` goes under the pseudo-random permutation of ``range(size)`` that ``key`` names.

    A Feistel network over the next power of four, walked until it falls inside: no table, no memory.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(repr((key, turn, right)).encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


class Sequences:
    """A token file cut into sequences of ``length`` tokens, each with the token that follows each of them.

    Sequence ``i`` of the run is number ``i mod len`` of its epoch's order.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int, shuffle: bool):
        self.tokens, self.length, self.seed, self.shuffle = tokens, length, seed, shuffle
        self.count = max(0, len(tokens) - 1) // length

    def position(self, index: int) -> int:
        """Which of the ``count`` sequences of the file is the ``index``-th of the run."""
        epoch, within = divmod(index, self.count)
        return permuted(within, self.count, self.seed, epoch) if self.shuffle else within

    def batch(self, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequences ``first`` … of the run: inputs and targets [size, length] and their numbers [size], all int64."""
        numbers = np.arange(first, first + size)
        starts = [self.position(int(i)) * self.length for i in numbers]
        rows = np.stack([self.tokens[s : s + self.length + 1] for s in starts]).astype(np.int64)
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.from_numpy(numbers)
