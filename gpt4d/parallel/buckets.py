"""Gradient buckets: which gradients are summed over the batch axes in one collective. No torch here.

The gradient reducer and the planner build the same buckets from the same specs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpt4d.config import GridSizes
from gpt4d.parallel.layout import ParameterSpec

_MIN_BYTES, _MAX_BYTES = 1 << 20, 32 << 20  # below, latency dominates; above, it is negligible


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose gradients are summed together."""

    names: tuple[str, ...]
    elements: int  # of all gradients on one device
    axes: tuple[str, ...]  # to sum over, inner first
    sharded: bool  # each rank of the last axis needs only its rows of the sum


def default_bucket_bytes(gradient_bytes: int) -> int:
    """Return the size in bytes of the buckets in which gradients of ``gradient_bytes`` in total are reduced.

    A bucket has 1/32 of the gradients, within bounds. The first reduction then starts early in the backward, and little
    is left when the backward ends.
    """
    return min(max(gradient_bytes // 32, _MIN_BYTES), _MAX_BYTES)


def gradient_buckets(
    parameters: Mapping[str, ParameterSpec],
    sizes: GridSizes,
    shard_states: bool,
    max_bytes: int,
    element_bytes: int = 4,
    sequence_parallel: bool = False,
) -> Iterator[Bucket]:
    """Yield the buckets in the order in which the backward completes them, about the reverse of ``parameters``.

    Gradients of z-sharded weights arrive summed over z. Along axes that do not split what a parameter acts on, its
    copies have equal gradients and need no sum. A bucket is closed once it has ``max_bytes``.
    """

    def kind(spec: ParameterSpec) -> tuple[int, tuple[str, ...], bool]:
        axes = tuple(
            axis
            for axis in spec.batch_axes(sequence_parallel)
            if axis not in spec.layout.axes and getattr(sizes, axis) > 1
        )
        elements = spec.local_elements(sizes)
        return elements, axes, spec.optimized_elements(sizes, shard_states) < elements

    distinct = {id(spec): spec for spec in parameters.values()}  # equal blocks share their specs
    kinds = {key: kind(spec) for key, spec in distinct.items()}
    filling: dict[tuple, tuple[list[str], int]] = {}
    for name, spec in reversed(list(parameters.items())):
        elements, axes, sharded = kinds[id(spec)]
        if not axes:
            continue
        names, filled = filling.get((axes, sharded), ([], 0))
        names.append(name)
        filling[axes, sharded] = names, filled + elements
        if (filled + elements) * element_bytes >= max_bytes:
            del filling[axes, sharded]
            yield Bucket(tuple(names), filled + elements, axes, sharded)
    for (axes, sharded), (names, filled) in filling.items():
        yield Bucket(tuple(names), filled, axes, sharded)
