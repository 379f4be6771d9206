"""Which sequence is the i-th of a run: a pure function of (seed, i), whatever the grid."""

import hashlib
import math
from fractions import Fraction
from functools import lru_cache

import numpy as np

from gpt4d.config import ConfigError
from gpt4d.data.tokens import Tokens

_ROUNDS = 4
_BLOCK = 4096  # sequences whose places are computed at once
_PERIOD = 100_000  # of a blend, at the most: its choices are kept in memory


def permuted(indices: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where ``indices`` go under the pseudo-random permutation of ``range(size)`` that ``key`` names.

    A Feistel network over the next power of two, walked until it falls inside: no table, no memory.
    """
    bits = (size - 1).bit_length()
    low = np.uint64(bits - bits // 2)
    masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << int(low)) - 1)
    keys = [hashlib.blake2b(repr((key, turn)).encode(), digest_size=8).digest() for turn in range(_ROUNDS)]
    keys = np.frombuffer(b"".join(keys), "<u8")
    result = indices.astype(np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        halves = [result[walking] >> low, result[walking] & masks[1]]
        for turn, turn_key in enumerate(keys):
            here, other = turn % 2, (turn + 1) % 2
            halves[here] ^= _mixed(halves[other] + turn_key) & masks[here]
        result[walking] = halves[0] << low | halves[1]
        walking = walking[result[walking] >= size]
    return result.astype(np.int64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood): each bit of the result depends on each of the value."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Sequences:
    """Tokens cut into sequences of ``length``, each with the token that follows each of them.

    Sequence ``i`` is number ``i mod count`` of its epoch's order.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int, shuffle: bool):
        self.tokens, self.length, self.seed, self.shuffle = tokens, length, seed, shuffle
        self.count = max(0, len(tokens) - 1) // length
        self._at_once = min(_BLOCK, 4 * max(1, self.count))  # a permutation for each epoch: a few of them
        self._block = lru_cache(maxsize=4)(self._positions_of_block)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """These sequences of the run: [n, length + 1], as the files have them."""
        return self.tokens.rows(self.positions(indices) * self.length, self.length + 1)

    def positions(self, indices: np.ndarray) -> np.ndarray:
        """Which of the ``count`` sequences of the files these of the run are."""
        if not self.shuffle:
            return indices % self.count
        blocks, places = np.divmod(indices, self._at_once)
        if blocks[0] == blocks[-1] and (blocks == blocks[0]).all():  # nearly always
            return self._block(int(blocks[0]))[places]
        result = np.empty_like(indices)
        for block in np.unique(blocks).tolist():
            result[blocks == block] = self._block(block)[places[blocks == block]]
        return result

    def _positions_of_block(self, block: int) -> np.ndarray:
        """Of so many sequences in a row: one by one they would cost more than to read them."""
        epochs, within = np.divmod(np.arange(self._at_once) + block * self._at_once, self.count)
        for epoch in np.unique(epochs).tolist():
            within[epochs == epoch] = permuted(within[epochs == epoch], self.count, self.seed, epoch)
        return within


class Blend:
    """Several ``Sequences`` mixed by weight: of the first n of a run, each source has its share rounded up or down, so
    of any n in a row its share give or take less than two.

    The choice repeats itself after ``period`` sequences, which have exactly the weights: 0.7 and 0.3 after ten.
    ConfigError for weights that repeat themselves too late.
    """

    def __init__(self, sources: list[Sequences], weights: list[float]):
        assert len(sources) == len(weights) and all(source.count for source in sources)
        self.sources = sources
        shares = whole_shares(weights)
        self.period = sum(shares)
        taken, choices, before = [0] * len(shares), [], []
        for place in range(self.period):
            # Each source's next sequence has a first and a last place that keep it to its share. Of those that may come
            # here the one that must come first comes: that misses no last place where none need be missed.
            due = [
                (-(-(done + 1) * self.period // share), source)
                for source, (share, done) in enumerate(zip(shares, taken, strict=True))
                if done * self.period // share <= place
            ]
            source = min(due)[1]
            choices.append(source)
            before.append(taken[source])
            taken[source] += 1
        self.length = sources[0].length
        self.choices, self.before, self.shares = np.array(choices), np.array(before), np.array(shares)
        self.count = min(source.count * self.period // share for source, share in zip(sources, shares, strict=True))

    def choose(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which source these sequences of the run are from, and which of that source's they are."""
        rounds, places = np.divmod(indices, self.period)
        sources = self.choices[places]
        return sources, rounds * self.shares[sources] + self.before[places]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """As ``Sequences.rows``."""
        sources, numbers = self.choose(indices)
        rows = np.empty((len(indices), self.length + 1), self.sources[0].tokens.dtype)
        for source in np.unique(sources).tolist():
            rows[sources == source] = self.sources[source].rows(numbers[sources == source])
        return rows


def whole_shares(weights: list[float]) -> list[int]:
    """The smallest whole numbers in the very proportions of the weights as they are written in decimals.

    ConfigError, with weights that would do, if they add up to too many.
    """
    written = [Fraction(str(weight)) for weight in weights]
    shares = _smallest(written)
    if sum(shares) > _PERIOD:
        near = _smallest([max(Fraction(1, 1000), round(weight / sum(written), 3)) for weight in written])
        raise ConfigError(
            f"data.blend: the weights {', '.join(map(str, weights))} repeat themselves only after more than "
            f"{_PERIOD:,} sequences; weights that would do: {', '.join(map(str, near))}"
        )
    return shares


def _smallest(weights: list[Fraction]) -> list[int]:
    whole = [weight * math.lcm(*(weight.denominator for weight in weights)) for weight in weights]
    divisor = math.gcd(*map(int, whole))
    return [int(share) // divisor for share in whole]
