"""The kernels of experts: products of each expert's rows, also of experts without rows, and orders of rows."""

import pytest
import torch

from gpt4d.parallel.layers.experts import (
    experts_of_rows,
    grouped_input_gradient,
    grouped_linear,
    grouped_weight_gradient,
    in_expert_order,
    selected_rows,
    summed_rows,
)

ROWS = torch.tensor([3, 0, 5, 1])


def parts(*tensors):
    """Return the rows of each expert in each tensor."""
    return zip(*(tensor.split(ROWS.tolist()) for tensor in tensors), strict=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_each_experts_rows_alone(dtype):
    generator = torch.Generator().manual_seed(0)
    x, d_out = (torch.randn(9, *n, generator=generator).to(dtype) for n in ((6,), (2, 4)))
    master = torch.randn(4, 6, 2, 4, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    weight, before = master.to(dtype), torch.ones_like(master)
    out, d_x = grouped_linear(x, weight, ROWS), grouped_input_gradient(d_out, weight, x, ROWS)
    d_weight = grouped_weight_gradient(d_out, x, master, None, ROWS)
    total = grouped_weight_gradient(d_out, x, master, before, ROWS)
    assert total is before and torch.equal(total, d_weight + 1)
    bound = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for expert, (part, d_part, own, d_own) in enumerate(parts(x, d_out, out, d_x)):
        assert torch.allclose(own, torch.einsum("rk,kfn->rfn", part, weight[expert]), **bound)
        assert torch.allclose(d_own, torch.einsum("rfn,kfn->rk", d_part, weight[expert]), **bound)
        exact = torch.einsum("rk,rfn->kfn", part.double(), d_part.double()).to(master.dtype)
        assert torch.allclose(d_weight[expert], exact, rtol=1e-5, atol=1e-6)


def test_rows_are_sorted_by_expert_and_return_to_their_tokens():
    experts = torch.tensor([[2, 0], [3, 2], [0, 3], [2, 3]])
    order, place, rows = in_expert_order(experts, 4)
    assert rows.tolist() == [2, 0, 3, 3]
    assert experts.flatten()[order].tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert order.tolist() == [1, 4, 0, 3, 6, 2, 5, 7], "rows of one expert keep their order"
    x = torch.arange(4.0)[:, None].expand(4, 3)
    selected = selected_rows(x, order, 2)
    assert selected[:, 0].tolist() == [0, 2, 0, 1, 3, 1, 2, 3]
    assert torch.equal(summed_rows(selected, place, 2), 2 * x)


def test_received_rows_have_the_experts_of_each_rank_in_order():
    rows_of_ranks = torch.tensor([1, 2, 0, 3])  # two ranks, two experts of this rank
    assert experts_of_rows(rows_of_ranks, 2, 6).tolist() == [0, 1, 1, 1, 1, 1]
