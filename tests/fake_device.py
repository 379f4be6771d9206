"""A fake accelerator: operations on it compute shapes, dtypes and devices of their results, but no values.

It finds, on a CPU, the operations that a GPU rejects and the points where the host waits for a GPU. ``set_up`` changes
a process permanently, so call it in a separate process.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

_TYPE = "fake_accelerator"
_MODE = FakeTensorMode()  # one for the process, since modules keep tensors
_aten, _c10d = torch.ops.aten, torch.ops.c10d

# A GPU rejects operands of different dtypes here, and is slow if all are float32. Fake tensors accept any dtypes.
_IN_COMPUTE_DTYPE = (_aten.mm, _aten.addmm, _aten.native_layer_norm)
# The collectives that run on an accelerator, and the numbers of elements that NCCL demands.
_COLLECTIVES = {
    _c10d.allreduce_: lambda output, input, ranks: output == input,
    _c10d._allgather_base_: lambda output, input, ranks: output == input * ranks,
    _c10d._reduce_scatter_base_: lambda output, input, ranks: output * ranks == input,
}


class _DeviceModule(_DummyBackendModule):
    def is_available(self) -> bool:  # otherwise the copy in torch.tensor(…, device=…) bypasses DeviceRules
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:  # activation checkpointing asks for it
        return [torch.bfloat16]


def set_up() -> None:
    """Register the device in this process, and replace the parts of torch.cuda that collectives use off the CPU."""
    _setup_privateuseone_for_python_backend(_TYPE, _DeviceModule())
    for name in ("Event", "Stream", "current_stream", "stream"):
        setattr(torch.cuda, name, MagicMock())


@contextmanager
def fake_job(world_size: int, rank: int) -> Iterator[torch.device]:
    """Make this process one rank of a job whose other ranks do not exist, and yield its device."""
    dist.init_process_group(f"cpu:fake,{_TYPE}:fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _MODE:
            yield torch.device(_TYPE, 0)
    finally:
        dist.destroy_process_group()


class DeviceRules(TorchDispatchMode):
    """Raises an AssertionError for operations that fake tensors accept, but that a GPU rejects or the host waits for.

    Fake tensors themselves raise for operands on two devices and for operations whose result depends on values, such
    as ``item``, ``nonzero`` and selection by a mask. Any exception that is raised only in a recomputation ends the
    process without a message.

    ``compute_dtype`` is the dtype of the operands of products and norms. ``collectives`` counts collectives by name.
    """

    def __init__(self, device: torch.device, compute_dtype: torch.dtype):
        super().__init__()
        self.device, self.compute_dtype, self.collectives = device, compute_dtype, Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operation, operands = func.overloadpacket, _tensors((args, kwargs))
        for tensor in operands + _tensors(result):  # the host waits for a copy from or to the device
            assert tensor.device == self.device, f"{func} has a tensor on {tensor.device}"
        if operation in _IN_COMPUTE_DTYPE:
            if func is _aten.addmm.dtype_out:  # a sum, the two matrices, and the sum again
                added_to, *operands, out = operands
                assert added_to is out and out.dtype == args[3], f"{func} adds to a matrix of {added_to.dtype}"
            dtypes = {tensor.dtype for tensor in operands}
            assert dtypes == {self.compute_dtype}, f"{func} has operands of {dtypes}"
        if operation is _aten.index_put_:
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), (
                f"{func} has a mask; use masked_fill_"
            )
        if func.namespace == "c10d":
            self._check_collective(operation, operands, group=args[len(operands)])
        return result

    def _check_collective(self, operation, operands: list[torch.Tensor], group: torch.ScriptObject) -> None:
        output, input, ranks = operands[0], operands[-1], dist.ProcessGroup.unbox(group).size()
        assert operation in _COLLECTIVES, f"{operation} is not for accelerators"
        assert output.is_contiguous() and input.is_contiguous(), f"{operation} has a tensor that is not contiguous"
        assert output.dtype == input.dtype, f"{operation} has tensors of {output.dtype} and {input.dtype}"
        fits = _COLLECTIVES[operation](output.numel(), input.numel(), ranks)
        assert fits, f"{operation} over {ranks} ranks has tensors of {output.shape} and {input.shape}"
        self.collectives[operation.__name__] += 1


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
