"""A toy model family and a toy task, registered from outside gpt4d. No torch here.

The family has blocks unlike GPT-2's: no attention, no norms, no biases, a gated MLP, two alternating widths. With
``skips``, tensors skip blocks: activations, integers and a mask.
toy_torch.py has the task.

Shapes: B samples, S rows of a sample, T rows, F features, H hidden, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import Config, ConfigError, Divisibility, ModelConfig, check_at_least
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.model.family import Family
from gpt4d.model.parts import STREAM, EdgeTensor, Part, Tensors, units_of
from gpt4d.parallel.engine.interleave import Node, run_alone, run_graph
from gpt4d.parallel.kernels import Function, TorchFunction, kernel, planned_kernel, wide_dtype
from gpt4d.parallel.layers.activations import SwigluFunction
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.product import cast_to
from gpt4d.parallel.layout import Layout
from gpt4d.task import registry as tasks

STD = 0.15  # of initial weights
# With ``skips``: by name, the unit that produces each tensor, None for the first product, and the blocks that use it.
USES: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "embedded": (None, (1, 3)),
    "halves": (1, (3,)),
    "classes": (None, (1, 3)),
    "mask": (None, (2,)),
}


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
    skips: bool = False

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


@kernel(lambda x_TF: (x_TF.like(x_TF.shape[:1], "int64"), x_TF.like(x_TF.shape[:1], "bool")))
def of_rows(x_TF):
    """Return the integers and the mask, [T], of rows of data."""
    return (x_TF[:, :2] > 0).sum(1), x_TF[:, 2] > 0


@planned_kernel
def elementwise(x, *others):
    """Return a function of the elements of tensors."""
    return x.like()


class WeightedFunction(TorchFunction):
    """Half a tensor, times an integer or a mask for each row."""

    @staticmethod
    def in_torch(x_TH, integers_T):
        return 0.5 * x_TH * integers_T.unsqueeze(1)

    @staticmethod
    def forward(ctx, x, integers):
        ctx.save_for_backward(integers)
        return elementwise(elementwise(x), integers)

    @staticmethod
    def backward(ctx, d_out):
        return elementwise(elementwise(d_out, *ctx.saved_tensors)), None


def joined(block: int, x_TH: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the input of a block from the stream and the tensors that the block uses."""
    if block in (1, 3):
        x_TH = x_TH + WeightedFunction.apply(tensors["embedded"], tensors["classes"])
    if block == 2:
        x_TH = x_TH + WeightedFunction.apply(x_TH, tensors["mask"])
    if block == 3:
        x_TH = x_TH + WeightedFunction.apply(tensors["halves"], tensors["classes"])
    return x_TH


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
        """Return the tensors that a part produces for later parts, or the ``loss`` of the last part.

        ``stream`` is the residual stream [T, H]. The loss is the squared error, summed over this rank's rows and over
        all outputs.
        """
        tensors, skips = dict(received), self.config.skips
        if part.begins:
            rows_TF = x_BSF.flatten(0, 1)
            tensors[STREAM] = tensors["embedded"] = self.embedded(model, rows_TF)
            if skips:
                tensors["classes"], tensors["mask"] = of_rows(rows_TF)
        for index in part.blocks:
            x_TH, block = tensors.pop(STREAM), Node(getattr(model.blocks, str(index)), (STREAM,), STREAM)
            inputs = {STREAM: joined(index, x_TH, tensors) if skips else x_TH}
            x_TH = run_graph(model, [block], inputs, (STREAM,))[STREAM]
            tensors[STREAM] = x_TH
            if skips and index == 1:
                tensors["halves"] = WeightedFunction.apply(x_TH, tensors["classes"])
        if part.ends:
            return {"loss": self.loss(model, tensors[STREAM], targets_BSO)}
        last = max(part.blocks, default=-1)
        later = (name for name, (_, users) in USES.items() if skips and max(users) > last and name not in received)
        return {name: tensors[name] for name in (STREAM, *later) if name in tensors}

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


@kernel(lambda predicted, _: predicted.like(dtype=wide_dtype(predicted)))
def errors_of(predicted, targets):
    """Return the differences, at least in float32, the dtype of the targets."""
    return predicted - targets


@kernel(lambda errors: errors.like())
def squares_of(errors):
    """Return the squares."""
    return errors.square()


@kernel(lambda squares: squares.like((1,)))
def sum_of(squares):
    """Return the sum, [1]."""
    return squares.sum().view(1)


@kernel(lambda errors, _: errors.like())
def error_gradient(errors, d_loss):
    """Return the gradient of the errors."""
    return 2 * d_loss * errors


class SquaredErrorFunction(Function):
    """``Σ (predicted - target)²`` over all features, which ``axis`` splits. Each rank's loss is the global sum."""

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


def tensors_of(config: ToyConfig, block: int | None) -> Tensors:
    """Return the names of the tensors that a block produces and uses besides the stream."""
    uses = USES if config.skips else {}
    produces = (name for name, (source, _) in uses.items() if source == block)
    return Tensors(tuple(produces), tuple(name for name, (_, blocks) in uses.items() if block in blocks))


def describe(config: ToyConfig) -> Description:
    """Return the description of a toy model."""
    blocks = [tensors_of(config, index) for index in range(config.blocks)]
    kinds = [(config.inner(index), block) for index, block in enumerate(blocks)]
    stream = EdgeTensor(
        Layout(("data", "z"), ("y",)),
        lambda samples, length: (samples * length, config.hidden),
        sequence_parallel=Layout(("data", "z", "x"), ("y",)),  # a chunk may split a sample
    )
    activation = replace(stream, sequence_parallel=None)
    integers = EdgeTensor(Layout(("data", "z")), lambda samples, length: (samples * length,), "integer")
    skips = {"embedded": activation, "halves": activation, "classes": integers, "mask": replace(integers, kind="mask")}
    return Description(
        model=ToySpec(config).of_parts,
        parts=(units_of(kinds, tensors_of(config, None), blocks),),
        rules=(
            Divisibility("model.features", config.features, ("x", "z")),
            Divisibility("model.hidden", config.hidden, ("y", "z")),
            Divisibility("model.wide", config.wide, ("x", "z")),
            Divisibility("model.narrow", config.narrow, ("x", "z")),
            Divisibility("model.outputs", config.outputs, ("x",)),
        ),
        tensors={STREAM: stream, **(skips if config.skips else {})},
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
    task="regression",
    unit="rows",
    check=_check_model,
    describe=describe,
)
registry.register(FAMILY)
tasks.register(tasks.TaskEntry("regression", _check_task, _create_task))
