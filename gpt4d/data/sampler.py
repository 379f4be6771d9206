"""Which sequence is the i-th of a run: a pure function of (seed, i), whatever the grid."""

import hashlib
import math

import numpy as np
import torch

from gpt4d.data.tokens import Tokens

_ROUNDS = 4
_PERIOD = 10_000  # of a blend, at the most about


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
    """Tokens cut into sequences of ``length``, each with the token that follows each of them.

    Sequence ``i`` is number ``i mod count`` of its epoch's order.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int, shuffle: bool):
        self.tokens, self.length, self.seed, self.shuffle = tokens, length, seed, shuffle
        self.count = max(0, len(tokens) - 1) // length

    def position(self, index: int) -> int:
        """Which of the ``count`` sequences of the files is the ``index``-th of the run."""
        epoch, within = divmod(index, self.count)
        return permuted(within, self.count, self.seed, epoch) if self.shuffle else within

    def row(self, index: int) -> np.ndarray:
        """The ``index``-th sequence of the run: [length + 1]."""
        start = self.position(index) * self.length
        return self.tokens[start : start + self.length + 1]


class Blend:
    """Several ``Sequences`` mixed by weight: of any so many sequences in a row, each source has its share, give or take
    one or two.

    The choice repeats itself after ``period`` sequences, which have exactly the weights.
    """

    def __init__(self, sources: list[Sequences], weights: list[float]):
        assert len(sources) == len(weights) and all(source.count for source in sources)
        self.sources = sources
        shares = _whole_shares(weights)
        self.period = sum(shares)
        taken, self.choices, self.before = [0] * len(shares), [], []
        for place in range(self.period):
            behind = [share * (place + 1) - self.period * done for share, done in zip(shares, taken, strict=True)]
            source = behind.index(max(behind))  # furthest behind its share
            self.choices.append(source)
            self.before.append(taken[source])
            taken[source] += 1
        self.shares = shares
        self.count = min(source.count * self.period // share for source, share in zip(sources, shares, strict=True))

    def choice(self, index: int) -> tuple[int, int]:
        """Which source the ``index``-th sequence of the run is from, and which of that source's it is."""
        rounds, place = divmod(index, self.period)
        source = self.choices[place]
        return source, rounds * self.shares[source] + self.before[place]

    def row(self, index: int) -> np.ndarray:
        source, number = self.choice(index)
        return self.sources[source].row(number)


def _whole_shares(weights: list[float]) -> list[int]:
    """The smallest whole numbers in the proportions of ``weights``, to four digits."""
    total = sum(weights)
    parts = [max(1, round(weight / total * _PERIOD)) for weight in weights]
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


def batch(sequences: Sequences | Blend, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences ``first`` … of the run: inputs and targets [size, length] and their numbers [size], all int64."""
    numbers = np.arange(first, first + size)
    rows = torch.from_numpy(np.stack([sequences.row(int(i)) for i in numbers]).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.from_numpy(numbers)
