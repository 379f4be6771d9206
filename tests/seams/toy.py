"""A toy model family and a toy task, registered from outside gpt4d. No torch here: toy_torch.py has the rest.

The family has blocks unlike GPT-2's: no attention, no norms, no biases, a gated MLP, two widths in turn.
"""

from dataclasses import dataclass

from gpt4d.config import Config, ConfigError, Divisibility, ModelConfig, check_at_least
from gpt4d.model import registry
from gpt4d.model.costs import ActivationCost
from gpt4d.model.description import STREAM, Description, EdgeTensor, Unit, Walk
from gpt4d.model.family import Family
from gpt4d.model.product_costs import LinearCost
from gpt4d.model.residual import ResidualBlock
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layout import Layout, ParameterSpec
from gpt4d.parallel.order import LayerWeights
from gpt4d.task import registry as tasks

STD = 0.15  # of initial weights
_SUM_BYTES = 4  # of a float32 loss


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
class FeatureSlice:
    """The data, of which a rank takes the features that x assigns to it."""

    features: int

    def parameters(self) -> dict[str, ParameterSpec]:
        return {}

    def weights(self) -> LayerWeights:
        return LayerWeights()

    def flops(self, length: int) -> float:
        return 0.0

    async def forward(self, walk: Walk) -> None:
        nbytes = walk.tokens * (self.features // walk.sizes.x) * walk.element_bytes
        walk.hold(nbytes)
        walk.compute(moved=2 * nbytes)

    async def backward(self, walk: Walk) -> None:
        """Data has no gradient, and the layer behind has released the slice."""


@dataclass(frozen=True)
class SquaredError:
    """The summed squared error of outputs that x splits."""

    outputs: int

    def parameters(self) -> dict[str, ParameterSpec]:
        return {}

    def weights(self) -> LayerWeights:
        return LayerWeights()

    def flops(self, length: int) -> float:
        return 0.0

    def _bytes(self, walk: Walk) -> tuple[int, int]:
        """Return the bytes of the outputs, and of their errors in float32."""
        elements = walk.tokens * (self.outputs // walk.sizes.x)
        return elements * walk.element_bytes, elements * 4

    async def forward(self, walk: Walk) -> None:
        predicted, errors = self._bytes(walk)
        walk.hold(errors)
        walk.compute(moved=predicted + 2 * errors, operations=2)
        walk.release(predicted)
        walk.do("all_reduce", "x", _SUM_BYTES)

    async def backward(self, walk: Walk) -> None:
        predicted, errors = self._bytes(walk)
        walk.hold(predicted)
        walk.compute(moved=predicted + errors)
        walk.release(errors)


def gate_and_up(hidden: int, inner: int) -> LinearSpec:
    return LinearSpec(hidden, inner, num_fused=2, bias=False, std=STD)


def down(hidden: int, inner: int) -> LinearSpec:
    return LinearSpec(inner, hidden, transposed=True, bias=False, std=STD)


def first_layer(config: ToyConfig) -> LinearSpec:
    return LinearSpec(config.features, config.hidden, transposed=True, bias=False, std=STD)


def last_layer(config: ToyConfig) -> LinearSpec:
    return LinearSpec(config.hidden, config.outputs, bias=False, std=STD)


def describe(config: ToyConfig) -> Description:
    """Return the description of a toy model."""

    def block(inner: int) -> ResidualBlock:
        up = LinearCost("up", gate_and_up(config.hidden, inner))
        back = LinearCost("down", down(config.hidden, inner))
        return ResidualBlock(branches=((up, ActivationCost(2 * inner, inner), back),), features=config.hidden)

    blocks = [block(config.inner(parity)) for parity in (0, 1)]
    first = LinearCost("input", first_layer(config), input_gradient=False)
    return Description(
        units=(
            Unit("", FeatureSlice(config.features)),
            Unit("", first),
            *(Unit(f"blocks.{index}", blocks[index % 2], block=True) for index in range(config.blocks)),
            Unit("", LinearCost("output", last_layer(config))),
            Unit("", SquaredError(config.outputs)),
        ),
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
                sequence_parallel=Layout(("data", "z", "x"), ("y",)),  # rows are independent: chunks need not be whole
            )
        },
    )


def _check_model(config: Config) -> None:
    for key in ("blocks", "features", "hidden", "wide", "narrow", "outputs"):
        check_at_least(f"model.{key}", getattr(config.model, key), 1)


def _build(config: ToyConfig, weights, parts):
    from tests.seams.toy_torch import Toy  # imports torch

    return Toy(config, weights, parts)


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
    build=_build,
)
registry.register(FAMILY)
tasks.register(tasks.TaskEntry("regression", _check_task, _create_task))
