"""The same weights under the names and shapes of transformers' GPT2LMHeadModel.

Its linear weights are stored [in, out] like ours; only queries, keys and values, which it lays side by side, have a dim
of their own here, and our embedding has rows of padding.
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from gpt4d.config import ModelConfig

if TYPE_CHECKING:
    from transformers import GPT2Config

    from gpt4d.model.gpt import GPT

_NAMES = {
    "tokens.weight": "transformer.wte.weight",
    "positions.weight": "transformer.wpe.weight",
    "norm": "transformer.ln_f",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def hf_name(name: str) -> str:
    """``blocks.3.attention.qkv.weight`` → ``transformer.h.3.attn.c_attn.weight``."""
    if name in _NAMES:
        return _NAMES[name]
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name):
        return f"{_NAMES['blocks']}.{block[1]}.{_NAMES[block[2]]}.{block[3]}"
    layer, _, kind = name.rpartition(".")
    return f"{_NAMES[layer]}.{kind}"


def hf_config(config: ModelConfig) -> "GPT2Config":
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_positions,
        n_embd=config.hidden,
        n_layer=config.layers,
        n_head=config.heads,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.attention_dropout,
        layer_norm_epsilon=config.norm_epsilon,
        bos_token_id=None,
        eos_token_id=None,
    )


def export_tensor(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Our global tensor as transformers has it: padding cut off, queries, keys and values side by side."""
    if name == "tokens.weight":
        return tensor[: config.vocab_size]
    if ".attention.qkv." in name:
        return tensor.flatten(-2)
    return tensor


def import_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of ``export_tensor``: a global tensor of our ``shape``; rows of padding are zero."""
    if name == "tokens.weight":
        return torch.cat((tensor, tensor.new_zeros(shape[0] - len(tensor), shape[1])))
    return tensor.reshape(shape)


def export_weights(model: "GPT", full: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict for GPT2LMHeadModel. ``full`` gives a parameter's global tensor."""
    state = {hf_name(n): export_tensor(n, full(p), model.config) for n, p in model.named_parameters()}
    return {**state, "lm_head.weight": state["transformer.wte.weight"]}


def import_weights(model: "GPT", state: Mapping[str, torch.Tensor]) -> None:
    """Copies this rank's part of every weight of a GPT2LMHeadModel's state dict into ``model``."""
    grid = model.weights.grid
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = import_tensor(name, state[hf_name(name)], parameter.spec.shape)
            parameter.copy_(whole[grid.local_slices(parameter.spec.shape, parameter.spec.layout)])
