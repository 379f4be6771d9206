"""What is to be trained, as numbers: parameters with their layouts, FLOPs, and the part of both that a device has."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from gpt4d.config import Config, GridSizes, ModelConfig
from gpt4d.parallel import layout
from gpt4d.parallel.layout import Layout, over_data

MASTER_BYTES = 4  # of a weight, of its gradient and of each of AdamW's two states


@dataclass(frozen=True, eq=False)
class Tensor:
    """What one or more of a model's parameters are. ``streamed``: layers gather it over z, and scatter its gradient.

    Told apart by identity: all blocks have the same ones.
    """

    shape: tuple[int, ...]
    layout: Layout

    @property
    def streamed(self) -> bool:
        return "z" in self.layout.axes

    def elements(self, sizes: GridSizes) -> int:
        """Of the part that a device holds."""
        return self._parts(self.layout, sizes)

    def owned(self, sizes: GridSizes, shard_states: bool) -> int:
        """Elements that a device optimizes; with ``shard_states`` (ZeRO-1) its rows along data."""
        return self._parts(over_data(self.shape, self.layout, sizes._asdict()) if shard_states else self.layout, sizes)

    def _parts(self, layout: Layout, sizes: GridSizes) -> int:
        return math.prod(self.shape) // math.prod(getattr(sizes, axis) for axis in layout.axes)


def parameters(model: ModelConfig) -> dict[str, Tensor]:
    """Those of a GPT by their names, in the order in which the model has them."""
    return _parameters(model.layers, model.hidden, model.padded_vocab_size, model.max_positions)


@cache
def _parameters(layers: int, hidden: int, vocabulary: int, positions: int) -> dict[str, Tensor]:
    norm = {name: Tensor((hidden,), layout.NORM) for name in ("weight", "bias")}
    found = {
        "tokens.weight": Tensor((vocabulary, hidden), layout.EMBEDDING),
        "positions.weight": Tensor((positions, hidden), layout.POSITIONS),
    }
    parts = {
        "attention_norm": norm,
        "attention.qkv": _linear(hidden, (3, hidden)),
        "attention.output": _linear(hidden, (hidden,), transposed=True),
        "mlp_norm": norm,
        "mlp.up": _linear(hidden, (4 * hidden,)),
        "mlp.down": _linear(4 * hidden, (hidden,), transposed=True),
    }
    for block in range(layers):
        for part, tensors in parts.items():
            found |= {f"blocks.{block}.{part}.{name}": tensor for name, tensor in tensors.items()}
    return found | {f"norm.{name}": tensor for name, tensor in norm.items()}


def _linear(features: int, out: tuple[int, ...], transposed: bool = False) -> dict[str, Tensor]:
    of_weight, of_bias = layout.linear(transposed, out[0] if len(out) > 1 else None)
    return {"weight": Tensor((features, *out), of_weight), "bias": Tensor(out, of_bias)}


@cache
def _counted(model_key: tuple[int, ...]) -> Counter[Tensor]:
    return Counter(_parameters(*model_key).values())


def training_state(model: ModelConfig, sizes: GridSizes, shard_states: bool) -> dict[str, int]:
    """Bytes on a device: ``weights`` and ``optimizer`` stay, ``gradients`` come and go with each step."""
    kinds = _counted((model.layers, model.hidden, model.padded_vocab_size, model.max_positions))
    whole = sum(count * tensor.elements(sizes) for tensor, count in kinds.items()) * MASTER_BYTES
    owned = sum(count * tensor.owned(sizes, shard_states) for tensor, count in kinds.items()) * MASTER_BYTES
    return {"weights": whole, "gradients": whole, "optimizer": 2 * owned}


def model_flops(model: ModelConfig, sequences: int, length: int) -> float:
    """Of one training step, forward and backward (Narayanan et al.; recomputation not counted)."""
    h, layers, vocabulary = model.hidden, model.layers, model.padded_vocab_size
    attention_and_head = 1 + length / (6 * h) + vocabulary / (16 * layers * h)
    return 72 * sequences * length * layers * h**2 * attention_and_head


def hardware_flops(model: ModelConfig, sequences: int, length: int) -> float:
    """The same with each block's forward computed twice, as under activation checkpointing: 96 in place of 72."""
    return model_flops(model, sequences, length) * 96 / 72


def compute_bytes(config: Config) -> int:
    """Of an element of activations and gathered weights: ``train.precision`` on the machine of ``cluster``."""
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if config.cluster.device == "cuda" else "fp32"
    return {"fp32": 4, "bf16": 2}[precision]


def micro_batch_sizes(config: Config, sizes: GridSizes) -> list[int]:
    """Sequences that a device may take at once, the most first: what ``train.micro_batch_size`` says, if it does."""
    if config.train.micro_batch_size is not None:
        return [config.train.micro_batch_size]
    share = config.train.batch_size // sizes.batch_shards
    return [size for size in range(share, 0, -1) if share % size == 0]
