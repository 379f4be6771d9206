"""Interleaving of a microbatch's chunks with coroutines, and the execution of blocks (ATP paper, §4.1).

Layers and blocks are coroutines. Between the start of a collective and the first use of its result, they await
``YieldPoint()``, which lets the remaining chunks compute. The planner interleaves layers on symbolic
tensors with the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from gpt4d.parallel.kernels import Tensor, TorchFunction, planned_kernel
from gpt4d.parallel.lazy import torch

Result = TypeVar("Result")


class YieldPoint:
    """A yield point: ``await YieldPoint()`` lets the remaining chunks run up to the same point."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def run(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Interleave the coroutines, one per chunk, and return their results. The order is the same on all ranks."""
    chunks = list(coroutines)
    results: dict[int, Result] = {}
    try:
        while len(results) < len(chunks):
            for index, chunk in enumerate(chunks):
                if index not in results:
                    try:
                        chunk.send(None)
                    except StopIteration as finished:
                        results[index] = finished.value
    finally:
        for chunk in chunks:
            chunk.close()
    return [results[index] for index in range(len(chunks))]


def run_alone(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run the coroutine of a microbatch that has one chunk, and return its result."""
    return run([coroutine])[0]


Tensors = dict[str, Tensor]


@planned_kernel
def joined(*chunks):
    """Return the concatenation of the chunks along dim 0."""
    return chunks[0].like((sum(chunk.shape[0] for chunk in chunks), *chunks[0].shape[1:]))


class JoinFunction(TorchFunction):
    """The concatenation of chunks along dim 0. The gradients of the chunks are views of its gradient."""

    @staticmethod
    def in_torch(*chunks):
        return torch.cat(chunks)

    @staticmethod
    def forward(ctx, *chunks):
        ctx.shapes = [chunk.shape for chunk in chunks]
        return joined(*chunks)

    @staticmethod
    def backward(ctx, d_whole):
        return tuple(d_whole.alias(shape=shape) for shape in ctx.shapes)


def join(*chunks: Tensor) -> Tensor:
    """Return the concatenation of the chunks along dim 0."""
    return JoinFunction.apply(*chunks)


class Node(NamedTuple):
    """A block in a graph of blocks, with the names of its input tensors and of its output tensor.

    ``block`` is a coroutine function of these inputs, in this order, followed by the inputs that all blocks share.
    """

    block: Callable[..., Coroutine[Any, Any, Tensor]]
    uses: tuple[str, ...]
    produces: str


def run_graph(
    layer: Any, nodes: Sequence[Node], tensors: Mapping[str, Tensor], results: Collection[str], *others: Any
) -> Tensors:
    """Call the blocks of a graph in their order on the chunks of a microbatch and return the tensors ``results``.

    Chunks may be in different blocks at the same time. With activation checkpointing, all chunks finish a block before
    the next block starts.

    Args:
        layer: the layer of the blocks, whose pass decides about chunks and recomputation.
        nodes: the blocks.
        tensors: the graph's inputs by name; split into chunks along dim 0.
        results: names of the tensors to return, among the inputs and the outputs of blocks.
        others: additional inputs of each block, with a method ``chunk``, or None.
    """
    count, recompute = layer.current_pass.num_chunks, layer.current_pass.recompute
    cut = {name: tensor.chunk(count) if count > 1 else (tensor,) for name, tensor in tensors.items()}
    chunks = [{name: parts[index] for name, parts in cut.items()} for index in range(count)]
    del tensors, cut  # a tensor lives until its last use
    rest = [[None] * count if other is None else other.chunk(count) for other in others]
    alive = _alive_after(nodes, results)
    if recompute:
        for node, names in zip(nodes, alive, strict=True):
            inputs = [{name: chunk[name] for name in node.uses} for chunk in chunks]
            chunks = [_only(chunk, names - {node.produces}) for chunk in chunks]
            outputs = layer.checkpointed(lambda *given: run(_calls(*given)), [node], [{node.produces}], inputs, rest)
            for chunk, output in zip(chunks, outputs, strict=True):
                chunk |= output
    else:
        chunks = run(_calls(nodes, alive, chunks, rest))
    return {name: join(*[chunk[name] for chunk in chunks]) if count > 1 else chunks[0][name] for name in results}


def _alive_after(nodes: Sequence[Node], results: Collection[str]) -> list[set[str]]:
    """Return, for each node, the names of the tensors that are still needed after it."""
    alive, after = {*results}, list[set[str]]()
    for node in reversed(nodes):
        after.append(alive)
        alive = alive - {node.produces} | {*node.uses}
    return after[::-1]


def _only(tensors: Tensors, names: set[str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name in names}


def _calls(
    nodes: Sequence[Node], alive: Sequence[set[str]], inputs: Sequence[Tensors], others: Sequence
) -> Iterator[Coroutine[Any, Any, Tensors]]:
    """Yield, for each chunk, the call of nodes that returns the tensors that are still needed."""

    async def call(tensors: Tensors, *rest: Any) -> Tensors:
        for (block, uses, produces), names in zip(nodes, alive, strict=True):
            output = block(*[tensors[name] for name in uses], *rest)
            tensors = _only(tensors, names - {produces})
            tensors[produces] = await output
        return tensors

    return (call(*given) for given in zip(inputs, *others, strict=True))
