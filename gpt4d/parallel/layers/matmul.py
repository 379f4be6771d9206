"""Products of matrices without a gradient.

On x86 processors oneDNN computes float32 products, because it uses AVX-512 on every processor that has it. ``torch.mm``
calls MKL, which uses AVX-512 on Intel's processors only; on AMD's, oneDNN is more than twice as fast.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

from gpt4d.parallel.kernels import block_rows
from gpt4d.parallel.lazy import torch

_MIN_FLOPS = 1 << 22  # minimum size of a product for oneDNN, which takes 15 us longer to start than MKL


@functools.cache
def _one_dnn_linear() -> Callable | None:
    """Return oneDNN's ``x @ weight.T + bias`` on dense tensors; None if torch does not provide it."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return None
    # torch.compile uses this private operation; torch has no public name for it.
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b + bias`` of matrices, without a gradient."""
    if a.dtype == torch.float32 and a.is_cpu and 2 * a.numel() * b.shape[1] >= _MIN_FLOPS:
        one_dnn = _one_dnn_linear()
        if one_dnn is not None:
            # oneDNN copies a first factor that is not contiguous. For the gradient of logits, exchange the factors.
            if bias is None and not a.is_contiguous() and a.numel() > b.numel() + a.shape[0] * b.shape[1]:
                return one_dnn(b.t(), a, None, "none", [], "").t().contiguous()
            return one_dnn(a, b.t(), bias, "none", [], "")
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b`` accumulated in ``dtype``: the matrices may be bf16 and their product float32.

    If ``added_to``, a matrix of that dtype, is given, the product is added to it in place and the sum is returned. On a
    GPU the kernel of the product adds it. ROCm's libraries support no output of another dtype. There, the product of
    bf16 matrices is rounded to bf16 once.
    """
    if a.is_cpu:
        return _wide_product(a, b, dtype, added_to)
    if a.dtype != dtype and torch.version.hip:
        result = a @ b
    elif added_to is None:
        return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
    elif a.dtype == dtype:
        return added_to.addmm_(a, b)
    else:
        return torch.addmm(added_to, a, b, out_dtype=dtype, out=added_to)
    return result.to(dtype) if added_to is None else added_to.add_(result)


def _wide_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None) -> torch.Tensor:
    """Compute ``product`` on a CPU: convert both matrices to ``dtype``, ``a`` in blocks of rows."""
    if a.dtype == dtype:
        return matmul(a, b) if added_to is None else added_to.add_(matmul(a, b))
    wide, rows = b.to(dtype), block_rows(a.shape[1])
    if added_to is None and len(a) <= rows:
        return matmul(a.to(dtype), wide)
    result = a.new_empty(len(a), b.shape[1], dtype=dtype) if added_to is None else added_to
    for out, part in zip(result.split(rows), a.split(rows), strict=True):
        block = matmul(part.to(dtype), wide)
        out.copy_(block) if added_to is None else out.add_(block)
    return result
