"""The time of a step on a pipeline, computed from its schedule and the costs of its stages, and each stage's program.

The sending stage starts a transfer as soon as its tensor exists. In the simulated step, some action of the receiving
stage is running at that time. The receiving stage starts the transfer before this action, so that it is ready to
receive while it computes. All transfers have one global order, the order in which their tensors exist, and every stage
starts its transfers in this order. So stages never wait for each other in a cycle, even if a transfer blocks all later
operations of a stage. No torch here.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpt4d.config import ConfigError
from gpt4d.parallel.pipeline import schedule
from gpt4d.parallel.pipeline.schedule import Action, Order

Edge = tuple[int, int]  # the virtual stages that produce and use a tensor


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch, in seconds.

    Attributes:
        forward: time of the forward, by virtual stage.
        input_gradient: time of the input's gradient, by virtual stage.
        weight_gradient: time of the weights' gradients, by virtual stage. An unsplit backward takes the sum of both.
        transfers: time of the tensors that cross an edge forward, by edge. An edge may skip stages.
        gradients: time of the gradients that cross an edge backward, by edge; None: as ``transfers``.
    """

    forward: Sequence[float]
    input_gradient: Sequence[float]
    weight_gradient: Sequence[float]
    transfers: Mapping[Edge, float] = field(default_factory=dict)
    gradients: Mapping[Edge, float] | None = None

    @classmethod
    def equal(
        cls, virtual_stages: int, forward: float, input_gradient: float, weight_gradient: float, transfer: float = 0.0
    ) -> "Costs":
        """Return the costs of equal stages in a chain."""
        chain = {(stage, stage + 1): transfer for stage in range(virtual_stages - 1)}
        n = virtual_stages
        return cls([forward] * n, [input_gradient] * n, [weight_gradient] * n, chain)

    def seconds(self, action: Action) -> float:
        stage = action.virtual_stage
        if action.kind == "F":
            return self.forward[stage]
        gradients = {"I": self.input_gradient[stage], "W": self.weight_gradient[stage]}
        return gradients[action.kind] if action.kind in gradients else sum(gradients.values())


class Span(NamedTuple):
    """An action, with its start and stop in seconds since the beginning of the step."""

    action: Action
    start: float
    stop: float


class TransferSpan(NamedTuple):
    """The transfer of the tensors that an action produces, along an edge in either direction."""

    action: Action
    source: int  # virtual stages
    target: int
    start: float
    stop: float


@dataclass
class Timeline:
    """The timeline of a step: the actions of each stage, and the transfers in the order of each link."""

    stages: list[list[Span]]
    transfers: list[TransferSpan]

    @property
    def seconds(self) -> float:
        return max(spans[-1].stop for spans in self.stages)

    def peak_waiting(self, stage: int, tensors: Mapping[Edge, int] | None = None) -> int:
        """Return the maximum number of tensors that a stage has received for forwards that have not started.

        ``tensors``: number of tensors, or of their bytes, per edge; None: one tensor per edge.
        """
        count = len(self.stages)
        uses = {span.action: span.start for span in self.stages[stage]}
        changes = []
        for transfer in self.transfers:
            if transfer.action.kind == "F" and transfer.target % count == stage:
                used = uses[transfer.action._replace(virtual_stage=transfer.target)]
                size = tensors[transfer.source, transfer.target] if tensors else 1
                changes += [(transfer.stop, size), (used, -size)]
        waiting = peak = 0
        for _, change in sorted(changes):
            waiting += change
            peak = max(peak, waiting)
        return peak


class Deadlock(ValueError):
    """Stages wait for each other in a cycle."""


def simulate(orders: Sequence[Order], costs: Costs) -> Timeline:
    """Return the timeline of a step whose transfers start as soon as their tensor exists and overlap with computation.

    The transfers from one stage to another are sequential, in the order of the sending stage's actions. Raises Deadlock
    if stages wait for each other.
    """
    count = len(orders)
    # By direction and virtual stage: the edges along which it receives; and the edges along which it sends, with their
    # virtual stage that receives and the seconds.
    inputs: defaultdict[tuple[bool, int], list[Edge]] = defaultdict(list)
    outputs: defaultdict[tuple[bool, int], list[tuple[Edge, int, float]]] = defaultdict(list)
    back = costs.transfers if costs.gradients is None else costs.gradients
    for forward, transfers in ((True, costs.transfers), (False, back)):
        for edge, seconds in transfers.items():
            source, target = edge if forward else edge[::-1]
            outputs[forward, source].append((edge, target, seconds))
            inputs[forward, target].append(edge)
    arrivals: dict[tuple[bool, int, Edge], float] = {}  # (direction, microbatch, edge) → time of arrival
    links: defaultdict[tuple[int, int], float] = defaultdict(float)  # (source, target) → time when the link is free
    timeline = Timeline([[] for _ in orders], [])

    def ready(action: Action) -> float | None:
        """Return the time at which all inputs of an action have arrived, or None if it is not known yet."""
        kind, microbatch, stage = action
        if kind == "W":
            return 0.0
        latest = 0.0
        for edge in inputs[kind == "F", stage]:
            if (time := arrivals.get((kind == "F", microbatch, edge))) is None:
                return None
            latest = max(latest, time)
        return latest

    def send(action: Action, stop: float) -> None:
        kind, microbatch, stage = action
        for edge, target, seconds in outputs[kind == "F", stage] if kind != "W" else ():
            link = stage % count, target % count
            start = max(stop, links[link])
            links[link] = arrivals[kind == "F", microbatch, edge] = start + seconds
            timeline.transfers.append(TransferSpan(action, stage, target, start, links[link]))

    found = True
    while found:
        found = False
        for order, spans in zip(orders, timeline.stages, strict=True):
            while len(spans) < len(order) and (time := ready(order[len(spans)])) is not None:
                action = order[len(spans)]
                start = max(time, spans[-1].stop if spans else 0.0)
                spans.append(Span(action, start, start + costs.seconds(action)))
                send(action, spans[-1].stop)
                found = True
    pairs = zip(orders, timeline.stages, strict=True)
    if waiting := [order[len(spans)] for order, spans in pairs if len(spans) < len(order)]:
        raise Deadlock(f"stages wait for each other: {', '.join(map(str, waiting))}")
    return timeline


