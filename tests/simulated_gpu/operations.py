"""Torch operations on a simulated GPU. Tensors on it have shapes, dtypes, storages and a device, but no values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.simulated_gpu import rules

if TYPE_CHECKING:
    from tests.simulated_gpu.job import Job

DEVICE = "simulated_gpu"
_aten = torch.ops.aten
_FAKE = FakeTensorMode(allow_non_fake_inputs=True)  # one for the process: caches keep tensors for later jobs
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_HOST_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class HostReads(TorchFunctionMode):
    """Observes reads of host memory, which are not operations."""

    def __init__(self, job: Job):
        super().__init__()
        self.job = job

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_READS and not isinstance(args[0], FakeTensor):
            self.job.memory.check_host(args[0], writes=False)
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Adds the operations of a thread to its current stream. Operations on host memory run as usual.

    The host reads zeros and True from the GPU.
    """

    def __init__(self, job: Job):
        super().__init__()
        self.job = job

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        assert func.namespace != "c10d", f"{func} has no simulation in tests.simulated_gpu.process_group"
        tensors, target = _tensors((args, kwargs)), kwargs.get("device")
        creates = target is not None and torch.device(target).type == DEVICE
        if not creates and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._on_host(func, args, kwargs)
        self.job.check_thread(f"calls {func}")
        if func is _aten.record_stream.default:
            return self.job.memory.record_stream(args[0], args[1].stream_id)
        if func is _aten._local_scalar_dense.default:
            return self._item(args[0])
        if func in (_aten.copy_.default, _aten._to_copy.default):
            return self._copy(func, args, kwargs)
        rules.check(self.job, func, args, tensors)
        if target is not None and not creates:  # such as empty_like(…, device="cpu")
            return self._on_host(func, (_values(args[0]), *args[1:]), kwargs)
        return self._on_gpu(func, args, kwargs)

    def _on_host(self, func, args: tuple, kwargs: dict) -> Any:
        memory = self.job.memory
        if func is _aten.is_pinned.default:
            return memory.is_pinned(args[0])
        if func is _aten._pin_memory.default:
            return memory.pin(args[0].clone())
        pinned = kwargs.get("pin_memory")
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if not func.is_view:
            for operands, writes in zip(_operands(func, args, kwargs), (False, True), strict=True):
                for tensor in operands:
                    memory.check_host(tensor, writes)
        result = func(*args, **kwargs)
        return memory.pin(result) if pinned else result

    def _on_gpu(self, func, args: tuple, kwargs: dict) -> Any:
        try:
            with _FAKE:
                result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.job.problems.report("host", f"the host waits for the GPU: the size of {func} depends on values")
            raise
        read, written = _operands(func, args, kwargs)
        operation, memory = str(func).removesuffix(".default"), self.job.memory
        reads, writes = memory.blocks(read, operation), memory.blocks(written, operation)
        writes += [block for tensor in _tensors(result) if (block := memory.add_new(tensor, operation))]
        if writes and func.overloadpacket not in _ALLOCATIONS:  # otherwise the result is a view
            memory.use(operation, self.job.current_stream(), reads, writes)
        return result

    # --------------------------------------------------------------------------------- between host and GPU

    def _item(self, tensor: FakeTensor) -> Any:
        stream = self.job.current_stream()
        self.job.memory.use("item", stream, self.job.memory.blocks([tensor], "item"), [])
        self.job.host_waits("it reads a value", stream.clock)
        return True if tensor.dtype == torch.bool else torch.zeros((), dtype=tensor.dtype).item()

    def _copy(self, func, args: tuple, kwargs: dict) -> Any:
        """Queue a copy, which the host waits for unless it is asked not to and its side of the copy is pinned."""
        memory, stream = self.job.memory, self.job.current_stream()
        creates = func is _aten._to_copy.default
        non_blocking = kwargs.get("non_blocking", False) if creates else args[2:] == (True,)
        if not isinstance(args[0 if creates else 1], FakeTensor):
            result, on_host = self._on_gpu(func, args, kwargs), args[0 if creates else 1]
        elif creates and torch.device(kwargs.get("device") or DEVICE).type != DEVICE:
            result = on_host = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if non_blocking:
                memory.pin(result)
        elif not creates and not isinstance(args[0], FakeTensor):
            result = on_host = args[0].zero_()
        else:
            return self._on_gpu(func, args, kwargs)
        if result is on_host:
            source = args[0] if creates else args[1]
            memory.use("copy", stream, memory.blocks([source], "copy"), memory.blocks([on_host], "copy"))
        if not (non_blocking and memory.is_pinned(on_host)):
            self.job.host_waits("it copies between the GPU and memory that is not pinned", stream.clock)
        return result


def _values(value: Any) -> Any:
    """Return a tensor of zeros on the host in the place of a tensor on the GPU."""
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, FakeTensor) else value


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _operands(func, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads, and the tensors that it writes to."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        into = written if argument.alias_info is not None and argument.alias_info.is_write else read
        into += [value] if isinstance(value, torch.Tensor) else _tensors(value) if isinstance(value, list) else []
    return read, written
