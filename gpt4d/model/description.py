"""Torch-free descriptions of models: layers in the order of execution, parameters, divisibility.

Configuration checks, the planner (time, bytes, memory), checkpoints and the order in which weights are gathered derive
from a description. gpt4d.model.probe determines weights, FLOPs and products of a unit by computing it on symbolic
tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gpt4d.config import ConfigError, Divisibility, LoraConfig
from gpt4d.config.checks import FLOAT8_MULTIPLE
from gpt4d.model.parts import EXPERTS, STREAM, EdgeTensor, ModelSpec, Part, Unit, joined
from gpt4d.model.probe import Probe
from gpt4d.parallel.engine.prefetch import LayerWeights
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.layer import LayerSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.lora import AdapterSpec
from gpt4d.parallel.layers.routing import num_statistics
from gpt4d.parallel.layout import ADAPTERS, STATE, ParameterSpec


@dataclass(frozen=True, eq=False)
class Description:
    """A model without torch, or a stage of one.

    Attributes:
        model: returns the spec of some parts of the model.
        parts: its units in the order of execution, grouped by the parts of a stage; the full model is one part.
        rules: the extents that the grid has to divide, in the user's terms.
        tensors: tensors between units, by name. ``STREAM`` goes from each unit to the next one. All other tensors go
            from the unit that produces them to each unit that uses them. A model need not have a stream.
        model_flops: FLOPs of a training step's forward and backward for (samples, length); None: those of the products.
        unused_parameters: number of elements of parameters that a token does not use: experts of other tokens.
        imbalance: rows of the busiest device's experts, divided by the mean, as the planner assumes.
        loss_chunks: ``train.loss_chunks``.
        width_exponents: parameters of the first or last unit whose initial values and learning rate a width transfer
            divides by a power of the relative width, with the exponents (``widened``).
        replicated: names of the blocks whose weights are replicated over z.
        expert_data: data splits experts too (``parallel.expert_data``).
        copied: parameters of other stages that units of this stage use.
    """

    model: Callable[[Sequence[Part]], ModelSpec]
    parts: tuple[tuple[Unit, ...], ...]
    rules: tuple[Divisibility, ...]
    tensors: Mapping[str, EdgeTensor]
    model_flops: Callable[[int, int], float] | None = None
    unused_parameters: int = 0
    imbalance: float = 1.0
    loss_chunks: int = 1
    width_exponents: Mapping[str, float] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    expert_data: bool = False
    copied: Mapping[str, ParameterSpec] = field(default_factory=dict)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """All units in the order of execution."""
        return tuple(unit for part in self.parts for unit in part)

    @cached_property
    def blocks(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.block)

    def crossing(self, parts: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[str, ...]]:
        """Return the names of the tensors on each edge between parts of this full model.

        An edge is a pair of parts: the part that produces the tensors and a later part that uses them.

        Args:
            parts: the unit range (first, stop) of each part, in order; ``stop`` is exclusive.
        """
        chain = range(len(parts) - 1) if STREAM in self.tensors else range(0)
        names = {(place, place + 1): [STREAM] for place in chain}
        part_of = {unit: place for place, (first, stop) in enumerate(parts) for unit in range(first, stop)}
        for name in [name for name in self.tensors if name != STREAM]:
            (producer,) = (index for index, unit in enumerate(self.units) if name in unit.tensors.produces)
            for user in (index for index, unit in enumerate(self.units) if name in unit.tensors.uses):
                assert producer < user, f"unit {user} uses {name}, which unit {producer} produces only later"
                edge = part_of[producer], part_of[user]
                if edge[0] != edge[1] and name not in names.setdefault(edge, []):
                    names[edge].append(name)
        return {edge: tuple(names[edge]) for edge in sorted(names)}

    # ---------------------------------------------------------------------------------------- parameters

    @cached_property
    def spec(self) -> ModelSpec:
        """The spec of the layers of all units."""
        return self.model([joined(part) for part in self.parts])

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Every parameter by its global name, in the model's order. Copies of other stages' parameters come last."""
        replaced: dict[int, ParameterSpec] = {}  # equal blocks share their specs, so that counting them is fast
        found: dict[str, ParameterSpec] = {}
        for name, spec in self.spec.all_parameters.items():
            if name in self.copied:
                continue
            if spec.gathered and self.replicated and _unit_name(name) in self.replicated:
                spec = replaced.setdefault(id(spec), spec.replicated())
            elif spec.local and self.expert_data:
                spec = replaced.setdefault(id(spec), spec.with_expert_data())
            found[name] = spec
        return found | dict(self.copied)

    @cached_property
    def routers(self) -> dict[str, int]:
        """The names of all routers of experts, with their numbers of experts. A stage also lists all of them."""
        states = {name: spec for name, spec in self.parameters.items() if spec.group == STATE}
        return {name.rpartition(".")[0]: spec.shape[0] for name, spec in states.items()}

    @property
    def statistics_bytes(self) -> int:
        """Bytes of the statistics of all routers (gpt4d.parallel.layers.routing), which all ranks sum in each step."""
        return 8 * len(self.routers) * num_statistics(max(self.routers.values(), default=0))

    @cached_property
    def changed(self) -> dict[str, ParameterSpec]:
        """The weights of blocks whose layout the plan changes: they are replicated over z, or data splits them."""
        own = self.spec.all_parameters
        return {
            name: spec for name, spec in self.parameters.items() if name not in self.copied and spec is not own[name]
        }

    def with_replicated_layers(self, count: int) -> Description:
        """Return the same model with the weights of ``count`` blocks replicated over z.

        These blocks are spread evenly over the model. While each of them computes, weights of later blocks are gathered
        over z.
        """
        places = ((2 * number + 1) * len(self.blocks) // (2 * count) for number in range(count))
        return replace(self, replicated=frozenset(self.blocks[place].name for place in places))

    def with_expert_data(self) -> Description:
        """Return the same model with experts that data also splits."""
        rules = [replace(rule, axes=("data", "z")) if rule.quantity == EXPERTS else rule for rule in self.rules]
        return replace(self, rules=tuple(rules), expert_data=True)

    @cached_property
    def parameter_counts(self) -> list[tuple[ParameterSpec, int]]:
        """Each distinct parameter spec and the number of parameters that share it."""
        specs = {id(spec): spec for spec in self.parameters.values()}
        counts = Counter(id(spec) for spec in self.parameters.values())
        return [(specs[key], count) for key, count in counts.items()]

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters, without padding and the states of routers."""
        return sum(count * math.prod(spec.stored_shape) for spec, count in self.parameter_counts if spec.group != STATE)

    @property
    def active_parameters(self) -> int:
        """The number of elements of the parameters that a token uses."""
        return self.num_parameters - self.unused_parameters

    @property
    def size(self) -> str:
        """The number of parameters as text, and those that a token uses if it does not use all of them."""
        text = f"{self.num_parameters / 1e6:,.1f} M parameters"
        return f"{text}, {self.active_parameters / 1e6:,.1f} M active" if self.unused_parameters else text

    # ------------------------------------------------------------------------------------ weights and FLOPs

    @cached_property
    def probe(self) -> Probe:
        """The probe of its units: their weights, FLOPs and products."""
        return Probe(self.model, self.tensors, self.loss_chunks)

    def cached_units(self, cache_layers: int | str | None) -> frozenset[str]:
        """Return the names of the units that ``parallel.cache_layers`` caches: the last blocks, or all units."""
        if cache_layers == "all":
            return frozenset(unit.name for unit in self.units)
        return frozenset(unit.name for unit in self.blocks[len(self.blocks) - int(cache_layers or 0) :])

    def weights_of(self, units: Collection[str]) -> frozenset[str]:
        """Return the names of all weights that some units take from the weight prefetcher."""
        chosen = [unit for unit in self.units if unit.name in units]
        return frozenset(name for unit in chosen for name in self.probe.weights(unit).forward)

    def chunk_contributions(self, count: int) -> dict[str, int]:
        """Return the number of gradient contributions of each block weight, one per chunk; empty for a single chunk.

        A weight of a block must not be used outside the blocks.
        """
        if count == 1:
            return {}
        adapters = [name for name, spec in self.parameters.items() if spec.group == ADAPTERS]
        return dict.fromkeys((*self.weights_of([unit.name for unit in self.blocks]), *adapters), count)

    def layer_weights(self, recompute: bool) -> list[LayerWeights]:
        """Return the weights that each unit takes from the prefetcher; with ``recompute``, blocks are recomputed."""
        return [self.probe.weights(unit, recompute) for unit in self.units]

    def with_float8_rules(self) -> Description:
        """Return the same model with the rules of ``train.precision=fp8`` for the weights that it multiplies in float8.

        Raises ConfigError if a dim of such a weight is not a multiple of ``FLOAT8_MULTIPLE``.
        """
        rules: dict[tuple[int, frozenset[str]], Divisibility] = {}
        for name, spec in self.parameters.items():
            if not spec.float8:
                continue
            rows, *columns = spec.layout.dims
            axes = tuple(axis for axis in rows if axis != "z"), tuple(axis for dim in columns for axis in dim)
            extents = spec.shape[0], math.prod(spec.shape[1:])
            for side, extent, split in zip(("input", "output"), extents, axes, strict=True):
                if extent % FLOAT8_MULTIPLE:
                    raise ConfigError(
                        f"train.precision=fp8: the {extent} {side} features of {name} are not a multiple of "
                        f"{FLOAT8_MULTIPLE}; change the sizes of the model, or use train.precision=bf16"
                    )
                quantity = f"({side} features of {name})/{FLOAT8_MULTIPLE}"
                rule = Divisibility(quantity, extent // FLOAT8_MULTIPLE, split, "or train.precision=bf16")
                rules.setdefault((rule.extent, frozenset(split)), rule)
        return replace(self, rules=(*self.rules, *rules.values()))

    @cached_property
    def contributions(self) -> Counter[str]:
        """Number of contributions of one microbatch to the gradient of each parameter: 2 for tied weights."""
        outside = [unit for unit in self.units if not unit.block]
        uses = Counter(name for unit in outside for name in self.probe.weights(unit).forward)
        return Counter({name: max(1, uses[name]) for name in self.parameters})

    def stage(self, parts: Iterable[tuple[int, int]]) -> Description:
        """Return the stage with some parts of this model, given as unit ranges (first, stop) with exclusive ``stop``.

        The stage has a copy of each tied weight that another stage owns. Equal parts give the same object.
        """
        bounds = tuple(parts)
        if bounds not in self._stages:
            self._stages[bounds] = self._stage(bounds)
        return self._stages[bounds]

    @cached_property
    def _stages(self) -> dict[tuple[tuple[int, int], ...], Description]:
        return {}

    def _stage(self, parts: Iterable[tuple[int, int]]) -> Description:
        chosen = tuple(self.units[first:stop] for first, stop in parts)
        stage = self._with_parts(chosen, model_flops=None)
        begins = any(part[0].part.begins for part in chosen)
        first = {} if begins else self.model([self.units[0].part]).all_parameters
        copied = {name: self.parameters[name] for name in stage.spec.all_parameters if name in first}
        return stage._with_parts(chosen, copied=copied)

    def part(self, first: int, stop: int) -> Part:
        """Return the part from unit ``first`` up to unit ``stop``, which is exclusive."""
        return joined(self.units[first:stop])

    def with_blocks(self, names: Iterable[str]) -> Description:
        """Return the same model with only some of its blocks. Results are cached, because every grid needs them."""
        wanted = frozenset(names)
        if wanted not in self._reduced:
            parts = (tuple(unit for unit in part if not unit.block or unit.name in wanted) for part in self.parts)
            self._reduced[wanted] = self._with_parts(tuple(part for part in parts if part))
        return self._reduced[wanted]

    @cached_property
    def _reduced(self) -> dict[frozenset[str], Description]:
        return {}

    def _with_parts(self, parts: tuple[tuple[Unit, ...], ...], **changes: Any) -> Description:
        """Return the description of some of its units, which shares the probe and the routers of this description."""
        other = replace(self, parts=parts, **changes)
        other.__dict__.update(probe=self.probe, routers=self.routers)
        return other

    def training_flops(self, samples: int, length: int) -> float:
        """Return the FLOPs of one training step, forward and backward, without recomputation (``Probe.flops``)."""
        if self.model_flops is not None:
            return self.model_flops(samples, length)
        return samples * sum(self.probe.flops(unit, length) for unit in self.units)

    def hardware_flops(self, samples: int, length: int) -> float:
        """Return the FLOPs of a step whose blocks are recomputed in the backward (Narayanan et al.)."""
        again = sum(self.probe.forward_flops(block, length) for block in self.blocks)
        return self.training_flops(samples, length) + samples * again


def _unit_name(parameter: str) -> str:
    """Return the first two components of a parameter's name, such as ``blocks.3``."""
    return ".".join(parameter.split(".")[:2])


def copied_parameters(stages: Sequence[Description]) -> list[tuple[str, int, int, ParameterSpec]]:
    """Return each copy of a trained parameter as its name, its stage, the stage of the copy, and its spec."""
    return [
        (name, owner, holder, spec)
        for holder, description in enumerate(stages)
        for name, spec in description.copied.items()
        if not spec.frozen
        for owner, other in enumerate(stages)
        if name in other.parameters and name not in other.copied
    ]


def adapted(description: Description, settings: LoraConfig) -> Description:
    """Return the description of a model in which only the adapters of ``settings`` are trained."""
    adapter, original = AdapterSpec(settings.rank, settings.scale), description.model

    def change(name: str, layer: LayerSpec) -> tuple[LayerSpec, dict[str, ParameterSpec]]:
        if isinstance(layer, LinearSpec) and name in settings.targets:
            layer = replace(layer, adapter=adapter)
        parameters = layer.own_parameters.items()
        return layer, {key: spec if spec.group == ADAPTERS else replace(spec, frozen=True) for key, spec in parameters}

    def model(parts: Sequence[Part]) -> ModelSpec:
        return original(parts).rewritten(change)

    def model_flops(samples: int, length: int) -> float:
        parameters, units = result.parameters, (unit for unit in result.units if not unit.part.begins)
        used = [parameters[name] for unit in units for name in result.probe.weights(unit).forward]
        trained = [parameter for parameter in parameters.values() if not parameter.frozen]
        # The gradients of frozen weights are not computed: two of the six operations per weight and token.
        per_token = 6 * _elements(trained) - 2 * (_elements(used) - description.unused_parameters)
        return description.training_flops(samples, length) + samples * length * per_token

    result = replace(description, model=model, model_flops=model_flops)
    return result


def _elements(parameters: Iterable[ParameterSpec]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def widened(description: Description, width: float) -> Description:
    """Return the description of a model with initial values and learning rates for a relative ``width``.

    The best learning rate of a narrow model then also fits a wide one. It is the maximal update parametrization (Yang
    et al., Tensor Programs V, Table 8) without multipliers in the forward: a multiplier of a parameter is equivalent to
    other initial values and another learning rate of AdamW. So checkpoints, exports and the computation are unchanged.
    With the relative width m = features / features of the base model:

    - Initial values of weights of hidden layers are divided by sqrt(m), and their learning rates are divided by m.
    - A router's logits are outputs: initial values and learning rate of its weight are divided by m.
    - Instead of logits that are divided by m, the norm before the output head has initial values and a learning rate
      that are divided by m. So a tied head and an embedding keep theirs.

    Weight decay is multiplied by the same factor as the learning rate is divided by (gpt4d.optim.optimizer).
    """
    original = description.model

    def hidden(_: str, layer: LayerSpec) -> tuple[LayerSpec, dict[str, ParameterSpec]]:
        # The standard deviation of a convolution already depends on its width.
        initial = {"matrices": 1.0 if isinstance(layer, Conv2dSpec) else width**-0.5, "router": 1 / width}
        return layer, {
            key: _scaled(spec, layer, initial[spec.group], 1 / width) if spec.group in initial else spec
            for key, spec in layer.own_parameters.items()
        }

    def outer(name: str, layer: LayerSpec) -> tuple[LayerSpec, dict[str, ParameterSpec]]:
        factors = {key: width ** -description.width_exponents.get(f"{name}.{key}", 0) for key in layer.own_parameters}
        return layer, {
            key: _scaled(spec, layer, factors[key], factors[key]) for key, spec in layer.own_parameters.items()
        }

    def model(parts: Sequence[Part]) -> ModelSpec:
        spec = original(parts).rewritten(hidden)
        for name in {key.partition(".")[0] for key in description.width_exponents} & spec.children.keys():
            spec.children[name] = spec.children[name].rewritten(outer, name)
        return spec

    return replace(description, model=model)


def _scaled(spec: ParameterSpec, layer: LayerSpec, initial: float, lr_factor: float) -> ParameterSpec:
    """Return a parameter whose initial values are multiplied by ``initial``."""
    offset = float(getattr(layer, "zero_centered", False))  # the layer adds it to the parameter
    mean = (spec.mean + offset) * initial - offset
    return replace(spec, mean=mean, std=spec.std * initial, lr_factor=lr_factor)
