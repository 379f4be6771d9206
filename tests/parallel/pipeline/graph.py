"""A toy family with tensors that skip blocks: activations, integers and a mask.

No torch here: graph_torch.py has the rest.
"""

from dataclasses import dataclass, replace

from gpt4d.config import Config
from gpt4d.model import registry
from gpt4d.model.description import Description, EdgeTensor
from gpt4d.parallel.layout import Layout
from gpt4d.task import registry as tasks
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


def describe(config: GraphConfig) -> Description:
    """Return the toy's description with the tensors that skip blocks."""
    description, units = toy.describe(config), []
    for index, unit in enumerate(description.units):
        block = int(unit.name.removeprefix("blocks.")) if unit.block else None
        produces = tuple(name for name, (source, _) in USES.items() if source == block and (unit.block or index == 1))
        uses = tuple(name for name, (_, blocks) in USES.items() if block in blocks)
        units.append(replace(unit, produces=produces, uses=uses))
    rows, features = ("data", "z"), ("y",)
    activation = EdgeTensor(Layout(rows, features), lambda samples, length: (samples * length, config.hidden))
    integers = EdgeTensor(Layout(rows), lambda samples, length: (samples * length,), "integer")
    skips = {
        "embedded": activation,
        "scales": activation,
        "classes": integers,
        "mask": replace(integers, kind="mask"),
    }
    return replace(description, units=tuple(units), tensors={**description.tensors, **skips})


def _build(config: GraphConfig, weights, parts):
    from tests.parallel.pipeline.graph_torch import Graph  # imports torch

    return Graph(config, weights, parts)


def _create_task(config: Config):
    from tests.parallel.pipeline.graph_torch import GraphRegression  # imports torch

    return GraphRegression(config)


registry.register(
    replace(toy.FAMILY, name="graph", config=GraphConfig, task="graph_regression", describe=describe, build=_build)
)
tasks.register(tasks.TaskEntry("graph_regression", lambda config: None, _create_task))
