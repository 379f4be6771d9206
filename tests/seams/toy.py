"""A toy model family and a toy task, registered from outside gpt4d. No torch here.

The family has blocks unlike GPT-2's: no attention, no norms, no biases, a gated MLP, two alternating widths.
toy_kernels.py has its kernels, toy_torch.py the task.

Shapes: B samples, S rows of a sample, T rows, F features, H hidden, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import Config, ConfigError, Divisibility, ModelConfig, check_at_least
from gpt4d.model import registry
from gpt4d.model.description import STREAM, Description, EdgeTensor, units_of
from gpt4d.model.family import Family
from gpt4d.model.parts import Part
from gpt4d.parallel.engine.interleave import run_alone, run_blocks
from gpt4d.parallel.layers.activations import SwigluFunction
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.product import cast_to
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.symbolic.kernels import Function, kernel
from gpt4d.parallel.symbolic.tensor import wide_dtype
from gpt4d.task import registry as tasks

STD = 0.15  # of initial weights


@dataclass
class ToyConfig(ModelConfig):
    """A stack of gated MLPs from ``features`` to ``outputs`` numbers per row."""

    name: str = "toy"
    blocks: int = 3
    features: int = 12
    hidden: int = 24
    wide: int = 32  # inner width of the first, third, … block
    narrow: int = 16  # inner width of the second, fourth, … block
    outputs: int = 4

    def inner(self, index: int) -> int:
        return self.narrow if index % 2 else self.wide


@dataclass(frozen=True)
class GatedMLPSpec(LayerSpec):
    hidden: int
    inner: int

    def layers(self) -> dict[str, LayerSpec]:
        return {
            "up": LinearSpec(self.hidden, self.inner, num_fused=2, bias=False, std=STD),
            "down": LinearSpec(self.inner, self.hidden, transposed=True, bias=False, std=STD),
        }

    async def forward(self, layer: BoundLayer, x_TH: Any) -> Any:
        return x_TH + await layer.down(SwigluFunction.apply(await layer.up(x_TH)))


@dataclass(frozen=True)
class ToySpec(LayerSpec):
    """A toy model from replicated features to outputs that x splits, or parts of one."""

    config: ToyConfig
    parts: tuple[Part, ...] = ()

    def of_parts(self, parts: Sequence[Part]) -> ToySpec:
        """Return the spec of some parts."""
        return replace(self, parts=tuple(parts))

    def layers(self) -> dict[str, LayerSpec]:
        config, layers = self.config, dict[str, LayerSpec]()
        if any(part.begins for part in self.parts):
            layers["input"] = LinearSpec(config.features, config.hidden, transposed=True, bias=False, std=STD)
        layers["blocks"] = LayersSpec(
            {str(i): GatedMLPSpec(config.hidden, config.inner(i)) for part in self.parts for i in part.blocks}
        )
        if any(part.ends for part in self.parts):
            layers["output"] = LinearSpec(config.hidden, config.outputs, bias=False, std=STD)
        return layers

    def compute(
        self, model: BoundLayer, part: Part, received: Mapping[str, Any], x_BSF: Any, targets_BSO: Any
    ) -> dict[str, Any]:
        """Return the residual stream [T, H] after a part as ``stream``, or the ``loss`` of the last part.

        The loss is the squared error, summed over this rank's rows and over all outputs.
        """
        x_TH = self.embedded(model, x_BSF.flatten(0, 1)) if part.begins else received[STREAM]
        x_TH = run_blocks(model.weights, [getattr(model.blocks, str(index)) for index in part.blocks], x_TH)
        return {"loss": self.loss(model, x_TH, targets_BSO)} if part.ends else {STREAM: x_TH}

    def planned_batch(self, tensor: Callable[..., Any], samples: int, length: int) -> tuple[Any, ...]:
        """Return the batch that ``compute`` takes, of tensors ``tensor(shape, dtype)``."""
        config = self.config
        return tuple(tensor((samples, length, size), "float32") for size in (config.features, config.outputs))

    def embedded(self, model: BoundLayer, x_TF: Any) -> Any:
        """Return the residual stream of rows before the blocks."""
        return run_alone(model.input(cast_to(own_part(x_TF, model.context.grid.x), model.context.compute_dtype)))

    def loss(self, model: BoundLayer, x_TH: Any, targets_BSO: Any) -> Any:
        """Return the squared error of the outputs for the residual stream behind the blocks."""
        axis = model.context.grid.x
        return SquaredErrorFunction.apply(
            run_alone(model.output(x_TH)), own_part(targets_BSO.flatten(0, 1), axis), axis
        )


def own_part(tensor: Any, axis: Any) -> Any:
    """Return this rank's part of a tensor whose last dim ``axis`` splits."""
    return tensor.chunk(axis.size, -1)[axis.index]


@kernel
def errors_of(predicted, targets):
    """Return the differences, at least in float32."""
    return predicted.like(dtype=wide_dtype(predicted))


@kernel
def squares_of(errors):
    """Return the squares."""
    return errors.like()


@kernel
def sum_of(squares):
    """Return the sum, [1]."""
    return squares.like((1,))


@kernel
def error_gradient(errors, d_loss):
    """Return the gradient of the errors."""
    return errors.like()


class SquaredErrorFunction(Function):
    """``Σ (predicted - target)²`` over all features, which ``axis`` splits.

    Every rank's loss is the global sum, so its derivative with respect to a rank's features needs no collective.
    """

    @staticmethod
    def forward(ctx, predicted, targets, axis):
        errors = errors_of(predicted, targets)
        ctx.save_for_backward(errors)
        ctx.dtype = predicted.dtype
        return axis.all_reduce(sum_of(squares_of(errors))).squeeze(0)

    @staticmethod
    def backward(ctx, d_loss):
        (errors,) = ctx.saved_tensors
        return cast_to(error_gradient(errors, d_loss), ctx.dtype), None, None


def describe(config: ToyConfig, model: type[ToySpec] = ToySpec) -> Description:
    """Return the description of a toy model whose spec is a ``model``."""
    return Description(
        model=model(config).of_parts,
        parts=(units_of([config.inner(index) for index in range(config.blocks)]),),
        rules=(
            Divisibility("model.features", config.features, ("x", "z")),
            Divisibility("model.hidden", config.hidden, ("y", "z")),
            Divisibility("model.wide", config.wide, ("x", "z")),
            Divisibility("model.narrow", config.narrow, ("x", "z")),
            Divisibility("model.outputs", config.outputs, ("x",)),
        ),
        tensors={
            STREAM: EdgeTensor(
                Layout(("data", "z"), ("y",)),
                lambda samples, length: (samples * length, config.hidden),
                sequence_parallel=Layout(("data", "z", "x"), ("y",)),  # a chunk may split a sample
            )
        },
    )


def _check_model(config: Config) -> None:
    for key in ("blocks", "features", "hidden", "wide", "narrow", "outputs"):
        check_at_least(f"model.{key}", getattr(config.model, key), 1)


def _check_task(config: Config) -> None:
    if config.model.outputs > config.model.features:
        raise ConfigError(
            f"model.outputs={config.model.outputs}: more than model.features={config.model.features}; lower it"
        )


def _create_task(config: Config):
    from tests.seams.toy_torch import Regression  # imports torch

    return Regression(config)


FAMILY = Family(
    name="toy",
    config=ToyConfig,
    structure=("blocks", "features", "hidden", "wide", "narrow", "outputs"),
    task="regression",
    unit="rows",
    check=_check_model,
    describe=describe,
)
registry.register(FAMILY)
tasks.register(tasks.TaskEntry("regression", _check_task, _create_task))
