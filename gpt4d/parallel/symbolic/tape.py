"""The autograd graph of symbolic tensors, with the order and the memory of torch's autograd. No torch here.

The backward runs nodes whose gradients are complete, starting with the last created node. Gradients and saved tensors
live as long as in torch, so that the planner's peak memory equals the peak memory of a run.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gpt4d.parallel.symbolic.tensor import ITEMSIZE, Computation, SymbolicDevice, SymbolicTensor

Gradients = list[SymbolicTensor | None]
_WITH_GRADIENT = ("float64", "float32", "bfloat16")


class TapeNode:
    """A call of a function. It is the ``ctx`` of the function's ``forward`` and ``backward``."""

    accumulates = False

    def __init__(self, device: SymbolicDevice, inputs: Sequence[Any]):
        self.device = device
        self.edges = [value.edge if isinstance(value, SymbolicTensor) else None for value in inputs]
        self.needs_input_grad = [edge is not None for edge in self.edges]
        self.number = next(device.numbers)
        self.outputs: Sequence[SymbolicTensor] = ()  # the outputs' shapes, without memory
        self._saved: list[Any] = []
        self._materializes = True

    def save_for_backward(self, *tensors: SymbolicTensor) -> None:
        recomputation = self.device.recomputation
        self._saved = list(tensors) if recomputation is None else [recomputation.save(tensor) for tensor in tensors]

    @property
    def saved_tensors(self) -> list[SymbolicTensor]:
        return [saved.tensor() if isinstance(saved, _Dropped) else saved for saved in self._saved]

    def set_materialize_grads(self, choice: bool) -> None:
        self._materializes = choice

    def gradients(self, of_outputs: Gradients) -> Sequence[SymbolicTensor | None]:
        """Return the gradients of the inputs."""
        raise NotImplementedError

    def forget(self) -> None:
        """Release the saved tensors after the backward."""
        self._saved = []


class _FunctionNode(TapeNode):
    def __init__(self, device: SymbolicDevice, function: Any, inputs: Sequence[Any]):
        super().__init__(device, inputs)
        self.function = function

    def gradients(self, of_outputs: Gradients) -> Sequence[SymbolicTensor | None]:
        if self._materializes:
            for place, gradient in enumerate(of_outputs):
                if gradient is None:  # the output is unused
                    of_outputs[place] = zeros = self.outputs[place].new()
                    self.device.compute(Computation(moved=zeros.nbytes))
        result = self.function.backward(self, *of_outputs)
        return result if isinstance(result, tuple) else (result,)


class _ViewNode(TapeNode):
    """A view of a tensor with another shape."""

    def __init__(self, x: SymbolicTensor):
        super().__init__(x.device, (x,))
        self.shape = x.shape

    def gradients(self, of_outputs: Gradients) -> Sequence[SymbolicTensor | None]:
        (gradient,) = of_outputs
        return (gradient and gradient.alias(shape=self.shape),)


class _PartsNode(_ViewNode):
    """Views of consecutive parts of a tensor, whose gradients are concatenated."""

    def gradients(self, of_outputs: Gradients) -> Sequence[SymbolicTensor | None]:
        first = next(filter(None, of_outputs))
        full = first.like(self.shape).new()
        self.device.compute(Computation(moved=2 * full.nbytes))
        return (full,)


class _SumNode(TapeNode):
    def gradients(self, of_outputs: Gradients) -> Sequence[SymbolicTensor | None]:
        return of_outputs * 2


class Accumulation(TapeNode):
    """Accumulates the gradient of a parameter.

    Args:
        device: the parameter's device.
        add: accumulates the gradient of a backward.
    """

    accumulates = True

    def __init__(self, device: SymbolicDevice, add: Callable[[SymbolicTensor], None]):
        super().__init__(device, ())
        self.number, self.add = math.inf, add  # type: ignore[assignment]

    def gradients(self, of_outputs: Gradients) -> Sequence[SymbolicTensor | None]:
        (gradient,) = of_outputs
        of_outputs.clear()
        assert gradient is not None
        self.add(gradient)
        return ()


def apply(function: Any, inputs: Sequence[Any]) -> Any:
    """Call a function (gpt4d.parallel.symbolic.kernels.Function) on symbolic tensors and record the call."""
    device = inputs[0].device
    node = _FunctionNode(device, function, inputs)
    records = device.records and any(node.needs_input_grad)
    before, device.records = device.records, False
    try:
        result = function.forward(node, *inputs)
    finally:
        device.records = before
    if not records:
        node.forget()
        return result
    if not isinstance(result, tuple):
        return result.alias((node, 0))
    outputs = tuple(
        out.alias((node, place)) if out.dtype in _WITH_GRADIENT else out for place, out in enumerate(result)
    )
    node.outputs = [out.like() for out in outputs]
    return outputs


@contextmanager
def _recording(device: SymbolicDevice, choice: bool) -> Iterator[None]:
    before, device.records = device.records, choice
    try:
        yield
    finally:
        device.records = before


def view(x: SymbolicTensor, shape: tuple[int, ...]) -> SymbolicTensor:
    """Return a view of ``x`` with another shape."""
    return x.alias((_ViewNode(x), 0) if x.edge and x.device.records else None, shape)


def parts(x: SymbolicTensor, shapes: Sequence[tuple[int, ...]]) -> tuple[SymbolicTensor, ...]:
    """Return views of consecutive parts of ``x`` with these shapes."""
    node = _PartsNode(x) if x.edge and x.device.records else None
    if node:
        node.outputs = [x.like(shape) for shape in shapes]
    return tuple(x.alias((node, place) if node else None, shape) for place, shape in enumerate(shapes))


