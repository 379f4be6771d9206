"""The kernels of linear layers and of concatenations.

On x86 processors oneDNN computes float32 products, because it uses AVX-512 on every processor that has it. ``torch.mm``
calls MKL, which uses AVX-512 on Intel's processors only; on AMD's, oneDNN is more than twice as fast.

Weights are [K, *N], or [N, K] with ``transposed``, as an embedding is.
"""

import functools
import math
import platform
from collections.abc import Callable

import torch

from gpt4d.parallel.symbolic import kernels

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
        linear = _one_dnn_linear()
        if linear is not None:
            # oneDNN copies a first factor that is not contiguous. For the gradient of logits, exchange the factors.
            if bias is None and not a.is_contiguous() and a.numel() > b.numel() + a.shape[0] * b.shape[1]:
                return linear(b.t(), a, None, "none", [], "").t().contiguous()
            return linear(a, b.t(), bias, "none", [], "")
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
    wide, rows = b.to(dtype), kernels.block_rows(a.shape[1])
    if added_to is None and len(a) <= rows:
        return matmul(a.to(dtype), wide)
    result = a.new_empty(len(a), b.shape[1], dtype=dtype) if added_to is None else added_to
    for out, part in zip(result.split(rows), a.split(rows), strict=True):
        block = matmul(part.to(dtype), wide)
        out.copy_(block) if added_to is None else out.add_(block)
    return result


# These functions avoid views of matrices: at small sizes a view takes as long as a product.


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight without separate dims of its columns."""
    return weight if weight.dim() == 2 else weight.flatten(1)


def _rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return an activation as a matrix with ``columns`` columns."""
    return x if x.dim() == 2 and x.shape[1] == columns else x.reshape(-1, columns)


def linear(x_BK, weight, bias, transposed: bool):
    """Return ``x @ W + b`` as [..., *N]."""
    w = _matrix(weight)
    out = matmul(_rows(x_BK, x_BK.shape[-1]), w.t() if transposed else w, None if bias is None else bias.flatten())
    if x_BK.dim() == weight.dim() == 2:
        return out
    return out.view(*x_BK.shape[:-1], *(weight.shape[:1] if transposed else weight.shape[1:]))


def linear_input_gradient(d_out_BN, weight, x_BK, transposed: bool):
    """Return ``d_out @ W.T`` in the shape of ``x_BK``."""
    w = _matrix(weight) if transposed else _matrix(weight).t()
    d_x = matmul(_rows(d_out_BN, w.shape[0]), w)
    return d_x if x_BK.dim() == 2 else d_x.view(x_BK.shape)


def linear_weight_gradient(d_out_BN, x_BK, weight, added_to, transposed: bool):
    """Return ``x.T @ d_out``, accumulated in the dtype of ``weight`` into ``added_to`` if given."""
    rows = _rows(x_BK, x_BK.shape[-1])
    d_rows = _rows(d_out_BN, math.prod(d_out_BN.shape[x_BK.dim() - 1 :]))
    left, right = (d_rows, rows) if transposed else (rows, d_rows)
    if added_to is None:
        gradient = product(left.t(), right, weight.dtype)
        return gradient if weight.dim() == 2 else gradient.view(-1, *weight.shape[1:])
    product(left.t(), right, weight.dtype, _matrix(added_to))
    return added_to


def concatenated(*arguments):
    """Interleave blocks of ``sizes`` channels of the tensors along the last dim."""
    *parts, sizes = arguments
    return torch.cat([part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True)], -1).flatten(-2)


def separated(concatenation, sizes: tuple[int, ...]):
    """Split interleaved blocks of ``sizes`` channels into separate tensors."""
    return tuple(part.flatten(-2) for part in concatenation.unflatten(-1, (-1, sum(sizes))).split(sizes, -1))
