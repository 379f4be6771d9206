"""Operations that a tensor without values accepts, but that a GPU rejects or computes slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from tests.simulated_gpu.job import Job

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.convolution, _aten.convolution_backward, _aten.native_layer_norm)


def check(job: Job, func, args: tuple, tensors: list[torch.Tensor]) -> None:
    """Report an operation on tensors of the GPU that breaks a rule."""
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


def check_collective(job: Job, name: str, sent: torch.Tensor, received: torch.Tensor, ratio: float | None) -> None:
    """Report a collective that NCCL rejects.

    ``ratio``: number of elements received for each that is sent; None if it may be any number.
    """
    report = job.problems.report
    if not (sent.is_contiguous() and received.is_contiguous()):
        report("collective", f"{name} has a tensor that is not contiguous")
    if sent.dtype != received.dtype:
        report("collective", f"{name} has tensors of {sent.dtype} and {received.dtype}")
    if ratio is not None and received.numel() != sent.numel() * ratio:
        report("collective", f"{name} has tensors of {list(sent.shape)} and {list(received.shape)}")
