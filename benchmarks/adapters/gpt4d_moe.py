"""gpt4d: forward and backward of layers of a mixture of experts on a grid."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gradient_steps import global_tensor, gradient_contender
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.moe_steps import MoeWork, MoeWorkerConfig, token_tensors
from benchmarks.settings import parse_grid
from benchmarks.worker import Contender, share_process_groups
from gpt4d.config import OverlapConfig
from gpt4d.parallel.context import Context, Pass
from gpt4d.parallel.engine.interleave import Node, run_graph
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.exchange import exchanged, summed
from gpt4d.parallel.layers.experts import ExpertsSpec
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.routing import ExpertWeightsFunction, LogitsFunction, RouterSpec, Routing, Scoring
from gpt4d.parallel.layout import spec_of
from gpt4d.parallel.sharded_weights import ShardedWeights


@dataclass(frozen=True)
class GivenRouterSpec(RouterSpec):
    """A router that computes the weights of given experts."""

    async def forward(self, layer: BoundLayer, x_TH: Any, experts_TK: Any) -> Routing:
        logits_TE = LogitsFunction.apply(x_TH, layer.weight)
        if layer.context.grid.y.size > 1:
            (logits_TE,) = await exchanged((logits_TE, summed(layer.context.grid.y)))
        weights_TK = ExpertWeightsFunction.apply(logits_TE, experts_TK, None, None, layer)
        return Routing(weights_TK, experts_TK)


@dataclass(frozen=True)
class ResidualMixtureSpec(LayerSpec):
    """A router and its experts, whose output is added to the input."""

    router: GivenRouterSpec
    experts: ExpertsSpec

    def layers(self) -> dict[str, LayerSpec]:
        return {"router": self.router, "experts": self.experts}

    async def forward(self, layer: BoundLayer, x_TH: Any, experts_TK: Any) -> Any:
        routing = await layer.router(x_TH, experts_TK)
        return x_TH + await layer.experts(x_TH, routing)


async def _call(block: Any, index: int, x_TH: Any, routes_TLK: Any) -> Any:
    return await block(x_TH, routes_TLK[:, index])


class Mixtures:
    """The layers on a grid such as ``1x1x8x1/chunks=2``."""

    def __init__(self, name: str, work: MoeWork):
        self.work, config = work, work.config
        sizes, parallel, _ = parse_grid(name)
        self.grid = grid = Grid(sizes)
        context = Context(
            grid,
            torch.float32,
            parallel.get("overlap", OverlapConfig()),
            training=Pass(num_chunks=parallel.get("chunks", 1), splits_tokens=parallel.get("sequence_parallel", False)),
        )
        self.weights = ShardedWeights(context)
        scoring = Scoring(config.per_token, normalized=True)
        router = GivenRouterSpec(config.hidden, config.experts, scoring, config.layers or 0)
        mixture = ResidualMixtureSpec(router, ExpertsSpec(config.hidden, config.inner, config.experts))
        layers = LayersSpec({str(layer): mixture for layer in range(config.layers or 0)})
        self.module = Layer(LayersSpec({"layers": layers}), self.weights)
        self.weights.bind(dict(self.module.named_parameters()))
        self.parameters = {
            f"{layer}.{key}": parameter
            for layer, block in self.module.layers.items()
            for key, parameter in (
                ("router", block.router.weight),
                ("up", block.experts.up),
                ("down", block.experts.down),
            )
        }
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(work.weights[key][self._place(parameter)])
        self.reducer = GradientReducer(self.weights, self.parameters)
        blocks = [partial(_call, block, index) for index, block in enumerate(self.module.layers.values())]
        self.nodes = [Node(block, ("x",), "x") for block in blocks]
        tokens = work.place(grid.sample_shard, grid.sample_shards)
        if context.training.splits_tokens:
            part = (tokens.stop - tokens.start) // grid.x.size
            first = tokens.start + grid.x.index * part
            tokens = slice(first, first + part)
        features = config.hidden // grid.y.size
        self.place = tokens, slice(grid.y.index * features, (grid.y.index + 1) * features)
        self.inputs = work.inputs[self.place].contiguous().requires_grad_()
        self.upstream, self.routes = work.upstream[self.place].contiguous(), work.routes[tokens].contiguous()

    def _place(self, parameter: torch.Tensor) -> tuple[slice, ...]:
        spec = spec_of(parameter)
        return self.grid.local_slices(spec.shape, spec.layout)

    def forward_backward(self) -> None:
        self.reducer.begin({}, overlaps_backward=False)
        self.output = run_graph(self.module, self.nodes, {"x": self.inputs}, "x", self.routes)["x"]
        self.output.backward(self.upstream)
        self.reducer.finish()

    def collect_results(self) -> dict:
        self.module.zero_grad(set_to_none=True)
        self.inputs.grad = None
        return {"exposed_s": {axis.name: axis.traffic.read()["exposed_s"] for axis in self.grid if axis.size > 1}}

    def gradients(self) -> dict[str, torch.Tensor]:
        found = token_tensors(self.output, self.inputs, self.work, self.place)
        for name, parameter in self.parameters.items():
            found[name] = global_tensor(parameter.grad, spec_of(parameter).shape, self._place(parameter))
        return found


def steps(settings: MoeWorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the steps on each of ``settings.grids``."""
    begin_contender, contenders = share_process_groups(distinct=True), {}
    for name in settings.grids.split(","):
        begin_contender()
        contenders[name] = gradient_contender(name, Mixtures(name, settings.work), settings.gradients)
    return contenders
