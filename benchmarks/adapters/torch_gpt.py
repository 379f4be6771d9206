"""gpt4d's GPT-2 in plain torch.nn: the model for torch's own parallelism, and the baseline on one device.

Shapes: B sequences, S positions, H hidden, N hidden within this rank's heads, V vocabulary.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import OPTIM
from gpt4d.model.gpt2 import GPT2Config


class TorchBlock(nn.Module):
    def __init__(self, config: GPT2Config):
        super().__init__()
        hidden, self.head_size = config.hidden, config.hidden // config.heads
        self.attention_norm = nn.LayerNorm(hidden, config.norm_epsilon)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden, config.norm_epsilon)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        # Each head's query, key and value are adjacent, so a split between heads splits all three.
        qkv = self.qkv(self.attention_norm(x_BSH)).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        mixed_BSN = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x_BSH = x_BSH + self.output(mixed_BSN)
        return x_BSH + self.down(F.gelu(self.up(self.mlp_norm(x_BSH)), approximate="tanh"))


class TorchGPT(nn.Module):
    def __init__(self, config: GPT2Config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.padded_vocab_size, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden)
        self.blocks = nn.ModuleList(TorchBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.padded_vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.tokens.weight

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.tokens(ids_BS) + self.positions(torch.arange(ids_BS.shape[1], device=ids_BS.device))
        for block in self.blocks:
            x_BSH = block(x_BSH)
        return self.head(self.norm(x_BSH))


def torch_state_dict(weights: Mapping[str, torch.Tensor], config: GPT2Config) -> dict[str, torch.Tensor]:
    """Return the state dict of a ``TorchGPT`` for our global tensors, which are [in, out]."""
    state = {}
    for name, tensor in weights.items():
        if ".qkv." in name:  # [..., part, head·size] → [..., head·part·size]
            tensor = tensor.unflatten(-1, (config.heads, -1)).movedim(-3, -2).flatten(-3)
        if name.startswith("blocks.") and tensor.ndim == 2:
            tensor = tensor.t()
        state[name.replace("attention.", "").replace("mlp.", "")] = tensor.contiguous()
    return {**state, "head.weight": state["tokens.weight"]}


def build_torch_gpt(weights: Mapping[str, torch.Tensor], config: GPT2Config) -> TorchGPT:
    model = TorchGPT(config)
    model.load_state_dict(torch_state_dict(weights, config))
    return model


def adamw(*groups: Iterable[torch.Tensor]) -> torch.optim.AdamW:
    """Return the AdamW of ``gpt4d.optim.optimizer``: only matrices decay. Each group is updated separately."""
    settings = []
    for parameters in map(list, groups):
        settings += [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIM.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
    settings = [group for group in settings if group["params"]]
    return torch.optim.AdamW(settings, OPTIM.lr, (OPTIM.beta1, OPTIM.beta2), OPTIM.epsilon, fused=True)
