"""The context of a stage's layers: its grid, its settings, and how a pass computes. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpt4d.config import Config, OverlapConfig
from gpt4d.parallel.comm.pending import MeshAxis
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layout import BETWEEN_LAYERS, ParameterSpec


@dataclass(frozen=True)
class Pass:
    """What differs between a forward of training and a forward without a backward.

    Attributes:
        records: operations are recorded for a backward, elements are dropped, and routers count their tokens.
        num_chunks: chunks of a microbatch that the blocks interleave.
        recompute: blocks keep only their inputs and are recomputed in the backward.
        recompute_inputs: products do not keep inputs that are easily recomputed (gpt4d.parallel.layers.product).
        splits_tokens: x splits the tokens between the layers.
    """

    records: bool = True
    num_chunks: int = 1
    recompute: bool = False
    recompute_inputs: bool = False
    splits_tokens: bool = False


INFERENCE = Pass(records=False)  # of any number of samples and tokens, which chunks and axes need not divide


@dataclass(frozen=True)
class Context:
    """Grid and settings that all layers of a stage share.

    Attributes:
        grid: the stage's grid, with an axis by each name: torch's (gpt4d.parallel.grid) or a symbolic one.
        compute_dtype: dtype of gathered weights and activations.
        overlap: communication that overlaps computation.
        training: how the forwards of training compute; x splits no tokens on a grid without x.
        loss_chunks: chunks of the tokens for the loss, which has the logits of one chunk at a time.
        z_loss: weight of log²(Σ exp(logits)) in the gradients of the loss.
        scatter_heads: y splits the heads of attention too, if it divides their number.
        context_ring: keys and values of shared sequences travel around a ring of ranks; false: they are all-gathered.
        float8: linear layers of blocks multiply in float8 (gpt4d.parallel.layers.float8).
        expert_data: data also splits experts.
    """

    grid: Any
    compute_dtype: Any
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    training: Pass = Pass()
    loss_chunks: int = 1
    z_loss: float = 0.0
    scatter_heads: bool = True
    context_ring: bool = False
    float8: bool = False
    expert_data: bool = False

    def __post_init__(self) -> None:
        if self.grid.x.size == 1:
            object.__setattr__(self, "training", replace(self.training, splits_tokens=False))

    @property
    def expert_axis(self) -> MeshAxis:
        """The axis whose ranks have different experts."""
        return self.grid.batch if self.expert_data else self.grid.z

    def head_axes(self, heads: int, stream: str | None = "y") -> tuple[str, ...]:
        """Return the names of the axes that split the heads of an attention, outermost first."""
        if stream is None:
            return ()
        return sharding.head_axes(heads, self.grid.x.size, self.grid.y.size, self.scatter_heads, stream)

    def batch_axes(self, spec: ParameterSpec) -> tuple[str, ...]:
        """Return the axes over which a parameter's gradient is summed, innermost first.

        They split the samples, tokens, heads or features that the parameter acts on.
        """
        summed = spec.summed
        if summed == BETWEEN_LAYERS:
            summed = ("x",) if self.training.splits_tokens else ()
        elif isinstance(summed, int):
            summed = self.head_axes(summed)[::-1]
        return (*summed, "z", "data")


def layer_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run that decide how layers compute, as arguments of ``Context``."""
    train, parallel = config.train, config.parallel
    return {
        "training": Pass(
            num_chunks=parallel.chunks,
            recompute=train.activation_checkpointing == "full",
            recompute_inputs=train.activation_checkpointing == "selective",
            splits_tokens=parallel.sequence_parallel,
        ),
        "loss_chunks": train.loss_chunks,
        "z_loss": train.z_loss,
        "scatter_heads": parallel.scatter_heads,
        "context_ring": parallel.context_exchange == "ring",
        "float8": train.precision == "fp8",
        "expert_data": parallel.expert_data,
    }