class StageTransfer(NamedTuple):
    """The transfer of an action's results to another virtual stage: tensors of a forward, gradients of a backward."""

    action: Action
    target: int  # virtual stage

    def __str__(self) -> str:
        return f"{self.action}>{self.target}"


Program = list[Action | StageTransfer]  # one stage's actions, and its transfers at the points where it starts them


def link_name(source: int, target: int) -> str:
    """Return the name of the link from one stage to another, under which its bytes are planned and counted."""
    return f"stage {source} to {target}"


def programs(orders: Sequence[Order], costs: Costs) -> list[Program]:
    """Return the program of each stage. A tensor that stays on its stage has no transfer."""
    count, timeline = len(orders), simulate(orders, costs)
    stops = {span.action: span.stop for spans in timeline.stages for span in spans}
    crossing = [span for span in timeline.transfers if span.source % count != span.target % count]
    crossing.sort(key=lambda span: stops[span.action])  # stable: transfers of one action stay in the order of its edges
    result = []
    for stage, spans in enumerate(timeline.stages):
        own = deque(
            StageTransfer(span.action, span.target)
            for span in crossing
            if stage in (span.source % count, span.target % count)
        )
        program: Program = []
        for action, start, stop in spans:
            while own:
                receives, exists = own[0].target % count == stage, stops[own[0].action]
                if exists > start and not (receives and exists < stop):
                    break
                program.append(own.popleft())
            program.append(action)
        result.append([*program, *own])
    return result


_WITHOUT_COSTS = {
    "gpipe": schedule.gpipe,
    "1f1b": schedule.one_forward_one_backward,
    "eager_1f1b": schedule.eager_1f1b,
    "zb_h1": schedule.zb_h1,
}


def orders_of(name: str, stages: int, microbatches: int, costs: Costs, chunks_per_stage: int = 1) -> list[Order]:
    """Return the order of each stage under the schedule ``name``.

    Args:
        name: a schedule in ``SCHEDULES``.
        stages: number of stages.
        microbatches: number of microbatches.
        costs: costs of the virtual stages; only ``eager_1f1b_w`` depends on them.
        chunks_per_stage: model chunks per stage; must be 1 except with ``interleaved_1f1b``.

    Raises ConfigError if the numbers do not suit the schedule.
    """
    if chunks_per_stage > 1 and name != "interleaved_1f1b":
        raise ConfigError(
            f"parallel.pipeline.chunks_per_stage={chunks_per_stage}: {name} has one model chunk per stage; "
            "use parallel.pipeline.schedule=interleaved_1f1b, or leave chunks_per_stage out"
        )
    if name == "eager_1f1b_w":
        return _with_fewest_delays(stages, microbatches, costs)
    if name in _WITHOUT_COSTS:
        return _WITHOUT_COSTS[name](stages, microbatches)
    if microbatches % stages:
        below = microbatches - microbatches % stages
        raise ConfigError(
            f"parallel.pipeline.microbatches={microbatches}: interleaved_1f1b needs a multiple of the {stages} stages; "
            f"use {f'{below} or ' if below else ''}{below + stages}"
        )
    return schedule.interleaved_1f1b(stages, microbatches, chunks_per_stage)


def _with_fewest_delays(stages: int, microbatches: int, costs: Costs) -> list[Order]:
    """Return eager 1F1B with split backwards, and with the fewest delayed weight gradients among the fastest orders.

    A delayed gradient occupies memory. Without delay, weight gradients still overlap with the transfer of the input's
    gradient.
    """
    choices = [schedule.eager_1f1b(stages, microbatches, delayed) for delayed in range(min(stages, microbatches) + 1)]
    return min(choices, key=lambda orders: simulate(orders, costs).seconds)
