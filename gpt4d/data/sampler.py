"""Samples of token files: the i-th sample of a run is a pure function of (seed, i), on every grid."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gpt4d.config import ConfigError
from gpt4d.data.loader import Counts
from gpt4d.data.tokens import TokenFiles, Tokens

_ROUNDS = 4
BLOCK = 4096  # number of samples whose positions are computed together
_MAX_PERIOD = 100_000  # maximum period of a blend, whose choices are in memory
IGNORED = -1  # target of a token without a loss


def permute(indices: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Return where a pseudo-random permutation of ``range(size)``, chosen by ``key``, moves ``indices``.

    A Feistel network permutes the range of the next power of two, and is repeated until the result is below ``size``:
    no table is stored.
    """
    bits = (size - 1).bit_length()
    low = np.uint64(bits - bits // 2)
    masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << int(low)) - 1)
    keys = np.concatenate([_hash(key, number) for number in range(_ROUNDS)])
    result = indices.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        halves = [result[outside] >> low, result[outside] & masks[1]]
        for number, round_key in enumerate(keys):
            target, source = number % 2, (number + 1) % 2
            halves[target] ^= _mix(halves[source] + round_key) & masks[target]
        result[outside] = halves[0] << low | halves[1]
        outside = outside[result[outside] >= size]
    return result.astype(np.int64)


def random_bits(indices: np.ndarray, *key: int | str) -> np.ndarray:
    """Return a pseudo-random Boolean for each index, a function of ``key`` and the index."""
    return _mix(_mix(indices.astype(np.uint64)) + _hash(key)) >> np.uint64(63) == 1


