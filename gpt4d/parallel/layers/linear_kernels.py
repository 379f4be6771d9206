"""The kernels of linear layers and of concatenations.

On x86 processors float32 products are oneDNN's, which uses AVX-512 wherever it exists. torch.mm calls MKL, which does
so on Intel's processors only: on others with AVX-512 oneDNN is more than twice as fast.

Weights are [K, *N], or [N, K] (``transposed``) as an embedding is.
"""

import functools
import math
import platform
from collections.abc import Callable

import torch

from gpt4d.parallel.symbolic import kernels

_LEAST_FLOPS = 1 << 22  # oneDNN computes products of at least so many FLOPs: it takes 15 us more to start than MKL


@functools.cache
def _one_dnn_linear() -> Callable | None:
    """Return oneDNN's ``x @ weight.T + bias`` on dense tensors; None if torch has no such operation."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return None
    # The one that torch.compile uses: torch has no public name for it.
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b + bias`` of matrices, without a gradient."""
    if a.dtype == torch.float32 and a.is_cpu and 2 * a.numel() * b.shape[1] >= _LEAST_FLOPS:
        linear = _one_dnn_linear()
        if linear is not None:
            # It copies a first matrix that is not contiguous: else the gradient of logits takes their memory twice.
            if bias is None and not a.is_contiguous() and a.numel() > b.numel() + a.shape[0] * b.shape[1]:
                return linear(b.t(), a, None, "none", [], "").t().contiguous()
            return linear(a, b.t(), bias, "none", [], "")
    return a @ b if bias is None else torch.addmm(bias, a, b)


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b``, added up and returned in ``dtype``: the matrices may be bf16 and their product float32.

    With a matrix ``added_to`` of that dtype the product is added to it in place, on a GPU by the kernel of the product
    itself, and the sum is returned. On ROCm, whose libraries lack a product of another dtype, the product of bf16
    matrices is rounded to bf16 once.
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
    """Return ``product`` on a CPU: both matrices are converted to ``dtype``, ``a`` block by block."""
    wide, rows = b.to(dtype), len(a) if a.dtype == dtype else kernels.block_rows(a.shape[1])
    if added_to is None and len(a) <= rows:
        return matmul(a.to(dtype), wide)
    result = a.new_empty(len(a), b.shape[1], dtype=dtype) if added_to is None else added_to
    for out, part in zip(result.split(rows), a.split(rows), strict=True):
        block = matmul(part.to(dtype), wide)
        out.copy_(block) if added_to is None else out.add_(block)
    return result


def _matrix(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    matrix = weight.flatten(1)
    return matrix.t() if transposed else matrix


def linear(x_BK, weight, bias, transposed: bool):
    rows, w = x_BK.reshape(-1, x_BK.shape[-1]), _matrix(weight, transposed)
    out = matmul(rows, w, None if bias is None else bias.flatten())
    return out.view(*x_BK.shape[:-1], *(weight.shape[:1] if transposed else weight.shape[1:]))


def linear_input_gradient(d_out_BN, weight, x_BK, transposed: bool):
    w = _matrix(weight, transposed)
    return matmul(d_out_BN.view(-1, w.shape[1]), w.t()).view(x_BK.shape)


def linear_weight_gradient(d_out_BN, x_BK, weight, added_to, transposed: bool):
    rows = x_BK.reshape(-1, x_BK.shape[-1])
    d_rows = d_out_BN.view(len(rows), math.prod(d_out_BN.shape[x_BK.dim() - 1 :]))
    left, right = (d_rows, rows) if transposed else (rows, d_rows)
    if added_to is None:
        return product(left.t(), right, weight.dtype).view(-1, *weight.shape[1:])
    product(left.t(), right, weight.dtype, added_to.view(len(added_to), -1))
    return added_to


def concatenated(*arguments):
    *parts, sizes = arguments
    return torch.cat([part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True)], -1).flatten(-2)


def separated(whole, sizes: tuple[int, ...]):
    return tuple(part.flatten(-2) for part in whole.unflatten(-1, (-1, sum(sizes))).split(sizes, -1))
