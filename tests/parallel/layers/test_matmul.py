"""Products of matrices on a CPU, small ones and those that oneDNN computes, in every layout that layers use."""

import pytest
import torch

from gpt4d.parallel.layers.matmul import matmul, product

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