def add(one: SymbolicTensor, other: SymbolicTensor) -> SymbolicTensor:
    """Return the sum of two tensors with the same shape."""
    device = one.device
    out = one.like().new()
    device.compute(Computation(moved=one.nbytes + other.nbytes + out.nbytes))
    return out.alias((_SumNode(device, (one, other)), 0)) if device.records and (one.edge or other.edge) else out


# ---------------------------------------------------------------------------------------------------- backward


def backward(results: Sequence[tuple[SymbolicTensor, SymbolicTensor]]) -> None:
    """Compute the gradients of all parameters. ``results``: pairs of a result and its gradient."""
    buffers: dict[TapeNode, Gradients] = {}
    for tensor, gradient in results:
        assert tensor.edge is not None, "a result has no gradient"
        _add(buffers, tensor.edge, gradient)
    if not buffers:
        return
    missing, order = _dependencies(buffers), itertools.count()
    ready = [(-node.number, next(order), node) for node in buffers if not missing[node]]
    heapq.heapify(ready)
    del tensor, gradient
    with _recording(ready[0][2].device, False):
        while ready:
            node = heapq.heappop(ready)[2]
            _run(node, buffers)
            for edge in node.edges:
                if edge is not None:
                    missing[edge[0]] -= 1
                    if not missing[edge[0]]:
                        heapq.heappush(ready, (-edge[0].number, next(order), edge[0]))
    assert not buffers, "a gradient has reached no parameter"


def _run(node: TapeNode, buffers: dict[TapeNode, Gradients]) -> None:
    """Run a node whose gradients are complete, and add the gradients of its inputs to ``buffers``."""
    of_outputs = buffers.pop(node, [])
    if any(gradient is not None for gradient in of_outputs):
        gradients = node.gradients(of_outputs)
        of_outputs.clear()
        for edge, gradient in zip(node.edges, gradients, strict=False):
            if edge is not None and gradient is not None:
                _add(buffers, edge, gradient)
    node.forget()


def _add(buffers: dict[TapeNode, Gradients], edge: tuple[TapeNode, int], gradient: SymbolicTensor) -> None:
    """Accumulate a gradient in the buffer of a node."""
    node, place = edge
    waiting = buffers.setdefault(node, [None] * max(1, len(node.outputs)))
    earlier = waiting[place]
    if earlier is not None:
        device, total = gradient.device, gradient.like().new()
        device.compute(Computation(moved=3 * total.nbytes))
        gradient = total
    waiting[place] = gradient


def _dependencies(roots: Iterable[TapeNode]) -> defaultdict[TapeNode, int]:
    """Return the number of nodes that pass a gradient to each node of the graph."""
    missing: defaultdict[TapeNode, int] = defaultdict(int)
    stack, seen = list(roots), set(roots)
    while stack:
        for edge in stack.pop().edges:
            if edge is not None:
                missing[edge[0]] += 1
                if edge[0] not in seen:
                    seen.add(edge[0])
                    stack.append(edge[0])
    return missing


# ------------------------------------------------------------------------------------------------ recomputation


class _Ended(Exception):
    """A recomputation has computed all that the backward needs."""


class _Dropped:
    """Stands for a saved tensor that is recomputed."""

    def __init__(self, recomputation: _Recomputation, place: int):
        self.recomputation, self.place = recomputation, place

    def tensor(self) -> SymbolicTensor:
        return self.recomputation.tensor(self.place)


class _Recomputation:
    """A checkpointed call of a function: only its inputs are saved.

    Like torch.utils.checkpoint, the recomputation stops at the last saved tensor.
    """

    def __init__(self, device: SymbolicDevice, function: Callable, inputs: Sequence[Any], around: Callable):
        self.device, self.function, self.inputs, self.around = device, function, inputs, around
        self.count = 0
        self.found: dict[int, SymbolicTensor] = {}
        self.recomputes = False

    def save(self, tensor: SymbolicTensor) -> Any:
        place, self.count = self.count, self.count + 1
        return _Dropped(self, place)

    def tensor(self, place: int) -> SymbolicTensor:
        """Return and release the saved tensor number ``place``; recompute all saved tensors at the first call."""
        if not self.recomputes:
            self.recomputes = True
            recorder = _RecomputationRecorder(self)
            with _recording(self.device, True), _saving(self.device, recorder), self.around(), suppress(_Ended):
                self.function(*self.inputs)
        return self.found.pop(place)


class _RecomputationRecorder:
    """Stores the saved tensors of a recomputation, up to the last tensor that the forward has saved."""

    def __init__(self, recomputation: _Recomputation):
        self.recomputation, self.count = recomputation, 0

    def save(self, tensor: SymbolicTensor) -> Any:
        self.recomputation.found[self.count] = tensor.detach()
        self.count += 1
        if self.count == self.recomputation.count:
            raise _Ended
        return None


@contextmanager
def _saving(device: SymbolicDevice, saver: Any) -> Iterator[None]:
    before, device.recomputation = device.recomputation, saver
    try:
        yield
    finally:
        device.recomputation = before


def checkpointed(device: SymbolicDevice, function: Callable, inputs: Sequence[Any], around: Callable) -> Any:
    """Call a function, save only its inputs, and recompute it in the backward within the context ``around()``."""
    with _saving(device, _Recomputation(device, function, inputs, around)):
        return function(*inputs)


def leaf(device: SymbolicDevice, shape: tuple[int, ...], dtype: str, add: Callable) -> SymbolicTensor:
    """Return a parameter, whose memory is not counted. ``add``: as for ``Accumulation``."""
    assert dtype in ITEMSIZE
    return SymbolicTensor(device, shape, dtype, None, (Accumulation(device, add), 0))
