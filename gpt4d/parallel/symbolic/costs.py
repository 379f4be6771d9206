"""The costs of kernels on symbolic tensors: floating-point operations, bytes and temporary memory. No torch here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpt4d.parallel.kernels import Kernel, Symbolic

EAGER_COSTS = Path(__file__).with_name("eager.json")  # costs of kernels that are not compiled


class Computation(NamedTuple):
    """A product, or elementwise operations.

    Attributes:
        flops: floating-point operations of a product.
        moved: bytes read and written.
        operations: number of operations.
        attention: FLOPs without masked products, if the product is attention.
        float8: the factors of the product are float8.
        copied: bytes read and written before or after the product.
        head_size: size of a head, if the product is attention.
    """

    flops: float = 0.0
    moved: float = 0.0
    operations: int = 1
    attention: float | None = None
    float8: bool = False
    copied: float = 0.0
    head_size: int = 0


def minimum_bytes(kernel: Kernel, *args: Any) -> float:
    """Return the bytes of the symbolic arguments that are read and of the results."""
    if kernel.moved:
        return kernel.moved(*args)
    returned = kernel.shapes(*args)
    results = filter(None, returned if isinstance(returned, tuple) else (returned,))
    read = [arg for place, arg in enumerate(args) if place not in kernel.unread and isinstance(arg, Symbolic)]
    return sum(tensor.nbytes for tensor in (*read, *results))


def cost(kernel: Kernel, args: tuple) -> tuple[Computation, float, list]:
    """Return the computation, the bytes of temporary tensors, and the results.

    A result is a tuple of shape, dtype and bytes, None, or the index of an argument that is returned.
    """
    returned = kernel.shapes(*args)
    results = returned if isinstance(returned, tuple) else (returned,)
    tensors, moved = [arg for arg in args if isinstance(arg, Symbolic)], minimum_bytes(kernel, *args)
    places = [
        next((place for place, arg in enumerate(args) if arg is one), one and (one.shape, one.dtype, one.nbytes))
        for one in results
    ]
    if kernel.free or (kernel.converts and places == [0]):
        return Computation(operations=0), 0.0, places
    flops = kernel.flops(*args) if kernel.flops else 0.0
    attention = kernel.attention(*args) if kernel.attention else None
    head_size = next(one.shape[-1] for one in tensors if len(one.shape) == 4) if kernel.attention else 0
    blocks = kernel.blocks(*args) if kernel.blocks else 1
    key, compiled = f"{kernel.name} {args[0].dtype} {len(tensors)}", kernel.fused or kernel.blocks
    if (compiled and args[0].device.compiled) or (not compiled and key not in _eager_costs()):
        temporary = kernel.temporary(*args) if kernel.temporary else 0.0
        copied = kernel.copied(*args) if kernel.copied else 0.0
        return Computation(flops, moved, blocks, attention, kernel.float8, copied, head_size), temporary, places
    factor, operations, temporary = _eager_costs()[key]
    computation = Computation(flops, factor * moved, operations * blocks, attention, kernel.float8, 0.0, head_size)
    return computation, temporary * moved / blocks, places


@cache
def _eager_costs() -> dict[str, tuple[float, int, float]]:
    """Return the costs of kernels without torch.compile, by name, dtype and number of tensors.

    A cost consists of the bytes that the kernel moves, the number of its operations, and the bytes of its temporary
    tensors. Bytes are relative to ``minimum_bytes``.
    """
    return json.loads(EAGER_COSTS.read_text())
