"""Tensors without values, from which the planner derives times and bytes, and their autograd graph. No torch here.

Symbolic tensors have shapes, dtypes and the methods of torch tensors that layers call. As in torch, the memory of a
tensor is released when Python releases the last tensor that uses it.

The graph has the order and the memory of torch's autograd: the backward runs nodes whose gradients are complete,
starting with the last created node. Gradients and saved tensors live as long as in torch, so that the planner's peak
memory equals the peak memory of a run.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from gpt4d.parallel.kernels import Function, Kernel, Symbolic
from gpt4d.parallel.symbolic.costs import Computation, cost

# Bytes of an element, by the name of a dtype.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}
ITEMSIZE |= dict.fromkeys(("uint8", "float8_e4m3fn", "float8_e5m2"), 1)


class SymbolicDevice(Protocol):
    """A device that accounts for time and memory. Sizes are in bytes."""

    compiled: bool  # torch.compile fuses elementwise functions
    is_cpu: bool
    plans: dict[tuple, Any]  # cached costs and results of kernel calls
    numbers: Iterator[int]  # numbers of the nodes in the autograd graph, in the order of their creation
    records: bool  # calls are recorded for a backward
    recomputation: Any  # replaces saved tensors within blocks that are recomputed
    imbalance: float  # rows that the busiest rank's experts receive, divided by the mean

    def compute(self, computation: Computation) -> None:
        """Account for a product or elementwise operations."""

    def hold(self, nbytes: int) -> None:
        """Allocate memory."""

    def release(self, nbytes: int) -> None:
        """Free memory."""

    def scratch(self, nbytes: float) -> None:
        """Allocate memory and free it immediately."""


class Storage:
    """Memory of a device, which is freed with the last tensor that uses it."""

    __slots__ = ("device", "nbytes")

    def __init__(self, device: SymbolicDevice, nbytes: int):
        self.device, self.nbytes = device, nbytes
        device.hold(nbytes)

    def __del__(self) -> None:
        self.device.release(self.nbytes)


class SymbolicTensor(Symbolic):
    """A tensor without values. Its dtype is a name in ``ITEMSIZE``.

    Attributes:
        storage: the tensor's memory; None if it is not allocated, or not counted. ``new`` allocates it.
        edge: the node that takes the tensor's gradient, and the index among the node's outputs; None if the tensor
            requires no gradient.
    """

    __slots__ = ("__weakref__", "device", "dtype", "edge", "shape", "storage")

    def __init__(
        self,
        device: SymbolicDevice,
        shape: tuple[int, ...],
        dtype: str,
        storage: Storage | None = None,
        edge: tuple[TapeNode, int] | None = None,
    ):
        self.device, self.shape, self.dtype, self.storage, self.edge = device, shape, dtype, storage, edge

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def is_cpu(self) -> bool:
        return self.device.is_cpu

    @property
    def grad_fn(self) -> TapeNode | None:
        """The node that has computed the tensor; None for a parameter, and if the tensor requires no gradient."""
        return None if self.edge is None or self.edge[0].accumulates else self.edge[0]

    def like(self, shape: Sequence[int] | None = None, dtype: str | None = None) -> SymbolicTensor:
        """Return a tensor without memory on the same device, by default with the same shape and dtype."""
        return SymbolicTensor(self.device, self.shape if shape is None else tuple(shape), dtype or self.dtype)

    def new(self) -> SymbolicTensor:
        """Return a new tensor of this shape and dtype, with its own memory."""
        return SymbolicTensor(self.device, self.shape, self.dtype, Storage(self.device, self.nbytes))

    def alias(self, edge: tuple[TapeNode, int] | None = None, shape: tuple[int, ...] | None = None) -> SymbolicTensor:
        """Return a tensor with the same memory, whose gradient goes to ``edge``."""
        return SymbolicTensor(self.device, self.shape if shape is None else shape, self.dtype, self.storage, edge)

    def detach(self) -> SymbolicTensor:
        return self.alias()

    def run_kernel(self, kernel: Kernel, args: tuple) -> Any:
        """Account for the time and the memory of a call on the device of its arguments; return its results."""
        device = self.device
        key = kernel, *[(arg.shape, arg.dtype) if isinstance(arg, SymbolicTensor) else arg for arg in args]
        plan = device.plans.get(key)
        if plan is None:
            plan = device.plans[key] = cost(kernel, args)
        computation, temporary, results = plan
        returned = [
            args[one]
            if isinstance(one, int)
            else one and SymbolicTensor(device, one[0], one[1], None if kernel.free else Storage(device, one[2]))
            for one in results
        ]
        if temporary:
            device.scratch(temporary)
        device.compute(computation)
        return returned[0] if len(returned) == 1 else tuple(returned)

    def run_function(self, function: type[Function], args: tuple) -> Any:
        """Call a function (gpt4d.parallel.kernels.Function) whose first argument is this tensor; record the call."""
        device = self.device
        node = _FunctionNode(device, function, args)
        records = device.records and any(node.needs_input_grad)
        before, device.records = device.records, False
        try:
            result = function.forward(node, *args)
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

    # ------------------------------------------------------------------------------------------------- views

    def view(self, shape: tuple[int, ...]) -> SymbolicTensor:
        assert math.prod(shape) == math.prod(self.shape), f"{shape} is not a view of {self.shape}"
        return self.alias((_ViewNode(self), 0) if self.edge and self.device.records else None, shape)

    def view_as(self, other: SymbolicTensor) -> SymbolicTensor:
        return self.view(other.shape)

    def flatten(self, first: int = 0, last: int = -1) -> SymbolicTensor:
        first, last = first % len(self.shape), last % len(self.shape)
        size = math.prod(self.shape[first : last + 1])
        return self.view((*self.shape[:first], size, *self.shape[last + 1 :]))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> SymbolicTensor:
        dim %= len(self.shape)
        known = math.prod(size for size in sizes if size != -1)
        found = (self.shape[dim] // known if size == -1 else size for size in sizes)
        return self.view((*self.shape[:dim], *found, *self.shape[dim + 1 :]))

    def unsqueeze(self, dim: int) -> SymbolicTensor:
        dim %= len(self.shape) + 1
        return self.view((*self.shape[:dim], 1, *self.shape[dim:]))

    def squeeze(self, dim: int) -> SymbolicTensor:
        dim %= len(self.shape)
        return self.view((*self.shape[:dim], *self.shape[dim + 1 :]))

    def transpose(self, one: int, other: int) -> SymbolicTensor:
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return self.view(tuple(shape))

    def contiguous(self) -> SymbolicTensor:
        return self

    def unbind(self, dim: int = 0) -> tuple[SymbolicTensor, ...]:
        dim %= len(self.shape)
        return self._parts([(*self.shape[:dim], *self.shape[dim + 1 :])] * self.shape[dim])

    def chunk(self, count: int, dim: int = 0) -> tuple[SymbolicTensor, ...]:
        dim %= len(self.shape)
        return self._parts([(*self.shape[:dim], self.shape[dim] // count, *self.shape[dim + 1 :])] * count)

    def _parts(self, shapes: Sequence[tuple[int, ...]]) -> tuple[SymbolicTensor, ...]:
        """Return views of consecutive parts with these shapes."""
        node = _PartsNode(self) if self.edge and self.device.records else None
        if node:
            node.outputs = [self.like(shape) for shape in shapes]
        return tuple(self.alias((node, place) if node else None, shape) for place, shape in enumerate(shapes))

    def __add__(self, other: SymbolicTensor) -> SymbolicTensor:
        device, out = self.device, self.like().new()
        device.compute(Computation(moved=self.nbytes + other.nbytes + out.nbytes))
        records = device.records and (self.edge or other.edge)
        return out.alias((_SumNode(device, (self, other)), 0)) if records else out

    def __getitem__(self, index: int) -> SymbolicTensor:
        return self.unbind()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return True


# ----------------------------------------------------------------------------------------------------- graph

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
        self._saved: list[SymbolicTensor | partial[SymbolicTensor]] = []
        self._materializes = True

    def save_for_backward(self, *tensors: SymbolicTensor) -> None:
        recomputation = self.device.recomputation
        self._saved = list(tensors) if recomputation is None else [recomputation.save(tensor) for tensor in tensors]

    @property
    def saved_tensors(self) -> list[SymbolicTensor]:
        return [saved() if isinstance(saved, partial) else saved for saved in self._saved]

    def set_materialize_grads(self, choice: bool) -> None:
        self._materializes = choice

    def gradients(self, of_outputs: Gradients) -> Sequence[SymbolicTensor | None]:
        """Return the gradients of the inputs."""
        raise NotImplementedError

    def forget(self) -> None:
        """Release the saved tensors after the backward."""
        self._saved = []


class _FunctionNode(TapeNode):
    def __init__(self, device: SymbolicDevice, function: type[Function], inputs: Sequence[Any]):
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
    with _changed(ready[0][2].device, records=False):
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


class _Recomputation:
    """A checkpointed call of a function: only its inputs are saved.

    Like torch.utils.checkpoint, the recomputation stops at the last saved tensor.
    """

    def __init__(self, device: SymbolicDevice, function: Callable, inputs: Sequence[Any], around: Callable):
        self.device, self.function, self.inputs, self.around = device, function, inputs, around
        self.count = 0  # tensors that the forward has saved
        self.found: dict[int, SymbolicTensor] | None = None  # saved tensors that are recomputed

    def save(self, tensor: SymbolicTensor) -> Callable[[], SymbolicTensor] | None:
        """Save a tensor of the recomputation; in the forward, return a function that recomputes it."""
        if self.found is None:
            self.count += 1
            return partial(self._tensor, self.count - 1)
        self.found[len(self.found)] = tensor.detach()
        if len(self.found) == self.count:
            raise _Ended
        return None

    def _tensor(self, place: int) -> SymbolicTensor:
        """Return and release the saved tensor number ``place``; recompute all saved tensors at the first call."""
        if self.found is None:
            self.found = {}
            with _changed(self.device, records=True, recomputation=self), self.around(), suppress(_Ended):
                self.function(*self.inputs)
        return self.found.pop(place)


@contextmanager
def _changed(device: SymbolicDevice, **values: Any) -> Iterator[None]:
    """Set attributes of a device inside the context."""
    before = {name: getattr(device, name) for name in values}
    vars(device).update(values)
    try:
        yield
    finally:
        vars(device).update(before)


def checkpointed(device: SymbolicDevice, function: Callable, inputs: Sequence[Any], around: Callable) -> Any:
    """Call a function, save only its inputs, and recompute it in the backward within the context ``around()``."""
    with _changed(device, recomputation=_Recomputation(device, function, inputs, around)):
        return function(*inputs)


def leaf(device: SymbolicDevice, shape: tuple[int, ...], dtype: str, add: Callable) -> SymbolicTensor:
    """Return a parameter, whose memory is not counted. ``add``: as for ``Accumulation``."""
    assert dtype in ITEMSIZE
    return SymbolicTensor(device, shape, dtype, None, (Accumulation(device, add), 0))
