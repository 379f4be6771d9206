"""Torch-free descriptions of models: parameters, layers in the order of execution, divisibility.

Configuration checks, the planner (time, bytes, memory), checkpoints and the order in which weights are gathered are
derived from a description.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, cast

from gpt4d.config import Divisibility, GridSizes, OverlapConfig
from gpt4d.parallel.layout import CHUNK, Layout, ParameterSpec
from gpt4d.parallel.order import LayerWeights

Method = TypeVar("Method", bound=Callable)


class Walk(Protocol):
    """One device as a layer's cost sees it while it walks through a microbatch. Sizes are those of this device.

    Names of weights are relative to the layer that is being walked. Times pass in ``compute`` and ``wait``; memory
    counts in bytes.
    """

    sizes: GridSizes
    overlap: OverlapConfig
    samples: int  # sequences or images of the microbatch
    length: int  # tokens of a sample
    element_bytes: int  # of an activation and a gathered weight
    dtype: str  # of an activation (gpt4d.parallel.symbolic)
    held: int  # bytes that layers hold now
    sequence_parallel: bool  # x splits the tokens between the layers
    recomputes_inputs: bool  # products do not keep inputs that are easily computed again
    compiled: bool  # torch.compile fuses elementwise functions
    adds_products: bool  # a product is added to an earlier sum by its own kernel
    memo: dict[tuple, Any]  # results of methods (``per_walk``)
    plans: dict[tuple, Any]  # costs of calls of kernels (gpt4d.parallel.function)

    @property
    def tokens(self) -> int: ...

    @property
    def recomputed(self) -> bool:
        """Return whether what the layer has kept comes from a recomputation."""

    @property
    def stream_tokens(self) -> int:
        """Tokens of this device between the layers."""

    def head_axes(self, heads: int, stream: str = "y") -> tuple[str, ...]:
        """Return the axes that split the heads of an attention on a stream whose features ``stream`` splits."""

    def size(self, axis: str | None) -> int:
        """Return the devices along an axis; 1 for None, where no axis splits a dim."""

    def compute(self, flops: float = 0.0, moved: float = 0.0, operations: int = 1) -> None:
        """Compute a product of ``flops``, or elementwise ``operations``, that read and write ``moved`` bytes in all."""

    def hold(self, nbytes: int) -> None:
        """Take memory until it is released."""

    def release(self, nbytes: int) -> None:
        """Give memory back."""

    def scratch(self, nbytes: float) -> None:
        """Take memory for a moment."""

    def start(self, kind: str, axis: str | None, nbytes: float) -> object:
        """Start a collective beside the computation: ``all_reduce``, ``all_gather`` or ``reduce_scatter``."""

    def wait(self, collective: object) -> None:
        """Wait for a started collective, once; None: do nothing."""

    def do(self, kind: str, axis: str, nbytes: float) -> None:
        """Start a collective and wait for it."""

    async def turn(self, collective: object = None) -> None:
        """Let the other chunks compute, then wait for a collective; None: for nothing."""

    def gather(self, weight: str) -> None:
        """Wait for a whole weight. ``multiplied`` follows once the layer no longer needs it."""

    def multiplied(self) -> None:
        """Release the weight that was last gathered, unless it is kept."""

    def compute_weight_gradient(self, compute: Callable[[], None], kept: int) -> None:
        """Compute a weight's gradient: now, or, if the schedule splits backwards, after this one.

        ``kept``: bytes of the tensors that it reads, which stay held until then.
        """

    def has_earlier_sum(self, weight: str) -> bool:
        """Return whether the gradient of a whole weight has an earlier sum, which is held in float32."""

    def scatter(self, weight: str, added: bool = False) -> None:
        """Hand over the gradient of a whole weight, which is held in float32 or ``added`` to the earlier sum."""

    def add_gradient(self, parameter: str) -> None:
        """Hold a gradient of a parameter that is not streamed, in the master dtype, and hand it over."""


def per_walk(method: Method) -> Method:
    """Let a method of a cost, whose first argument is the walk, compute its result once for each walk.

    A description shares one cost among equal blocks, whose results are equal. Further arguments are hashable.
    """

    @wraps(method)
    def cached(self, walk: Walk, *rest):
        key = method, id(self), *rest
        if key not in walk.memo:
            walk.memo[key] = self, method(self, walk, *rest)  # no other cost takes the id of this one
        return walk.memo[key][1]

    return cast(Method, cached)


class LayerCost(Protocol):
    """The cost of one layer.

    ``forward`` begins with the input held and ends with the output held too, besides what the layer keeps for its
    backward. ``backward`` begins with the gradient of the output held and ends with that of the input held instead;
    everything the layer kept, its input included, is released. Both are coroutines, which take their turns where the
    layer does.
    """

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return the parameters by their names in this layer."""

    def weights(self) -> LayerWeights:
        """Return the names of the streamed weights in their order of use, ``recomputation`` for a full one."""

    def flops(self, length: int) -> float:
        """Return the floating-point operations of one forward of one sample, over all devices."""

    async def forward(self, walk: Walk) -> None: ...

    async def backward(self, walk: Walk) -> None: ...


