"""gpt4d's Llama in plain torch.nn, for torch's own context parallelism.

Shapes: B sequences, S this rank's positions, H hidden, h heads of queries, g heads of keys and values, s size of a
head.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.model.llama import ADAPTER, LlamaConfig

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of queries [B, S, h, s] to keys and values [B, S, g, s], whose output is [B, S, h, s]."""


def rotate(x_BShs: torch.Tensor, cos_Ss: torch.Tensor, sin_Ss: torch.Tensor) -> torch.Tensor:
    """Rotate the first half of a head's features with the second half, as transformers does."""
    first, second = x_BShs.chunk(2, -1)
    return x_BShs * cos_Ss[:, None] + torch.cat((-second, first), -1) * sin_Ss[:, None]


class TorchLlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig, attention: Attention):
        super().__init__()
        self.head_size, self.attention = config.head_size, attention
        query_features, key_features, _ = config.qkv_channels
        self.input_layernorm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.q_proj = nn.Linear(config.hidden, query_features, bias=False)
        self.k_proj = nn.Linear(config.hidden, key_features, bias=False)
        self.v_proj = nn.Linear(config.hidden, key_features, bias=False)
        self.o_proj = nn.Linear(query_features, config.hidden, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.gate_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x_BSH: torch.Tensor, cos_Ss: torch.Tensor, sin_Ss: torch.Tensor) -> torch.Tensor:
        normal_BSH = self.input_layernorm(x_BSH)
        q, k, v = (
            layer(normal_BSH).unflatten(-1, (-1, self.head_size)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed_BShs = self.attention(rotate(q, cos_Ss, sin_Ss), rotate(k, cos_Ss, sin_Ss), v)
        x_BSH = x_BSH + self.o_proj(mixed_BShs.flatten(2))
        normal_BSH = self.post_attention_layernorm(x_BSH)
        return x_BSH + self.down_proj(F.silu(self.gate_proj(normal_BSH)) * self.up_proj(normal_BSH))


class TorchLlama(nn.Module):
    """A Llama on some positions of each sequence. ``attention`` communicates with the ranks of all positions."""

    def __init__(self, config: LlamaConfig, attention: Attention, positions: torch.Tensor):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.padded_vocab_size, config.hidden)
        self.layers = nn.ModuleList(TorchLlamaBlock(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.lm_head = nn.Linear(config.hidden, config.padded_vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_size, 2) / config.head_size)
        angles_Ss = torch.outer(positions, frequencies).repeat(1, 2)
        # Not buffers, because DDP broadcasts the first rank's buffers, and each rank has other positions.
        self.cos_Ss, self.sin_Ss = angles_Ss.cos(), angles_Ss.sin()

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embed_tokens(ids_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.cos_Ss, self.sin_Ss)
        return self.lm_head(self.norm(x_BSH))


def torch_tensors(tensors: Mapping[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return gpt4d's global weights or gradients with the names and shapes of a ``TorchLlama``."""
    found = {}
    for name, tensor in tensors.items():
        for library_name, part in zip(ADAPTER.names(name, config), ADAPTER.to_hf(name, tensor, config), strict=True):
            short = library_name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
            found[short] = part
    return found


def build_torch_llama(
    weights: Mapping[str, torch.Tensor], config: LlamaConfig, attention: Attention, positions: torch.Tensor
) -> TorchLlama:
    """Return a Llama with gpt4d's global ``weights``. The head is tied to the token embedding."""
    model = TorchLlama(config, attention, positions)
    state = torch_tensors(weights, config)
    model.load_state_dict({**state, "lm_head.weight": state["embed_tokens.weight"]})
    return model
