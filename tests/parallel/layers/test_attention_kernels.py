"""The choice of torch's kernels for attention, which depends on the GPU and on installed packages."""

from unittest.mock import Mock

import pytest
import torch

from gpt4d.config import ConfigError
from gpt4d.parallel.layers import attention_kernels

GPU = torch.device("cuda", 0)


@pytest.fixture
def activate(monkeypatch):
    """Return the mock of torch's function that activates an implementation, on an H100 with FlashAttention 3."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(attention_kernels, "find_spec", lambda name: object())
    activate, active = Mock(), []
    activate.side_effect = active.append
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    return activate


def test_a_hopper_gpu_uses_flash_attention_3_if_it_is_installed(activate):
    for _ in range(2):  # several stages of one process
        attention_kernels.use_installed_kernels(GPU)
    activate.assert_called_once_with("FA3")


@pytest.mark.parametrize("lacking", ["gpu", "Hopper", "CUDA", "package"])
def test_flash_attention_3_requires_a_hopper_gpu_and_the_package(activate, monkeypatch, lacking):
    if lacking == "Hopper":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    if lacking == "CUDA":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    if lacking == "package":
        monkeypatch.setattr(attention_kernels, "find_spec", lambda name: None)
    attention_kernels.use_installed_kernels(torch.device("cpu") if lacking == "gpu" else GPU)
    activate.assert_not_called()


def test_a_package_for_another_version_of_torch_is_reported_with_a_remedy(activate):
    activate.side_effect = ImportError("undefined symbol")
    with pytest.raises(ConfigError, match=r"flash_attn_interface: does not work .*undefined symbol.*; install"):
        attention_kernels.use_installed_kernels(GPU)