class BlockCost(LayerCost, Protocol):
    """A layer that may be recomputed. ``keep`` false: only the output stays held after the forward. ``recomputing``:
    the forward stops where the backward has all it needs, and its output is not held."""

    async def forward(self, walk: Walk, keep: bool = True, recomputing: bool = False) -> None: ...

    def gather_gradient(self, walk: Walk) -> object:
        """Start the collective with which the backward begins before it recomputes the block; None: there is none."""

    async def backward(self, walk: Walk, gathering: object = None) -> None:
        """``gathering``: what ``gather_gradient`` has started."""


STREAM = "stream"


@dataclass(frozen=True)
class EdgeTensor:
    """A tensor that one unit produces and later units use; it crosses an edge where they are on different stages.

    Attributes:
        layout: on the grid of each stage.
        shape: its global shape for (samples, length).
        kind: an activation has the compute dtype and a gradient; integers are int64 and masks bool, without one.
        sequence_parallel: the layout in training with ``parallel.sequence_parallel``; None: the same.
    """

    layout: Layout
    shape: Callable[[int, int], tuple[int, ...]]
    kind: Literal["activation", "integer", "mask"] = "activation"
    sequence_parallel: Layout | None = None

    @property
    def has_gradient(self) -> bool:
        return self.kind == "activation"

    def nbytes(self, samples: int, length: int, activation_bytes: int) -> int:
        """Return the bytes of the global tensor."""
        element = {"activation": activation_bytes, "integer": 8, "mask": 1}[self.kind]
        return element * math.prod(self.shape(samples, length))


def residual_stream(hidden: int) -> EdgeTensor:
    """Return the residual stream of a model of text, [tokens, hidden]."""
    return EdgeTensor(
        Layout(("data", "z"), ("y",)),
        lambda samples, length: (samples * length, hidden),
        sequence_parallel=Layout(("data", "z", CHUNK, "x"), ("y",)),
    )


@dataclass(frozen=True)
class Unit:
    """A layer in its place: ``name`` is the prefix of its parameters' names, such as ``blocks.3``, or empty.

    ``produces`` and ``uses`` name the tensors other than the stream that it passes on to later units and takes from
    earlier ones (``Description.tensors``).
    """

    name: str
    layer: LayerCost
    block: bool = False  # may be recomputed, cached and cut off into a stage of its own
    produces: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    def qualified(self, name: str) -> str:
        """Return the global name of one of the layer's parameters. A leading dot marks a name that is global."""
        if name.startswith("."):
            return name[1:]
        return f"{self.name}.{name}" if self.name else name


class Part(NamedTuple):
    """Consecutive units of a model, which a model chunk of a stage computes."""

    begins: bool  # has the first unit, which takes the batch
    blocks: range  # indices of its blocks among the model's
    ends: bool  # has the last unit, which computes the loss


