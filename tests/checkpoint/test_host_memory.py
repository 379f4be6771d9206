"""Copies of tensors in host memory take the bytes of the tensors, and are pinned for a GPU."""

from types import SimpleNamespace

import pytest
import torch

from gpt4d.checkpoint.saving import HostMemory

TENSORS = {
    "weight": torch.randn(300, 7),
    "half": torch.randn(11).bfloat16(),
    "bias": torch.randn(5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 9).t(),
}


@pytest.fixture
def pinned(monkeypatch):
    """Return the pinned ranges, address to bytes, of a GPU that does not exist."""
    ranges = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: ranges.update({address: nbytes}),
        cudaHostUnregister=ranges.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: None)
    return ranges


def test_copies_have_shapes_dtypes_and_values_and_the_same_memory_in_each_save():
    memory = HostMemory(pinned=False)
    copies = memory.like(TENSORS)
    for name, tensor in TENSORS.items():
        copies[name].copy_(tensor)
    for name, tensor in TENSORS.items():
        assert copies[name].dtype == tensor.dtype and torch.equal(copies[name], tensor)
    again = memory.like({**TENSORS, "new": torch.ones(3)})
    assert all(again[name].data_ptr() == copy.data_ptr() for name, copy in copies.items())
    assert again["new"].shape == (3,)


def test_a_gpu_gets_one_pinned_block_per_dtype_of_exactly_the_bytes_of_its_tensors(pinned):
    memory = HostMemory(pinned=True)
    copies = memory.like(TENSORS)
    of_dtype = [
        sum(t.nbytes for t in TENSORS.values() if t.dtype == dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    assert list(pinned.values()) == of_dtype
    for copy in copies.values():
        inside = [
            start <= copy.data_ptr() and copy.data_ptr() + copy.nbytes <= start + n for start, n in pinned.items()
        ]
        assert any(inside) or not copy.numel()
    memory.close()
    assert pinned == {}
