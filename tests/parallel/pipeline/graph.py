"""A toy family with tensors that skip blocks: activations, integers and a mask. Shapes as in tests/seams/toy.py.

No torch here: graph_kernels.py has the functions of torch's tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.model import registry
from gpt4d.model.description import STREAM, Description, EdgeTensor, Tensors, units_of
from gpt4d.model.parts import Part
from gpt4d.parallel.engine.interleave import run_blocks
from gpt4d.parallel.layers.layer import BoundLayer
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.symbolic.kernels import TorchFunction, kernel, planned_kernel
from tests.seams import toy

# By name, the unit that produces each tensor, None for the first product, and the blocks that use it.
USES: dict[str, tuple[int | None, tuple[int, ...]]] = {
    "embedded": (None, (1, 3)),
    "scales": (1, (3,)),
    "classes": (None, (1, 3)),
    "mask": (None, (2,)),
}


@dataclass
class GraphConfig(toy.ToyConfig):
    name: str = "graph"
    blocks: int = 4


@kernel
def of_rows(x_TF):
    """Return the integers and the mask, [T], of rows of data."""
    return x_TF.like(x_TF.shape[:1], "int64"), x_TF.like(x_TF.shape[:1], "bool")


@planned_kernel
def elementwise(x, *others):
    """Return a function of the elements of tensors."""
    return x.like()


class WeightedFunction(TorchFunction):
    """Half a tensor, times an integer for each row."""

    torch_name = "weighted"

    @staticmethod
    def forward(ctx, x, integers):
        ctx.save_for_backward(integers)
        return elementwise(elementwise(x), integers)

    @staticmethod
    def backward(ctx, d_out):
        return elementwise(elementwise(d_out, *ctx.saved_tensors)), None


class FlippedFunction(TorchFunction):
    """A tensor whose rows outside a mask are halved and change their sign."""

    torch_name = "flipped"

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        return elementwise(x, elementwise(x), mask)

    @staticmethod
    def backward(ctx, d_out):
        (mask,) = ctx.saved_tensors
        within, outside = elementwise(d_out, mask), elementwise(d_out, mask)
        return elementwise(within, elementwise(outside)), None


class ScaledFunction(TorchFunction):
    """``x · (1 + scales)``."""

    torch_name = "scaled"

    @staticmethod
    def forward(ctx, x, scales):
        factors = elementwise(scales)
        ctx.save_for_backward(x, factors)
        return elementwise(x, factors)

    @staticmethod
    def backward(ctx, d_out):
        x, factors = ctx.saved_tensors
        return elementwise(d_out, factors), elementwise(d_out, x)


class TanhFunction(TorchFunction):
    torch_name = "tanh"

    @staticmethod
    def forward(ctx, x):
        out = elementwise(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, d_out):
        return elementwise(d_out, *ctx.saved_tensors)


def joined(block: int, x_TH: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the input of a block from the stream and the tensors that the block uses."""
    if block in (1, 3):
        x_TH = x_TH + WeightedFunction.apply(tensors["embedded"], tensors["classes"])
    if block == 2:
        x_TH = FlippedFunction.apply(x_TH, tensors["mask"])
    if block == 3:
        x_TH = ScaledFunction.apply(x_TH, tensors["scales"])
    return x_TH


@dataclass(frozen=True)
class GraphSpec(toy.ToySpec):
    def compute(
        self, model: BoundLayer, part: Part, received: Mapping[str, Any], x_BSF: Any, targets_BSO: Any
    ) -> dict[str, Any]:
        """Return the tensors that a part produces for later parts, or the ``loss`` of the last part."""
        tensors = dict(received)
        if part.begins:
            rows_TF = x_BSF.flatten(0, 1)
            tensors[STREAM] = tensors["embedded"] = self.embedded(model, rows_TF)
            tensors["classes"], tensors["mask"] = of_rows(rows_TF)
        for index in part.blocks:
            x_TH, block = joined(index, tensors.pop(STREAM), tensors), getattr(model.blocks, str(index))
            tensors[STREAM] = run_blocks(model.weights, [block], x_TH)
            if index == 1:
                tensors["scales"] = TanhFunction.apply(tensors[STREAM])
        if part.ends:
            return {"loss": self.loss(model, tensors[STREAM], targets_BSO)}
        last = max(part.blocks, default=-1)
        later = (name for name, (_, users) in USES.items() if max(users) > last and name not in received)
        return {name: tensors[name] for name in (STREAM, *later) if name in tensors}


def describe(config: GraphConfig) -> Description:
    """Return the toy's description with the tensors that skip blocks."""

    def tensors(block: int | None) -> Tensors:
        produces = (name for name, (source, _) in USES.items() if source == block)
        return Tensors(tuple(produces), tuple(name for name, (_, blocks) in USES.items() if block in blocks))

    blocks = [tensors(index) for index in range(config.blocks)]
    kinds = [(config.inner(index), block) for index, block in enumerate(blocks)]
    activation = EdgeTensor(Layout(("data", "z"), ("y",)), lambda samples, length: (samples * length, config.hidden))
    integers = EdgeTensor(Layout(("data", "z")), lambda samples, length: (samples * length,), "integer")
    skips = {
        "embedded": activation,
        "scales": activation,
        "classes": integers,
        "mask": replace(integers, kind="mask"),
    }
    description = toy.describe(config, GraphSpec)
    return replace(
        description, parts=(units_of(kinds, tensors(None), blocks),), tensors={**description.tensors, **skips}
    )


registry.register(replace(toy.FAMILY, name="graph", config=GraphConfig, describe=describe))