@dataclass(frozen=True)
class Description:
    """A model without torch.

    Attributes:
        units: layers and blocks in the order of execution. Equal blocks should share one layer object.
        rules: what the grid has to divide, in the user's terms.
        tensors: what units pass on, by name. ``STREAM`` goes from each unit to the next one; other tensors go from the
            unit that produces them to those that use them. A model need not have a stream.
        whole: names of the blocks whose weights are whole on every rank of z.
        model_flops: FLOPs of a training step's forward and backward for (samples, length), as the field counts them for
            this family; None for three times the forward's.
        copied: parameters that units use and that belong to units of other stages.
    """

    units: tuple[Unit, ...]
    rules: tuple[Divisibility, ...]
    tensors: Mapping[str, EdgeTensor]
    model_flops: Callable[[int, int], float] | None = None
    whole: frozenset[str] = frozenset()
    copied: Mapping[str, ParameterSpec] = field(default_factory=dict)

    def crossing(self, parts: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[str, ...]]:
        """Return the names of the tensors on each edge between parts of this whole model.

        An edge is a pair of parts, the one that produces the tensors and a later one that uses them.

        Args:
            parts: the first unit and the one after the last of each part, in order.
        """
        chain = range(len(parts) - 1) if STREAM in self.tensors else range(0)
        names = {(place, place + 1): [STREAM] for place in chain}
        part_of = {unit: place for place, (first, stop) in enumerate(parts) for unit in range(first, stop)}
        for name in [name for name in self.tensors if name != STREAM]:
            (producer,) = (index for index, unit in enumerate(self.units) if name in unit.produces)
            for user in (index for index, unit in enumerate(self.units) if name in unit.uses):
                assert producer < user, f"unit {user} uses {name}, which unit {producer} produces only later"
                edge = part_of[producer], part_of[user]
                if edge[0] != edge[1] and name not in names.setdefault(edge, []):
                    names[edge].append(name)
        return {edge: tuple(names[edge]) for edge in sorted(names)}

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Every parameter by its global name, in the model's order."""
        specs: dict[str, ParameterSpec] = {}
        per_kind: dict[tuple[int, bool], dict[str, ParameterSpec]] = {}
        for unit in self.units:
            # Equal blocks share their specs, so that counting them is fast.
            kind = id(unit.layer), unit.name in self.whole
            if kind not in per_kind:
                own = unit.layer.parameters()
                whole = {name: spec.whole() for name, spec in own.items() if spec.streamed and kind[1]}
                per_kind[kind] = own | whole
            specs |= {unit.qualified(name): spec for name, spec in per_kind[kind].items()}
        return specs | dict(self.copied)

    @cached_property
    def whole_weights(self) -> frozenset[str]:
        """The names of all streamed weights that z does not split."""
        streamed = ((name, spec) for name, spec in self.parameters.items() if spec.streamed)
        return frozenset(name for name, spec in streamed if "z" not in spec.layout.axes)

    def with_whole_layers(self, count: int) -> Description:
        """Return the same model with the weights of ``count`` blocks whole on every rank of z.

        They are spread evenly over the model: while one of them computes, weights of later blocks are gathered.
        """
        places = ((2 * number + 1) * len(self.blocks) // (2 * count) for number in range(count))
        return replace(self, whole=frozenset(self.blocks[place].name for place in places))

    @cached_property
    def parameter_counts(self) -> list[tuple[ParameterSpec, int]]:
        """Each different parameter and how many of it there are."""
        specs = {id(spec): spec for spec in self.parameters.values()}
        counts = Counter(id(spec) for spec in self.parameters.values())
        return [(specs[key], count) for key, count in counts.items()]

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters, without padding."""
        return sum(count * math.prod(spec.stored_shape) for spec, count in self.parameter_counts)

    @cached_property
    def blocks(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.block)

    def cached_units(self, cache_layers: int | str | None) -> frozenset[str]:
        """Return the names of the units that ``parallel.cache_layers`` keeps: the last blocks, or all units."""
        if cache_layers == "all":
            return frozenset(unit.name for unit in self.units)
        return frozenset(unit.name for unit in self.blocks[len(self.blocks) - int(cache_layers or 0) :])

    def weights_of(self, units: Collection[str]) -> frozenset[str]:
        """Return the names of all weights that some units take from the stream."""
        chosen = [unit for unit in self.units if unit.name in units]
        return frozenset(unit.qualified(name) for unit in chosen for name in unit.layer.weights().forward)

    def chunk_terms(self, count: int) -> dict[str, int]:
        """Return the number of chunks that use a weight, and add a term to its gradient, where there are several.

        A weight of a block must not be used outside the blocks too.
        """
        return dict.fromkeys(self.weights_of([unit.name for unit in self.blocks]), count) if count > 1 else {}

    def layer_weights(self, recompute: bool) -> list[LayerWeights]:
        """Return the weights that each unit takes from the stream; with ``recompute``, blocks are recomputed."""
        result: list[LayerWeights] = []
        for unit in self.units:
            phases = [tuple(map(unit.qualified, names)) for names in unit.layer.weights()]
            if not (recompute and unit.block):
                phases[1] = ()
            result.append(LayerWeights(*phases))
        return result

    @cached_property
    def kinds(self) -> dict[str, int]:
        """A number for each unit by its name; equal layers have the same one."""
        kinds: dict[LayerCost, int] = {}
        return {unit.name: kinds.setdefault(unit.layer, len(kinds)) for unit in self.units}

    @cached_property
    def contributions(self) -> Counter[str]:
        """Number of terms that one microbatch adds to the gradient of each parameter: 2 for tied weights."""
        counts = Counter(self.parameters.keys())
        own = {unit.qualified(name) for unit in self.units for name in unit.layer.parameters()}
        for unit in self.units:
            for name in unit.layer.weights().forward:
                if name.startswith(".") and unit.qualified(name) in own:
                    counts[unit.qualified(name)] += 1
        return counts

    def stage(self, parts: Iterable[tuple[int, int]]) -> Description:
        """Return the stage that has some parts of this model, each from a unit up to, not including, another one.

        It has a copy of each parameter that it uses and that another stage has: a tied weight.
        """
        units = tuple(unit for first, stop in parts for unit in self.units[first:stop])
        stage = replace(self, units=units, model_flops=None)
        used = [unit.qualified(name) for unit in units for name in unit.layer.weights().forward]
        return replace(stage, copied={name: self.parameters[name] for name in used if name not in stage.parameters})

    def part(self, first: int, stop: int) -> Part:
        """Return the part from unit ``first`` up to, not including, ``stop``."""
        before = sum(unit.block for unit in self.units[:first])
        inside = sum(unit.block for unit in self.units[first:stop])
        return Part(first == 0, range(before, before + inside), stop == len(self.units))

    def with_blocks(self, names: Iterable[str]) -> Description:
        """Return the same model with only some of its blocks. The planner asks for the same ones on every grid."""
        wanted = frozenset(names)
        if wanted not in self._reduced:
            units = tuple(unit for unit in self.units if not unit.block or unit.name in wanted)
            self._reduced[wanted] = replace(self, units=units)
        return self._reduced[wanted]

    @cached_property
    def _reduced(self) -> dict[frozenset[str], Description]:
        return {}

    def training_flops(self, samples: int, length: int) -> float:
        """Return the FLOPs of one training step, forward and backward, without recomputation."""
        if self.model_flops is not None:
            return self.model_flops(samples, length)
        return 3 * samples * sum(unit.layer.flops(length) for unit in self.units)

    def hardware_flops(self, samples: int, length: int) -> float:
        """Return the FLOPs of a step whose blocks are computed once more in the backward (Narayanan et al.)."""
        return self.training_flops(samples, length) * 96 / 72


def copied_parameters(stages: Sequence[Description]) -> list[tuple[str, int, int, ParameterSpec]]:
    """Return each copy of a parameter as its name, the stage that owns it, the stage of the copy, and its spec."""
    return [
        (name, owner, holder, spec)
        for holder, description in enumerate(stages)
        for name, spec in description.copied.items()
        for owner, other in enumerate(stages)
        if name in other.parameters and name not in other.copied
    ]
