"""Products of matrices on a CPU, small ones and those that oneDNN computes, in every layout that layers use."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt4d.parallel.layers.linear_kernels import matmul, product
from gpt4d.parallel.symbolic import kernels

LARGE, SMALL = (256, 96, 160), (6, 5, 4)  # rows, contracted, columns


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("layout", ["forward", "input", "weight", "embedding"])
def test_a_product_is_contiguous_and_that_of_float64(shape, layout):
    rows, inner, columns = shape
    x, w, d = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(rows, columns)
    a, b = {"forward": (x, w), "input": (d, w.t()), "weight": (x.t(), d), "embedding": (d.t(), x)}[layout]
    out = matmul(a, b)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
def test_a_bias_is_added(shape):
    rows, inner, columns = shape
    x, w, bias = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(columns)
    torch.testing.assert_close(matmul(x, w, bias), x @ w + bias, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
def test_bfloat16_matrices_are_added_up_in_float32(shape):
    rows, inner, columns = shape
    x, d = torch.randn(rows, inner).bfloat16(), torch.randn(rows, columns).bfloat16()
    out = product(x.t(), d, torch.float32)
    torch.testing.assert_close(out.double(), x.double().t() @ d.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("added", [False, True])
def test_blocks_of_a_bfloat16_matrix_give_the_whole_product(monkeypatch, added):
    x, d = torch.randn(6, 7).bfloat16(), torch.randn(6, 4).bfloat16()
    earlier = torch.randn(7, 4) if added else None
    expected = x.double().t() @ d.double() + (earlier if added else 0)
    monkeypatch.setattr(kernels, "BLOCK_ELEMENTS", 3 * 6)  # the last of three blocks has one row
    torch.testing.assert_close(product(x.t(), d, torch.float32, earlier).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_added_to_a_sum_in_place(shape, dtype):
    rows, inner, columns = shape
    x, d = torch.randn(rows, inner).to(dtype), torch.randn(rows, columns).to(dtype)
    earlier = torch.randn(inner, columns)
    expected = earlier.double() + x.double().t() @ d.double()
    assert product(x.t(), d, torch.float32, earlier) is earlier
    torch.testing.assert_close(earlier.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_adds_a_product_by_one_kernel(dtype):
    """A device without values stands for the GPU, which torch chooses the same operations for."""
    x, d = (torch.empty(6, columns, dtype=dtype, device="meta") for columns in (5, 4))
    earlier = torch.empty(5, 4, device="meta")
    with Operations() as operations:
        assert product(x.t(), d, torch.float32, earlier) is earlier
    assert operations.kernels == ["addmm_" if dtype == torch.float32 else "addmm"]


class Operations(TorchDispatchMode):
    """Notes the names of the operations that compute."""

    def __init__(self):
        super().__init__()
        self.kernels: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.kernels.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
