"""Kernels of layers: the choice of torch's attention, products on a CPU, and products and orders of experts' rows."""

import re
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpt4d.parallel import kernels
from gpt4d.parallel.layers import attention_backends, experts
from gpt4d.parallel.layers.linear import matmul, product

GPU = torch.device("cuda", 0)
LARGE, SMALL = (256, 96, 160), (6, 5, 4)  # rows, contracted, columns
ROWS = torch.tensor([3, 0, 5, 1])


@pytest.fixture
def activate(monkeypatch):
    """Return the mock of torch's function that activates an implementation, on an H100 with FlashAttention 3."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(attention_backends, "find_spec", lambda name: object())
    active = []
    activate = Mock(side_effect=active.append)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    return activate


def test_a_hopper_gpu_uses_flash_attention_3_if_it_is_installed(activate):
    for _ in range(2):  # several stages of one process
        attention_backends.use_installed_kernels(GPU)
    activate.assert_called_once_with("FA3")


@pytest.mark.parametrize("lacking", ["gpu", "Hopper", "CUDA", "package"])
def test_flash_attention_3_requires_a_hopper_gpu_and_the_package(activate, monkeypatch, lacking):
    if lacking == "Hopper":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    if lacking == "CUDA":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    if lacking == "package":
        monkeypatch.setattr(attention_backends, "find_spec", lambda name: None)
    attention_backends.use_installed_kernels(torch.device("cpu") if lacking == "gpu" else GPU)
    activate.assert_not_called()


def test_a_package_for_another_version_of_torch_is_a_warning_with_a_remedy(activate, capsys):
    activate.side_effect = ImportError("undefined symbol")
    attention_backends.use_installed_kernels(GPU)
    warning = capsys.readouterr().err
    assert re.fullmatch(r"warning: flash_attn_interface: does not work .*undefined symbol.*; install .*\n", warning)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.fixture(params=[LARGE, SMALL], ids=["large", "small"])
def factors(request):
    """Return random matrices: features, a weight and gradients of the product."""
    rows, inner, columns = request.param
    return torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(rows, columns)


def test_a_product_is_contiguous_and_that_of_float64_and_a_bias_is_added(factors):
    x, w, d = factors
    for a, b in ((x, w), (d, w.t()), (x.t(), d), (d.t(), x)):  # as in forward, input, weight and embedding
        out = matmul(a, b)
        assert out.is_contiguous()
        close(out, a.double() @ b.double())
    bias = torch.randn(len(w[0]))
    close(matmul(x, w, bias), (x @ w + bias).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_any_dtype_is_a_float32_sum_and_is_added_in_place(factors, dtype):
    x, w, d = (factor.to(dtype) for factor in factors)
    exact, earlier = x.double().t() @ d.double(), w.float()
    close(product(x.t(), d, torch.float32), exact)
    expected = earlier.double() + exact
    assert product(x.t(), d, torch.float32, earlier) is earlier
    close(earlier, expected)


@pytest.mark.parametrize("added", [False, True])
def test_blocks_of_a_bfloat16_matrix_give_the_whole_product(monkeypatch, added):
    x, d = torch.randn(6, 7).bfloat16(), torch.randn(6, 4).bfloat16()
    earlier = torch.randn(7, 4) if added else None
    expected = x.double().t() @ d.double() + (earlier if added else 0)
    monkeypatch.setattr(kernels, "BLOCK_ELEMENTS", 3 * 6)  # the last of three blocks has one row
    torch.testing.assert_close(product(x.t(), d, torch.float32, earlier).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("added", [False, True])
def test_blocks_of_columns_give_the_whole_gradient_of_an_embedding_as_the_head(monkeypatch, added):
    x, d = torch.randn(256, 200), torch.randn(256, 1024)
    earlier = torch.randn(1024, 200) if added else None
    expected = d.double().t() @ x.double() + (earlier if added else 0)
    monkeypatch.setattr(kernels, "BLOCK_ELEMENTS", 1)  # the second of two blocks has 72 columns
    close(product(d.t(), x, torch.float32, earlier), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_adds_a_product_by_one_kernel(dtype):
    """A device without values stands for the GPU, which torch chooses the same operations for."""
    x, d = (torch.empty(6, columns, dtype=dtype, device="meta") for columns in (5, 4))
    earlier = torch.empty(5, 4, device="meta")
    with Operations() as operations:
        assert product(x.t(), d, torch.float32, earlier) is earlier
    assert operations.names == ["addmm_" if dtype == torch.float32 else "addmm"]


class Operations(TorchDispatchMode):
    """Notes the names of the operations that compute."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def parts(*tensors):
    """Return the rows of each expert in each tensor."""
    return zip(*(tensor.split(ROWS.tolist()) for tensor in tensors), strict=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_each_experts_rows_alone(dtype):
    generator = torch.Generator().manual_seed(0)
    x, d_out = (torch.randn(9, *n, generator=generator).to(dtype) for n in ((6,), (2, 4)))
    master = torch.randn(4, 6, 2, 4, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    weight, before = master.to(dtype), torch.ones_like(master)
    out, d_x = experts.grouped_linear(x, weight, ROWS), experts.grouped_input_gradient(d_out, weight, x, ROWS)
    d_weight = experts.grouped_weight_gradient(d_out, x, master, None, ROWS)
    total = experts.grouped_weight_gradient(d_out, x, master, before, ROWS)
    assert total is before and torch.equal(total, d_weight + 1)
    bound = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for expert, (part, d_part, own, d_own) in enumerate(parts(x, d_out, out, d_x)):
        assert torch.allclose(own, torch.einsum("rk,kfn->rfn", part, weight[expert]), **bound)
        assert torch.allclose(d_own, torch.einsum("rfn,kfn->rk", d_part, weight[expert]), **bound)
        exact = torch.einsum("rk,rfn->kfn", part.double(), d_part.double()).to(master.dtype)
        assert torch.allclose(d_weight[expert], exact, rtol=1e-5, atol=1e-6)


def test_rows_are_sorted_by_expert_and_return_to_their_tokens():
    chosen = torch.tensor([[2, 0], [3, 2], [0, 3], [2, 3]])
    order, place, rows = experts.in_expert_order(chosen, 4)
    assert rows.tolist() == [2, 0, 3, 3]
    assert chosen.flatten()[order].tolist() == [0, 0, 2, 2, 2, 3, 3, 3]
    assert order.tolist() == [1, 4, 0, 3, 6, 2, 5, 7], "rows of one expert keep their order"
    x = torch.arange(4.0)[:, None].expand(4, 3)
    selected = experts.selected_rows(x, order, 2)
    assert selected[:, 0].tolist() == [0, 2, 0, 1, 3, 1, 2, 3]
    assert torch.equal(experts.summed_rows(selected, place, 2), 2 * x)


def test_received_rows_have_the_experts_of_each_rank_in_order():
    rows_of_ranks = torch.tensor([1, 2, 0, 3])  # two ranks, two experts of this rank
    assert experts.experts_of_rows(rows_of_ranks, 2, 6).tolist() == [0, 1, 1, 1, 1, 1]
