"""Torch operations on a simulated GPU. Tensors on it have shapes, dtypes, storages and a device, but no values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.laboratory.virtual_operations import tensors_in

if TYPE_CHECKING:
    from tests.simulated_gpu.job import Job

DEVICE = "simulated_gpu"
_aten = torch.ops.aten
_FAKE = FakeTensorMode(allow_non_fake_inputs=True)  # one for the process: caches keep tensors for later jobs
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.convolution, _aten.convolution_backward, _aten.native_layer_norm)
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
    """Adds the operations of a thread to its current stream. The host reads zeros and True from the GPU."""

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
        _check(self.job, func, args, tensors)
        if target is not None and not creates:  # such as empty_like(…, device="cpu")
            like = args[0]
            zeros = torch.zeros(like.shape, dtype=like.dtype) if isinstance(like, FakeTensor) else like
            return self._on_host(func, (zeros, *args[1:]), kwargs)
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
            result = _result(func, args, kwargs)
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
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


def _check(job: Job, func, args: tuple, tensors: list[torch.Tensor]) -> None:
    """Report an operation that a tensor without values accepts, but that a GPU rejects or computes slowly."""
    operation, report = func.overloadpacket, job.problems.report
    if any(not isinstance(tensor, FakeTensor) and tensor.dim() for tensor in tensors):
        report("device", f"{func} has an operand in host memory")
    if operation in _PRODUCTS:
        if func is _aten.addmm.dtype_out:  # a sum, the two matrices, and the sum again
            added_to, *tensors, out = tensors
            if added_to is not out or out.dtype != args[3]:
                report("dtype", f"{func} adds to a matrix of {added_to.dtype}")
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            report("dtype", f"{func} has operands of {dtypes}")
        elif job.compute_dtype not in (None, *dtypes):
            report("dtype", f"{func} has operands of {dtypes}, and the compute dtype is {job.compute_dtype}")
    if operation in (_aten.index, _aten.index_put_) and any(
        index is not None and index.dtype not in (torch.int64, torch.int32) for index in args[1]
    ):
        report("mask", f"{func} has a mask, whose size the host waits for; use masked_fill_ or where")


def _tensors(values: object) -> list[torch.Tensor]:
    return list(tensors_in(values))


_known: dict[tuple, _Known | None] = {}  # results by operation and kinds of operands; None: to compute each time


class _Known(NamedTuple):
    """The result of an operation: for each tensor its place among the operands, or the properties of a new tensor."""

    container: Callable[[Iterable], Any]
    tensors: list[int | tuple | None]


def _result(func, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operation. torch computes its shapes once for operands of one kind, which takes long."""
    key = None if func.is_view else (func, _kind(args), _kind(kwargs))
    if known := key and _known.get(key):
        operands = _tensors((args, kwargs))
        return known.container(
            operands[tensor] if isinstance(tensor, int) else tensor and _new(*tensor) for tensor in known.tensors
        )
    with _FAKE:
        result = func(*args, **kwargs)
    if key is not None and key not in _known:
        _known[key] = _described(result, _tensors((args, kwargs))) if key[1] == _kind(args) else None
    return result


def _kind(value: Any) -> Any:
    """Return the properties of an operand on which the shapes of results depend."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, isinstance(value, FakeTensor)
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    return type(value), value


def _new(device: torch.device, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> FakeTensor:
    return FakeTensor(_FAKE, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def _described(result: Any, operands: list[torch.Tensor]) -> _Known | None:
    """Return the description of a result; None if its tensors share memory with others."""
    storages = {id(tensor.untyped_storage()) for tensor in operands}
    tensors = list[int | tuple | None]()
    for tensor in result if isinstance(result, list | tuple) else [result]:
        places = [place for place, operand in enumerate(operands) if operand is tensor]
        if places or tensor is None:
            tensors.append(places[0] if places else None)
            continue
        if not isinstance(tensor, FakeTensor):
            return None
        properties = tensor.device, tensor.shape, tensor.stride(), tensor.dtype
        storage, expected = tensor.untyped_storage(), _new(*properties).untyped_storage()
        if id(storage) in storages or storage.nbytes() != expected.nbytes():
            return None
        storages.add(id(storage))
        tensors.append(properties)
    return _Known(type(result) if isinstance(result, list | tuple) else next, tensors)


def _operands(func, args: tuple, kwargs: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads, and the tensors that it writes to."""
    read, written = list[torch.Tensor](), list[torch.Tensor]()
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        into = written if argument.alias_info is not None and argument.alias_info.is_write else read
        into += [value] if isinstance(value, torch.Tensor) else _tensors(value) if isinstance(value, list) else []
    return read, written
