"""The time of a step on a pipeline, computed from its schedule and the costs of its stages. No torch here."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    # By direction and virtual stage: the edges along which it receives or sends, the peer, and the seconds.
    inputs: defaultdict[tuple[bool, int], list[tuple[Edge, int, float]]] = defaultdict(list)
    outputs: defaultdict[tuple[bool, int], list[tuple[Edge, int, float]]] = defaultdict(list)
    back = costs.transfers if costs.gradients is None else costs.gradients
    for forward, transfers in ((True, costs.transfers), (False, back)):
        for edge, seconds in transfers.items():
            source, target = edge if forward else edge[::-1]
            outputs[forward, source].append((edge, target, seconds))
            inputs[forward, target].append((edge, source, seconds))
    arrivals: dict[tuple[Action, Edge], float] = {}  # (producing action, edge) → time of arrival
    links: defaultdict[tuple[int, int], float] = defaultdict(float)  # (source, target) → time when the link is free
    timeline = Timeline([[] for _ in orders], [])

    def ready(action: Action) -> float | None:
        """Return the time at which all inputs of an action have arrived, or None if it is not known yet."""
        kind, _, stage = action
        if kind == "W":
            return 0.0
        latest = 0.0
        for edge, producer, _ in inputs[kind == "F", stage]:
            kinds = "F" if kind == "F" else "BI"
            found = [arrivals.get((action._replace(kind=k, virtual_stage=producer), edge)) for k in kinds]
            time = next((time for time in found if time is not None), None)
            if time is None:
                return None
            latest = max(latest, time)
        return latest

    def send(action: Action, stop: float) -> None:
        kind, _, stage = action
        if kind == "W":
            return
        for edge, target, seconds in outputs[kind == "F", stage]:
            link = stage % count, target % count
            start = max(stop, links[link])
            links[link] = arrivals[action, edge] = start + seconds
            timeline.transfers.append(TransferSpan(action, stage, target, start, links[link]))

    places = [0] * count
    found = True
    while found:
        found = False
        for stage, order in enumerate(orders):
            spans = timeline.stages[stage]
            while places[stage] < len(order) and (time := ready(order[places[stage]])) is not None:
                action = order[places[stage]]
                start = max(time, spans[-1].stop if spans else 0.0)
                spans.append(Span(action, start, start + costs.seconds(action)))
                send(action, spans[-1].stop)
                places[stage] += 1
                found = True
    if waiting := [order[place] for order, place in zip(orders, places, strict=True) if place < len(order)]:
        raise Deadlock(f"stages wait for each other: {', '.join(map(str, waiting))}")
    return timeline
