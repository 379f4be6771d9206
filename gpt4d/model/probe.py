"""Weights, FLOPs and products of each unit of a model, determined with symbolic tensors. No torch here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpt4d.config import GridSizes
from gpt4d.model.parts import EdgeTensor, ModelSpec, Part, Unit, received
from gpt4d.parallel.context import Context, Pass
from gpt4d.parallel.engine.prefetch import BACKWARD, FORWARD, RECOMPUTATION, LayerWeights
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.attention import AttentionSpec
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.experts import ExpertsSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.routing import Routing
from gpt4d.parallel.layers.sharding import NORMAL, TRANSPOSED, Axes
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.symbolic.costs import Computation
from gpt4d.parallel.symbolic.stage import SymbolicGrid, SymbolicLayer, SymbolicWeights
from gpt4d.parallel.symbolic.tensor import SymbolicTensor, backward, leaf


class Product(NamedTuple):
    """A product of a block, over all devices: elements of the input and the output of one sample, and of the weight.

    Attributes:
        split: the axes that split the features of the input and of the output.
        exchanged: elements of the rows that experts receive or return for one sample; 0: z gathers the weight.
    """

    split: Axes
    input: int
    output: int
    weight: int
    exchanged: int = 0


class _Facts(NamedTuple):
    weights: LayerWeights  # names relative to the unit
    forward_flops: float
    flops: float
    products: tuple[Product, ...]


@dataclass(eq=False)
class Probe:
    """Computes one sample of each unit of a model on one device. Equal blocks are computed once.

    The attributes are those of the model's description (gpt4d.model.description).
    """

    model: Callable[[Sequence[Part]], ModelSpec]
    tensors: Mapping[str, EdgeTensor]
    loss_chunks: int
    _known: dict[tuple[Hashable, ...], _Facts] = field(default_factory=dict)

    def weights(self, unit: Unit, recompute: bool = False) -> LayerWeights:
        """Return the names of the weights that a unit takes from the prefetcher, with or without recomputation."""
        weights = self._facts(unit, self.loss_chunks, recompute and unit.block).weights
        return LayerWeights(*(tuple(_prefix(unit) + name for name in names) for names in weights))

    def flops(self, unit: Unit, length: int) -> float:
        """Return the FLOPs of the products of one sample of ``length`` tokens, forward and backward.

        Attention counts as unfused products with all keys of its window, whether a causal mask hides them or not.
        """
        return self._facts(unit, length, recompute=False).flops

    def forward_flops(self, unit: Unit, length: int) -> float:
        """Return the FLOPs of the forward of one sample of ``length`` tokens, counted as by ``flops``."""
        return self._facts(unit, length, recompute=False).forward_flops

    def products(self, unit: Unit, length: int) -> tuple[Product, ...]:
        """Return the products of a block whose input is split."""
        return self._facts(unit, length, recompute=False).products

    def _facts(self, unit: Unit, length: int, recompute: bool) -> _Facts:
        kind = (unit.kind,) if unit.block else (unit.part.begins, unit.part.ends)
        key = *kind, length, recompute
        if key not in self._known:
            self._known[key] = self._compute(unit, length, recompute)
        return self._known[key]

    def _compute(self, unit: Unit, length: int, recompute: bool) -> _Facts:
        device = _Counter()
        spec = self.model([unit.part])
        grid, training = SymbolicGrid(device, GridSizes()), Pass(recompute=recompute)
        context = Context(grid, "float32", training=training, loss_chunks=self.loss_chunks)
        weights = _ProbedWeights(context, spec.all_parameters)
        model = _ProbedLayer(spec, weights)

        def tensor(shape: tuple[int, ...], dtype: str) -> SymbolicTensor:
            return SymbolicTensor(device, shape, dtype)

        given = {}
        for name in received([unit], self.tensors):
            edge = self.tensors[name]
            dtype = edge.dtype("float32")
            if not edge.has_gradient:
                given[name] = tensor(edge.shape(1, length), dtype)
            else:
                given[name] = leaf(device, edge.shape(1, length), dtype, lambda gradient: None)
        produced = spec.compute(model, unit.part, given, *spec.planned_batch(tensor, 1, length))
        forward, device.backward = device.flops, True
        backward([(out, out.like()) for out in produced.values() if out.edge is not None])
        names: dict[str, list[str]] = {phase: [] for phase in (FORWARD, RECOMPUTATION, BACKWARD)}
        for phase, name in weights.uses:
            names[phase].append(name.removeprefix(_prefix(unit)))
        hidden, phases = weights.hidden_flops, LayerWeights(*map(tuple, names.values()))
        return _Facts(phases, forward - hidden, device.flops - 3 * hidden, tuple(weights.products))


def _prefix(unit: Unit) -> str:
    return f"{unit.name}." if unit.block else ""


class _Counter:
    """A device that counts floating-point operations."""

    compiled, is_cpu, imbalance = True, False, 1.0

    def __init__(self):
        self.records, self.recomputation = True, None
        self.flops, self.backward = 0.0, False
        self.plans: dict[tuple, Any] = {}
        self.numbers: Iterator[int] = itertools.count()

    def compute(self, computation: Computation) -> None:
        # The kernel of attention's gradients recomputes the scores: one of its five products.
        recomputes = self.backward and computation.attention is not None
        self.flops += computation.flops * (0.8 if recomputes else 1)

    def hold(self, nbytes: int) -> None: ...
    def release(self, nbytes: int) -> None: ...
    def scratch(self, nbytes: float) -> None: ...
    def start(self, kind: str, axis: str, nbytes: float, received: float = 0.0) -> None: ...
    def wait(self, collective: object) -> None: ...


class _ProbedWeights(SymbolicWeights):
    """Records the uses of weights and the products."""

    def __init__(self, context: Context, parameters: Mapping[str, ParameterSpec]):
        self.uses: list[tuple[str, str]] = []  # phase and weight
        self.products: list[Product] = []
        self.hidden_flops = 0  # products with keys outside a window in the forward
        super().__init__(context, parameters)

    def gather(self, shard: Tensor, phase: str | None = None) -> Tensor:
        self.uses.append((phase or self.schedule.phase, self._name(shard)))
        return super().gather(shard, phase)


class _ProbedLayer(SymbolicLayer):
    """A layer that records its product."""

    def __call__(self, *inputs: Any) -> Any:
        result, spec = super().__call__(*inputs), self.spec
        if isinstance(spec, ExpertsSpec):
            self._record_experts(spec, *inputs)
        if isinstance(spec, AttentionSpec) and spec.window is not None:
            self._record_window(spec.window, *inputs)
        if not isinstance(spec, LinearSpec | Conv2dSpec) or spec.split.contracted is None:
            return result
        (x,) = inputs
        return self._recorded(spec, x, result)

    def _record_window(self, window: int, q_BShs: SymbolicTensor, *_: Any) -> None:
        assert isinstance(self.weights, _ProbedWeights)
        self.weights.hidden_flops += 4 * math.prod(q_BShs.shape) * max(0, q_BShs.shape[1] - window)

    def _record_experts(self, spec: ExpertsSpec, x: SymbolicTensor, routing: Routing, *_: Any) -> None:
        """Record both products of the experts of a token. One row of each token is reduced over x."""
        rows, tokens = math.prod(routing.experts.shape), math.prod(x.shape)
        matrix, weights = spec.experts * spec.hidden * spec.inner, self.weights
        assert isinstance(weights, _ProbedWeights)
        weights.products += [
            Product(NORMAL, tokens, 2 * rows * spec.inner, 2 * matrix, rows * spec.hidden),
            Product(TRANSPOSED, rows * spec.inner, tokens, matrix, rows * spec.hidden),
        ]

    async def _recorded(
        self, spec: LinearSpec | Conv2dSpec, x: SymbolicTensor, result: Awaitable[SymbolicTensor]
    ) -> SymbolicTensor:
        out, weights = await result, self.weights
        assert isinstance(weights, _ProbedWeights)
        elements = (tensor.nbytes // 4 for tensor in (x, out, self.weight))
        weights.products.append(Product(spec.split, *elements))
        return out
