"""The kernels of attention, in torch."""

import functools
import math
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F

from gpt4d.config import ConfigError
from gpt4d.parallel import random
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.key_value_cache import KeyValueCache

_FLASH_ATTENTION_3 = "flash_attn_interface"  # its package


def use_installed_kernels(device: torch.device) -> None:
    """Replace torch's FlashAttention 2 on a Hopper GPU by FlashAttention 3 if it is installed.

    Variable-length attention uses it, and all attention where cuDNN is older than 9.15.1. torch does not choose these
    versions of cuDNN because of their errors. Raises ConfigError if the package does not fit torch.
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return
    if torch.nn.attention.current_flash_attention_impl() == "FA3" or find_spec(_FLASH_ATTENTION_3) is None:
        return
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"{_FLASH_ATTENTION_3}: does not work with torch {torch.__version__} ({error}); install the package for "
            "this version of torch, or uninstall it"
        ) from None


def repeated(x, times: int):
    """Repeat each head of [B, S, heads, s] ``times`` times."""
    return x.repeat_interleave(times, 2)


def attention(
    q,
    k,
    v,
    documents: Documents | None,
    mask,
    causal: bool,
    window: int | None = None,
    scale: float | None = None,
):
    """Return scaled dot-product attention of [B, S, h, s] as [tokens, h·s]."""
    if documents is not None and mask is None:
        if takes_documents(q):
            return _attention_of_documents(q, k, v, documents.starts, window, scale).flatten(1)
        mask, k, v = documents.mask, _with_heads(k, q.shape[2]), _with_heads(v, q.shape[2])
    grouped = k.shape[2] != q.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = causal and mask is None
    mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return mixed.transpose(1, 2).reshape(-1, mixed.shape[1] * mixed.shape[3])


def _with_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [B, S, heads, s] with each head of ``x`` repeated for the query heads that it serves."""
    return x if x.shape[2] == heads else repeated(x, heads // x.shape[2])


def window_mask(q, documents: Documents | None, cache: KeyValueCache | None, window: int):
    """Return the additive mask of a sliding window; None if variable-length attention applies the window."""
    if documents is not None and takes_documents(q):
        return None
    allowed = None if documents is None else documents.mask
    places = torch.arange(q.shape[1], device=q.device)[:, None]
    if cache is not None:
        allowed, places = cache.mask, cache.places[:, None, :, None]
    keys = torch.arange(q.shape[1] if allowed is None else allowed.shape[-1], device=q.device)
    hidden = (keys <= places - window) | (keys > places if allowed is None else ~allowed)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)


def takes_documents(q: torch.Tensor) -> bool:
    """Return whether torch's variable-length flash attention supports queries with the dtype and size of ``q``."""
    if not has_variable_length_attention(q.device) or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= 192  # some GPUs do not support the backward for larger heads


def has_variable_length_attention(device: torch.device) -> bool:
    """Return whether torch has variable-length flash attention for a device."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def _attention_of_documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, window: int | None, scale: float | None
) -> torch.Tensor:
    """Return variable-length attention of [sequences, length, heads, size] as [tokens, heads, size].

    ``starts`` is ``Documents.starts``. No document is longer than a sequence.
    """
    from torch.nn.attention.varlen import varlen_attn  # its import takes two seconds

    longest, limits = q.shape[1], (-1 if window is None else window - 1, 0)  # limits: keys before and after the query
    options: dict[str, Any] = {"enable_gqa": True} if _groups_heads(varlen_attn) else {}
    if not options:
        k, v = _with_heads(k, q.shape[2]), _with_heads(v, q.shape[2])
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    attended = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=limits, **options)
    assert isinstance(attended, torch.Tensor)  # a tuple is returned only with return_aux
    return attended


@functools.cache
def _groups_heads(varlen_attn: Callable) -> bool:
    """Return whether variable-length attention takes fewer heads of keys and values: since torch 2.12."""
    return "enable_gqa" in signature(varlen_attn).parameters


def scores(q, k, mask, causal: bool, scale: float | None = None):
    """Return the scaled products of queries and keys, [B, h, S, S], with -inf at masked positions."""
    q, k = (x.transpose(1, 2) for x in (q, k))
    found = q @ k.transpose(-1, -2)
    found = found / math.sqrt(q.shape[-1]) if scale is None else found * scale
    if causal:
        if mask is None:
            mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).tril_()
        found = found.masked_fill(~mask, -torch.inf)
    return found


def softmax(scores):
    """Apply softmax to the last dim."""
    return scores.softmax(-1)


def weight_rows(sample_ids, places, key: int, first_head: int, heads: int):
    """Return the dropout key of each row of attention weights, int64 [B, heads, length]."""
    device = sample_ids.device
    numbers = torch.arange(first_head, first_head + heads, device=device)
    rows = random.fold(random.fold(key, sample_ids)[:, None], numbers)[..., None]
    return random.fold(rows, places[:, None])


def mixed_values(weights, v):
    """Return ``weights @ v`` as [tokens, h·s]."""
    return (weights @ v.transpose(1, 2)).transpose(1, 2).reshape(-1, v.shape[2] * v.shape[3])
