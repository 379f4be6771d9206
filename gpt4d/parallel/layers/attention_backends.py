"""Backends of torch's attention on GPUs: FlashAttention 3, and variable-length attention to documents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import Any

from gpt4d.parallel.lazy import torch
from gpt4d.runtime.errors import warn

_FLASH_ATTENTION_3 = "flash_attn_interface"  # its package


def use_installed_kernels(device: torch.device) -> None:
    """Replace torch's FlashAttention 2 on a Hopper GPU by FlashAttention 3 if it is installed.

    Variable-length attention uses it, and all attention where cuDNN is older than 9.15.1. torch does not choose these
    versions of cuDNN because of their errors. If the package does not fit torch, a warning says so.
    """
    from torch.nn import attention

    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return
    if attention.current_flash_attention_impl() == "FA3" or find_spec(_FLASH_ATTENTION_3) is None:
        return
    try:
        attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            warn(
                f"{_FLASH_ATTENTION_3}: does not work with torch {torch.__version__} ({error}), so FlashAttention 2 is "
                "used; install the package for this version of torch, or uninstall it"
            )


def with_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [B, S, heads, s] with each head of ``x`` repeated for the query heads that it serves."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def takes_documents(q: torch.Tensor) -> bool:
    """Return whether torch's variable-length flash attention supports queries with the dtype and size of ``q``."""
    if not has_variable_length_attention(q.device) or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 192  # some GPUs do not support the backward for larger heads


def has_variable_length_attention(device: torch.device) -> bool:
    """Return whether torch has variable-length flash attention for a device."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def attention_of_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, window: int | None, scale: float | None
) -> torch.Tensor:
    """Return variable-length attention of [sequences, length, heads, size] as [tokens, heads, size].

    ``starts`` is ``Documents.starts``. No document is longer than a sequence.
    """
    from torch.nn.attention.varlen import varlen_attn  # its import takes two seconds

    longest, limits = q.shape[1], (-1 if window is None else window - 1, 0)  # limits: keys before and after the query
    options: dict[str, Any] = {"enable_gqa": True} if _groups_heads(varlen_attn) else {}
    if not options:
        k, v = with_heads(k, q.shape[2]), with_heads(v, q.shape[2])
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    attended = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=limits, **options)
    assert isinstance(attended, torch.Tensor)  # a tuple is returned only with return_aux
    return attended


@functools.cache
def _groups_heads(varlen_attn: Callable) -> bool:
    """Return whether variable-length attention takes fewer heads of keys and values: since torch 2.12."""
    return "enable_gqa" in signature(varlen_attn).parameters
