"""Blocks on the chunks of a microbatch, which take turns (ATP paper, §4.1).

In the backward, autograd runs the nodes that are ready in the reverse of their order of creation, so the turns of the
forward decide which chunk computes while the gradients of another are summed (gpt4d.parallel.layers.product).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gpt4d.parallel.turns import run
from gpt4d.parallel.weights import WeightStream


def run_blocks(weights: WeightStream, blocks: Iterable[nn.Module], x: torch.Tensor, *others) -> torch.Tensor:
    """Call blocks one after another on the chunks of a microbatch and return the output of the last one.

    Chunks may be in different blocks at the same time, unless blocks are recomputed: they are recomputed one by one.

    Args:
        weights: the stream of the blocks, which decides the number of chunks and whether blocks are recomputed.
        blocks: modules whose ``forward`` is a coroutine from ``x`` and ``others`` to the next block's ``x``.
        x: activations, cut along dim 0.
        others: further inputs of each block, which have a method ``chunk`` too; None stays None.
    """
    count = weights.num_chunks
    xs = list(x.chunk(count)) if count > 1 else [x]
    cut = [[None] * count if other is None else other.chunk(count) for other in others]
    for together in [[block] for block in blocks] if weights.recomputes else [list(blocks)]:
        xs = weights.checkpointed(_run_chunks, together, xs, cut)
    return torch.cat(xs) if count > 1 else xs[0]


def _run_chunks(blocks: Sequence[nn.Module], xs: list[torch.Tensor], others: list) -> list[torch.Tensor]:
    async def call(x: torch.Tensor, *rest) -> torch.Tensor:
        for block in blocks:
            x = await block(x, *rest)
        return x

    return run(call(*inputs) for inputs in zip(xs, *others, strict=True))