def _hash(*values: object) -> np.ndarray:
    """Return a hash of values as an array of one number."""
    return np.frombuffer(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "<u8")


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finalizer (Steele, Lea, Flood): each bit of the result depends on every bit of the value."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Order:
    """Order in which a run reads ``count`` samples: sample ``i`` has position ``i mod count`` in its epoch's order."""

    def __init__(self, count: int, seed: int, shuffle: bool):
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._block_size = min(BLOCK, 4 * max(1, count))  # each epoch in a block costs a permutation
        self._block = lru_cache(maxsize=4)(self._positions_of_block)

    def positions(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the position of each sample among the ``count`` samples of the files."""
        if not self.shuffle:
            return sample_ids % self.count
        blocks, offsets = np.divmod(sample_ids, self._block_size)
        if blocks[0] == blocks[-1] and (blocks == blocks[0]).all():  # the usual case
            return self._block(int(blocks[0]))[offsets]
        result = np.empty_like(sample_ids)
        for block in np.unique(blocks).tolist():
            result[blocks == block] = self._block(block)[offsets[blocks == block]]
        return result

    def _positions_of_block(self, block: int) -> np.ndarray:
        """Return the positions of a block of consecutive samples. Single positions take longer than reading samples."""
        epochs, within = np.divmod(np.arange(self._block_size) + block * self._block_size, self.count)
        for epoch in np.unique(epochs).tolist():
            within[epochs == epoch] = permute(within[epochs == epoch], self.count, self.seed, epoch)
        return within


class Sequences:
    """Tokens cut into ``count`` sequences of ``length``, each followed by one more token as the last target."""

    def __init__(self, tokens: Tokens, length: int, seed: int, shuffle: bool):
        self.tokens, self.length, self.dtype = tokens, length, tokens.dtype
        self.count = max(0, len(tokens) - 1) // length
        self.row_shape: tuple[int, ...] = (length + 1,)
        self.order = Order(self.count, seed, shuffle)

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as rows [n, length + 1] in the files' dtype."""
        return self.tokens.rows(self.positions(sample_ids) * self.length, self.length + 1)

    def positions(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the position of each sample among the ``count`` sequences of the files."""
        return self.order.positions(sample_ids)


class DocumentSequences(Sequences):
    """Sequences with the documents of their tokens, by the ``ends`` of all documents in ``tokens``.

    A row is [3, length], int32, as in ``PackedSequences``: the tokens; the tokens to predict; and for
    each token the number of documents that end before it in the sequence. Empty documents are not counted.
    """

    def __init__(self, tokens: Tokens, ends: np.ndarray, length: int, seed: int, shuffle: bool):
        super().__init__(tokens, length, seed, shuffle)
        self.ends, self.dtype, self.row_shape = ends, np.dtype(np.int32), (3, length)

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as rows [n, 3, length]."""
        starts = self.positions(sample_ids) * self.length
        tokens = self.tokens.rows(starts, self.length + 1)
        rows = np.zeros((len(sample_ids), *self.row_shape), self.dtype)
        rows[:, 0], rows[:, 1] = tokens[:, :-1], tokens[:, 1:]
        # Documents that end after the first token and before the last one.
        firsts, stops = (
            np.searchsorted(self.ends, places, side="right") for places in (starts, starts + self.length - 1)
        )
        for row, start, first, stop in zip(rows[:, 2], starts, firsts, stops, strict=True):
            row[self.ends[first:stop] - start] = 1
        rows[:, 2] = rows[:, 2].cumsum(1)
        return rows

    def counts(self, sample_ids: np.ndarray) -> Counts:
        """Return the numbers of tokens of the samples: all have a loss."""
        return Counts(*[len(sample_ids) * self.length] * 2)


class Packing(NamedTuple):
    """Documents by sequence."""

    documents: np.ndarray  # numbers, sequence after sequence; documents that exceed a sequence are left out
    bounds: np.ndarray  # [sequences + 1]: sequence i has documents[bounds[i] : bounds[i + 1]]


def pack(lengths: np.ndarray, capacity: int) -> Packing:
    """Assign documents to sequences of at most ``capacity`` tokens by best fit, the longest documents first.

    Sequences and their documents stay in the order of the files: a sequence is placed by its first document.
    """
    packed = np.flatnonzero(lengths <= capacity)
    order = packed[np.argsort(-lengths[packed], kind="stable")]
    sequence_of = np.empty(len(lengths), np.int64)
    by_space = defaultdict[int, list[int]](list)  # sequences by the number of tokens that they can still take
    spaces = 0  # a bit for each key of ``by_space`` that has sequences
    count = 0
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            sequence = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, sequence, count = capacity, count, count + 1
        sequence_of[document] = sequence
        by_space[space - length].append(sequence)
        spaces |= 1 << space - length
    firsts = np.full(count, len(lengths))
    np.minimum.at(firsts, sequence_of[packed], packed)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(firsts)] = np.arange(count)
    sequences = ranks[sequence_of[packed]]
    documents = packed[np.argsort(sequences, kind="stable")]
    return Packing(documents, np.concatenate([[0], np.bincount(sequences, minlength=count).cumsum()]))


class PackedSequences:
    """Complete conversations of a split, packed into sequences of ``length`` tokens (gpt4d.data.loader.Source).

    A row is [3, length], int32: the tokens; the tokens to predict, or ``IGNORED``; and for each token the number of
    conversations that end before it in the sequence. End-of-text tokens fill a sequence after its last conversation,
    and have -1 as this number (gpt4d.parallel.layers.sequence).

    Args:
        files: token files of conversations.
        split: ``train`` or ``validation``.
        length: number of tokens that a sequence predicts.
        seed: seed of the order.
        shuffle: shuffle the sequences in each epoch.
        multiple: append empty sequences, which have no loss, until this number divides ``count``.
    """

    dtype = np.dtype(np.int32)

    def __init__(self, files: TokenFiles, split: str, length: int, seed: int, shuffle: bool, multiple: int = 1):
        self.tokens, self.mask, self.end = files.tokens(split), files.mask(split), files.end_of_text
        self.row_shape: tuple[int, ...] = (3, length)
        self.capacity = length + 1  # a last token is only predicted
        self.ends = files.document_ends(split)
        self.starts = np.concatenate([[0], self.ends[:-1]]) if len(self.ends) else self.ends
        lengths = self.ends - self.starts
        self.documents, bounds = pack(lengths, self.capacity)
        self.long = np.flatnonzero(lengths > self.capacity)  # conversations that are left out
        self.filled = int(lengths[self.documents].sum())  # tokens in all sequences
        self.packed = len(bounds) - 1
        self.count = -(-self.packed // multiple) * multiple
        self.bounds = np.pad(bounds, (0, self.count - self.packed), mode="edge")
        parts = [np.add.reduceat(part, starts, dtype=np.int64) for part, starts in self._parts()]
        trained = np.concatenate([np.empty(0, np.int64), *parts])
        sequences = np.repeat(np.arange(self.count), np.diff(self.bounds))
        self._counts = np.zeros((self.count, 2), np.int64)  # tokens of each sequence: with a loss, and without padding
        np.add.at(self._counts, sequences, np.stack((trained, lengths), 1)[self.documents])
        self._counts[:, 1] = self._counts[:, 1].clip(max=length)
        self.order = Order(self.count, seed, shuffle)

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the mask of each part of the files, and the starts of its conversations within the part."""
        cuts = np.searchsorted(self.starts, [0, *self.mask.ends])
        for number, part in enumerate(self.mask.parts):
            starts = self.starts[cuts[number] : cuts[number + 1]]
            yield part, starts - starts[0]

    def counts(self, sample_ids: np.ndarray) -> Counts:
        """Return the numbers of tokens of the samples."""
        return Counts(*self._counts[self.order.positions(sample_ids)].sum(0).tolist())

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as rows [n, 3, length]."""
        rows = np.empty((len(sample_ids), *self.row_shape), self.dtype)
        for row, position in zip(rows, self.order.positions(sample_ids).tolist(), strict=True):
            self._fill(row, self.documents[self.bounds[position] : self.bounds[position + 1]].tolist())
        return rows

    def _fill(self, row: np.ndarray, documents: list[int]) -> None:
        ids, mask = np.full(self.capacity, self.end, self.dtype), np.zeros(self.capacity, bool)
        place = 0
        row[2] = -1
        for number, document in enumerate(documents):
            start, stop = int(self.starts[document]), int(self.ends[document])
            after = place + stop - start
            ids[place:after], mask[place:after] = self.tokens.document(start, stop), self.mask[start:stop]
            row[2, place:after] = number
            place = after
        row[0], row[1] = ids[:-1], np.where(mask[1:], ids[1:], IGNORED)


class Mixture:
    """Choices among sources by weight, which repeat after ``period`` samples.

    Among the first n samples, each source has its share of n, rounded up or down. So among any n consecutive samples,
    its count differs from its share by less than two. The counts of a period match the weights exactly: after ten
    samples for 0.7 and 0.3. Raises ConfigError for weights with too long a period.

    Attributes:
        shares: number of samples of each source in a period.
        choices: source of each sample of a period.
        before: number of earlier samples of the same source, for each sample of a period.
    """

    def __init__(self, weights: Sequence[float]):
        shares = integer_shares(weights)
        self.period = sum(shares)
        taken, choices, before = [0] * len(shares), [], []
        for place in range(self.period):
            # Each source's next sample has an earliest and a latest position that keep the source to its share. Among
            # the sources whose earliest position is reached, choose the source with the smallest latest position
            # (earliest deadline first). This rule misses no deadline if all can be met.
            deadlines = [
                (-(-(done + 1) * self.period // share), source)
                for source, (share, done) in enumerate(zip(shares, taken, strict=True))
                if share and done * self.period // share <= place
            ]
            source = min(deadlines)[1]
            choices.append(source)
            before.append(taken[source])
            taken[source] += 1
        self.choices, self.before, self.shares = np.array(choices), np.array(before), np.array(shares)

    def taken(self, samples: int) -> np.ndarray:
        """Return the number of samples of each source among the first ``samples``."""
        periods, rest = divmod(samples, self.period)
        return periods * self.shares + np.bincount(self.choices[:rest], minlength=len(self.shares))


class Blend:
    """A mixture of several sources of equal rows (gpt4d.data.loader.Source) by weights, which may change.

    Args:
        sources: the sources.
        weights: the weight of each source in each stage; 0: no sample. Each stage is a ``Mixture``, and each source
            continues after its last sample of the previous stage.
        firsts: the first sample of each stage, ascending from 0.
    """

    def __init__(self, sources: list[Any], weights: Sequence[Sequence[float]], firsts: Sequence[int] = (0,)):
        assert len(weights) == len(firsts) and not firsts[0] and all(source.count for source in sources)
        self.sources = sources
        stages = [Mixture(each) for each in weights]
        taken = [stage.taken(end - first) for stage, (first, end) in zip(stages, pairwise(firsts), strict=False)]
        self.firsts, self.periods = np.array(firsts), np.array([stage.period for stage in stages])
        self.offsets = self.periods.cumsum() - self.periods  # first index of each stage in ``choices``
        self.choices = np.concatenate([stage.choices for stage in stages])
        self._before = np.concatenate([stage.before for stage in stages])
        self._shares = np.stack([stage.shares for stage in stages])
        self._taken = np.cumsum([np.zeros(len(sources), np.int64), *taken], axis=0)
        self.row_shape = sources[0].row_shape
        self.dtype = np.result_type(*(source.dtype for source in sources))
        self.count = min(
            source.count * stage.period // share
            for stage in stages
            for source, share in zip(sources, stage.shares.tolist(), strict=True)
            if share
        )

    def choose(self, sample_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of each sample's source, and the sample id within that source."""
        stages = np.searchsorted(self.firsts, sample_ids, side="right") - 1
        periods, places = np.divmod(sample_ids - self.firsts[stages], self.periods[stages])
        places += self.offsets[stages]
        sources = self.choices[places]
        earlier = self._taken[stages, sources] + periods * self._shares[stages, sources]
        return sources, earlier + self._before[places]

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as rows [n, *row_shape] in the widest dtype of the sources."""
        sources, source_ids = self.choose(sample_ids)
        rows = np.empty((len(sample_ids), *self.row_shape), self.dtype)
        for source in np.unique(sources).tolist():
            rows[sources == source] = self.sources[source].rows(source_ids[sources == source])
        return rows

    def counts(self, sample_ids: np.ndarray) -> Counts:
        """Return the numbers of tokens of the samples, for sources whose rows include documents."""
        parts = zip(self.sources, self.by_source(sample_ids), strict=True)
        found = [source.counts(source_ids) for source, source_ids in parts if len(source_ids)]
        return Counts(*map(sum, zip(*found, strict=True)))

    def by_source(self, sample_ids: np.ndarray) -> list[np.ndarray]:
        """Return the samples of each source as sample ids within that source."""
        sources, source_ids = self.choose(sample_ids)
        return [source_ids[sources == number] for number in range(len(self.sources))]


def integer_shares(weights: Sequence[float]) -> list[int]:
    """Return the smallest integers in exactly the proportions of the weights as written in decimals.

    Raises ConfigError, with similar weights to use instead, if their sum is too large.
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    shares = _smallest_integers(fractions)
    if sum(shares) > _MAX_PERIOD:
        total = sum(fractions)
        similar = _smallest_integers([max(Fraction(1, 1000), round(weight / total, 3)) for weight in fractions])
        raise ConfigError(
            f"data.blend: the weights {', '.join(map(str, weights))} repeat only after more than {_MAX_PERIOD:,} "
            f"sequences; use weights such as: {', '.join(map(str, similar))}"
        )
    return shares


def _smallest_integers(weights: list[Fraction]) -> list[int]:
    multiples = [weight * math.lcm(*(weight.denominator for weight in weights)) for weight in weights]
    divisor = math.gcd(*map(int, multiples))
    return [int(multiple) // divisor for multiple in multiples]
