"""CUDA graphs of operations on a CPU, to compare the numbers of a replay with the numbers of a step without graphs.

A capture records each operation with the memory of its operands. As on a GPU, it leaves no results: memory of the
capture is then invalid, and all other memory is as before. A replay executes the operations on the same memory. When a
tensor dies during a capture, its memory is invalid from then on, because a GPU's pool gives it to later tensors.

The simulation raises an error if a capture reads a value on the host or queries an event, and if a graph uses memory
outside its pool that was freed. It cannot see functions that torch.compile has compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partialmethod
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.comm.transport import Transport
from gpt4d.parallel.grid import Grid

_INVALID = 0xFF  # in each byte: NaN, or an index out of range
_aten = torch.ops.aten


class Operand(NamedTuple):
    """A tensor of a recorded operation. It does not keep the memory of the tensor alive."""

    memory: torch.Tensor | None  # bytes of the pool
    storage: weakref.ref | None  # of memory outside the pool
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        storage = self.memory.untyped_storage() if self.memory is not None else self.storage and self.storage()
        assert storage is not None, f"a graph uses a tensor {list(self.size)} outside its pool that was freed"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class Graph:
    """A recorded capture, in place of torch.cuda.CUDAGraph."""

    def __init__(self, device: Device):
        self.device = device
        self.operations: list[Callable[[], object]] = []
        self.own: list[torch.Tensor] = []  # memory that this capture has allocated
        self.before: dict[torch.UntypedStorage, torch.Tensor] = {}  # contents of other memory before the capture

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert self.device.graph is None and capture_error_mode == "thread_local"
        self.device.graph = self
        self.device.captures += 1

    def capture_end(self) -> None:
        self.device.graph = None
        for storage, content in self.before.items():
            _bytes(storage).copy_(content)
        self.before.clear()
        for memory in self.own:
            memory.fill_(_INVALID)

    def replay(self) -> None:
        assert self.device.graph is None, "a launch during a capture"
        self.device.launches += 1
        with torch.no_grad(), self.device.unobserved():
            for operation in self.operations:
                operation()


class Event:
    """An event, in place of torch.cuda.Event."""

    def __init__(self, device: Device, enable_timing: bool = False):
        self.device = device

    def record(self) -> None:
        assert self.device.graph is None, "an event in a graph"

    def query(self) -> bool:
        assert self.device.graph is None, "a query during a capture"
        return True


class Stream:
    """A stream, in place of torch.cuda.Stream. Operations are sequential."""

    def wait_stream(self, stream: Stream) -> None: ...


class Device(TorchDispatchMode):
    """Records the operations of captures."""

    def __init__(self) -> None:
        super().__init__()
        self.graph: Graph | None = None  # the graph that is captured now
        self.captures = self.launches = 0  # numbers of graphs
        self._observes = True
        self._memory: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.Tensor] = weakref.WeakKeyDictionary()
        self._dead: list[torch.Tensor] = []

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        before, self._observes = self._observes, False
        try:
            yield
        finally:
            self._observes = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.graph is None or not self._observes:
            return func(*args, **kwargs)
        assert func is not _aten._local_scalar_dense.default, "the host reads a value during a capture"
        assert func.namespace != "c10d", f"{func} during a capture"
        if func is _aten.lift_fresh.default:  # a number of Python, which is a part of the graph
            number = args[0].clone()
            result = number.clone()
            return self._record(lambda: number, result, [result])
        written = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[index] if index < len(args) else kwargs.get(argument.name))
        self._save(_tensors(written))
        arguments = tree_map(self._operand, (args, kwargs))
        result = func(*args, **kwargs)
        used = {tensor.untyped_storage() for tensor in _tensors((args, kwargs))}
        new = [tensor for tensor in _tensors(result) if tensor.untyped_storage() not in used]
        if not new and not written:
            return result  # a view
        return self._record(lambda: _call(func, arguments), result, new)

    def record_collective(self, start: Callable[..., Pending], tensor: torch.Tensor, *options: str) -> Pending:
        """Execute a collective during a capture, and record it."""
        with self.unobserved():
            self._save([tensor])
            operand = self._operand(tensor)
            result = start(tensor, *options).wait()
            new = [] if result.untyped_storage() is tensor.untyped_storage() else [result]
            return Pending(self._record(lambda: start(operand.tensor(), *options).wait(), result, new))

    def _record(self, replay: Callable[[], Any], result: Any, new: list[torch.Tensor]) -> Any:
        """Record an operation. Return its result, with its ``new`` tensors in memory of the pool."""
        graph, owned = self.graph, dict[int, torch.Tensor]()
        assert graph is not None
        for memory in self._dead:
            graph.operations.append(lambda memory=memory: memory.fill_(_INVALID))
        self._dead.clear()
        for tensor in new:
            owned[id(tensor)] = self._own(tensor)
        outputs = [self._operand(owned[id(tensor)]) for tensor in new]
        places = [index for index, tensor in enumerate(_tensors(result)) if id(tensor) in owned]

        def execute() -> None:
            results = _tensors(replay())
            for place, output in zip(places, outputs, strict=True):
                output.tensor().copy_(results[place])

        graph.operations.append(execute)
        return tree_map(lambda value: owned.get(id(value), value), result)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with a storage of its own, whose end is observed, in the memory of the pool."""
        assert self.graph is not None
        memory = _bytes(tensor.untyped_storage())
        storage = torch.from_numpy(memory.numpy()).untyped_storage()
        self._memory[storage] = memory
        self.graph.own.append(memory)
        weakref.finalize(storage, self._dead.append, memory).atexit = False
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _operand(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        memory = self._memory.get(storage)
        weak = None if memory is not None else weakref.ref(storage)
        return Operand(memory, weak, value.dtype, value.storage_offset(), value.size(), value.stride())

    def _save(self, tensors: list[torch.Tensor]) -> None:
        assert self.graph is not None
        own = {id(memory) for memory in self.graph.own}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(self._memory.get(storage)) not in own and storage not in self.graph.before:
                self.graph.before[storage] = _bytes(storage).clone()


def _is_operand(value: object) -> bool:
    return isinstance(value, Operand)


def _call(func, arguments: tuple[tuple, dict]) -> Any:
    args, kwargs = tree_map(lambda x: x.tensor() if _is_operand(x) else x, arguments, is_leaf=_is_operand)
    return func(*args, **kwargs)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _RecordedTransport(Transport):
    """Executes collectives as another transport does, and records them during a capture."""

    def __init__(self, device: Device, transport: Transport):
        self.device, self.transport = device, transport

    def _start(self, kind: str, *arguments: Any) -> Pending:
        start = getattr(self.transport, kind)
        return start(*arguments) if self.device.graph is None else self.device.record_collective(start, *arguments)

    start_all_reduce = partialmethod(_start, "start_all_reduce")
    start_all_gather = partialmethod(_start, "start_all_gather")
    start_reduce_scatter = partialmethod(_start, "start_reduce_scatter")
    start_shift = partialmethod(_start, "start_shift")
    start_all_to_all = partialmethod(_start, "start_all_to_all")


@contextmanager
def replayed_graphs(grid: Grid) -> Iterator[Device]:
    """Simulate CUDA graphs in this process, which is a rank of ``grid``."""
    device, stream = Device(), Stream()
    replaced = {
        "CUDAGraph": lambda: Graph(device),
        "Event": lambda **options: Event(device, **options),
        "Stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: stream,
        "graph_pool_handle": object,
        "empty_cache": lambda: None,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **replaced))
        for axis in grid:
            if axis.transport is not None:
                stack.enter_context(patch.object(axis, "transport", _RecordedTransport(device, axis.transport)))
        yield stack.enter_context(device)
