"""Random numbers that do not depend on the grid: pure functions of a key and a global index.

A sequential generator gives different numbers to tensors that are sharded differently. Here each number is a hash
(SplitMix64's finalizer) of its global position, so every rank computes only its own shard, and all grids, CPUs and GPUs
agree bit by bit.
"""

import hashlib
import math

import torch

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit number
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
_CHUNK = 1 << 20  # numbers computed at once, which bounds the memory of the 64-bit intermediates


def key(*parts: int | str) -> int:
    """Return a signed 64-bit key for a tuple such as (seed, "blocks.0.mlp.up.weight")."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # clear the sign bits that torch shifts in


def mix(x: torch.Tensor) -> torch.Tensor:
    """Hash an int64 tensor **in place** and return it. Sums and products wrap around."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def fold(state: int | torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Derive a key for each ``index`` (int64, any shape) from ``state``: a key, or keys that broadcast with it."""
    return mix((index + 1) * _GOLDEN + state)


def normal(state: int, shape: tuple[int, ...], slices: tuple[slice, ...]) -> torch.Tensor:
    """Return ``slices`` of a global tensor of ``shape`` filled with standard normal numbers: float32 on the CPU.

    ``state`` is the tensor's key; each dim has a slice with start and stop.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    index = torch.zeros((), dtype=torch.int64)
    for cut, stride in zip(slices[1:], strides[1:], strict=True):
        index = index.unsqueeze(-1) + torch.arange(cut.start, cut.stop) * stride
    rows = torch.arange(slices[0].start, slices[0].stop) * strides[0]
    out = torch.empty(len(rows), index.numel())
    step = max(1, _CHUNK // max(1, index.numel()))
    for start in range(0, len(rows), step):
        bits = fold(state, rows[start : start + step, None] + index.reshape(1, -1))
        # Box-Muller in float64: 32 bits give the radius, 32 the angle.
        radius = ((_shift_right(bits, 32).double() + 0.5) / 2**32).log_().mul_(-2).sqrt_()
        angle = (bits & 0xFFFFFFFF).double() * (2 * math.pi / 2**32)
        out[start : start + step] = radius * angle.cos_()
    return out.reshape([cut.stop - cut.start for cut in slices])


def keep_mask(rows: torch.Tensor, columns: int, offset: int, drop: float) -> torch.Tensor:
    """Return the boolean mask [*rows, columns] of the elements that dropout with probability ``drop`` keeps.

    ``rows`` are int64 keys, one per row; the columns are ``offset`` to ``offset + columns`` of the global row.
    One hash serves four neighboring columns, 16 bits each, so probabilities are multiples of 2^-16.
    """
    first, last = offset // 4, -(-(offset + columns) // 4)
    hashes = fold(rows.unsqueeze(-1), torch.arange(first, last, device=rows.device))
    lanes = hashes.view(torch.int16)[..., offset - 4 * first :][..., :columns]
    return lanes >= round(drop * 2**16) - 2**15
