"""Random numbers that do not depend on the grid: pure functions of a key and a global index.

A sequential generator gives different numbers to tensors that are sharded differently. Here each number is a hash
(SplitMix64's finalizer) of its global index, so every rank computes only its own shard.

All numbers have the same bits on all grids, CPUs and GPUs, because the result of each operation is fully specified:
integer operations, table lookups, and single float32 multiplications and additions. Functions of the math library,
whose last bit differs between devices, only fill the tables. Rounding to float32 removes the difference.
"""

from __future__ import annotations

import functools
import hashlib
from statistics import NormalDist

from gpt4d.parallel.lazy import torch

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit number
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15
# Numbers computed at once. On a CPU, intermediates fit in a core's cache; on other devices, the limit bounds memory.
CPU_CHUNK, _DEVICE_CHUNK = 1 << 17, 1 << 24
MASK_CHUNK, _DEVICE_MASK_CHUNK = 1 << 20, 1 << 28  # elements of a mask that are hashed at once
_INTERVALS = 1 << 16  # equally probable intervals, in which a uniform distribution approximates the normal distribution


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
    """Derive a key for each ``index`` (int64, any shape) from ``state``, a key or a tensor of keys that broadcasts."""
    return mix((index + 1) * _GOLDEN + state)


def normal(
    state: int, shape: tuple[int, ...], slices: tuple[slice, ...], device: torch.device | None = None
) -> torch.Tensor:
    """Return ``slices`` of a global tensor of ``shape`` filled with standard normal numbers, float32, on ``device``.

    ``state`` is the tensor's key. Each dim has a slice with start and stop. A number takes 32 bits of a hash: 16 bits
    choose one of 2^16 intervals between quantiles, 16 bits the position inside it. Variance and kurtosis are within
    1e-5 of 1 and 3. The largest absolute value is 4.61.
    """
    rows = torch.zeros((), dtype=torch.int64, device=device)
    for size, cut in zip(shape[:-1], slices[:-1], strict=True):
        rows = rows.unsqueeze(-1) * size + torch.arange(cut.start, cut.stop, device=device)
    keys = fold(state, rows.flatten())
    first, last = (slices[-1].start, slices[-1].stop) if slices else (0, 1)
    return _normal_columns(keys, first, last).view([cut.stop - cut.start for cut in slices])


def normal_rows(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """Return standard normal numbers [n, columns], float32. Row i depends only on ``keys[i]`` (int64 [n])."""
    return _normal_columns(keys, 0, columns)


def integers(keys: torch.Tensor, bound: int) -> torch.Tensor:
    """Return an integer from 0 to ``bound`` - 1 for each of ``keys``, both int64, independent of ``normal_rows``.

    ``bound`` is at most 2^31. The probabilities differ by at most 2^-32.
    """
    return (_shift_right(mix(keys.clone()), 32) * bound) >> 32


def _normal_columns(keys: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return columns ``first`` to ``last`` of standard normal numbers [n, …], whose rows have these keys."""
    columns = last - first
    out = torch.empty(len(keys), columns, dtype=torch.float32, device=keys.device)
    centers, widths = intervals(out.device)
    chunk = CPU_CHUNK if out.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // max(1, columns))
    for part, part_keys in zip(out.split(step), keys.split(step), strict=True):
        lanes = _lanes(part_keys, 2 * columns, 2 * first).unflatten(-1, (columns, 2))
        interval = lanes[..., 1].int().add_(_INTERVALS // 2).flatten()
        place = lanes[..., 0].float().add_(0.5)
        torch.index_select(centers, 0, interval, out=part.view(-1))
        # Not addcmul: the number of its roundings depends on the device.
        part.add_(place.mul_(widths.index_select(0, interval).view_as(part)))
    return out


@functools.cache
def intervals(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return centers and widths / 2^16 of the intervals between quantiles of the normal distribution, float32.

    Errors in the last bits of float64 do not change the rounding of a quantile to float32: its relative distance from
    the middle of two float32 numbers is at least 1e-12.
    """
    distribution = NormalDist()
    quantiles = [distribution.inv_cdf(0.5 + i / _INTERVALS) for i in range(_INTERVALS // 2)]
    tail_mean = distribution.pdf(quantiles[-1]) * _INTERVALS
    edges = torch.tensor([*quantiles, 2 * tail_mean - quantiles[-1]], dtype=torch.float32)
    width = edges.diff()
    center = edges[:-1] + width / 2
    centers, widths = torch.cat([-center.flip(0), center]), torch.cat([width.flip(0), width]) / 2**16
    return centers.to(device), widths.to(device)


def keep_mask(rows: torch.Tensor, columns: int, offset: int, drop: float) -> torch.Tensor:
    """Return the boolean mask [*rows, columns] of the elements that dropout with probability ``drop`` keeps.

    ``rows`` are int64 keys, one per row. The columns are ``offset`` to ``offset + columns`` of the global row.
    Probabilities are multiples of 2^-16.
    """
    minimum = round(drop * 2**16) - 2**15
    chunk = MASK_CHUNK if rows.is_cpu else _DEVICE_MASK_CHUNK
    if torch.compiler.is_compiling() or rows.numel() * columns <= chunk:
        return _lanes(rows, columns, offset) >= minimum
    # Hashes take twice the memory of the mask, so they are computed for a few rows at a time.
    mask = torch.empty(rows.numel(), columns, dtype=torch.bool, device=rows.device)
    step = max(1, chunk // columns)
    for part, keys in zip(mask.split(step), rows.flatten().split(step), strict=True):
        torch.ge(_lanes(keys, columns, offset), minimum, out=part)
    return mask.view(*rows.shape, columns)


def _lanes(rows: torch.Tensor, columns: int, offset: int) -> torch.Tensor:
    """Return columns ``offset`` to ``offset + columns`` of random int16 numbers [*rows, columns].

    ``rows`` are int64 keys, one per row. One hash serves four neighboring columns.
    """
    if torch.compiler.is_compiling():  # one fused kernel, in which a hash per element is faster than memory traffic
        places = torch.arange(offset, offset + columns, device=rows.device)
        return (fold(rows.unsqueeze(-1), places >> 2) >> (places % 4 * 16)).to(torch.int16)
    first, last = offset // 4, -(-(offset + columns) // 4)
    hashes = fold(rows.unsqueeze(-1), torch.arange(first, last, device=rows.device))
    return hashes.view(torch.int16)[..., offset - 4 * first :][..., :columns]
