"""Prefetching and retention of z-sharded weights, and the reduce-scatters of their gradients. No torch here.

The order in which a stage uses its weights follows from its schedule and its layers. ``WeightSchedule`` decides from
this order alone. The sharded weights (gpt4d.parallel.sharded_weights) and the planner execute its decisions.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from gpt4d.config import OverlapConfig
from gpt4d.parallel.pipeline.schedule import Action

FORWARD, RECOMPUTATION, BACKWARD = "forward", "recomputation", "backward"


class LayerWeights(NamedTuple):
    """Names of the weights that one layer or block gathers in each phase, in the order of execution.

    When the backward of a microbatch reaches the layer, ``recomputation`` precedes ``backward``.
    """

    forward: tuple[str, ...] = ()
    recomputation: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


class WeightUse(NamedTuple):
    """One use of a gathered weight in the forward, the recomputation or the backward of a microbatch."""

    phase: str
    weight: str
    microbatch: int = 0


def weight_order(
    actions: Iterable[Action],
    layers: Mapping[int, Sequence[LayerWeights]],
    chunks: Mapping[str, int] | None = None,
) -> list[WeightUse]:
    """Return every use of a weight, in the order in which a stage executes ``actions``.

    Args:
        actions: the stage's actions. The gradients of weights ("W") use no weight.
        layers: the layers of each virtual stage in ``actions``.
        chunks: number of chunks that use each weight sequentially, if more than one.
    """
    order: list[WeightUse] = []

    def use(phase: str, weights: Iterable[str], microbatch: int) -> None:
        for weight in weights:
            order.extend([WeightUse(phase, weight, microbatch)] * (chunks or {}).get(weight, 1))

    for kind, microbatch, virtual_stage in actions:
        if kind == "F":
            for layer in layers[virtual_stage]:
                use(FORWARD, layer.forward, microbatch)
        elif kind in "BI":
            for layer in reversed(layers[virtual_stage]):
                use(RECOMPUTATION, layer.recomputation, microbatch)
                use(BACKWARD, layer.backward, microbatch)
    return order


def kept_after_use(
    order: Sequence[WeightUse], cached: Collection[str], cached_for_step: Collection[str] = ()
) -> list[bool]:
    """Return for each use whether the gathered weight stays in memory after the use.

    A weight stays if the next use is a use of the same weight, such as another chunk's use, and from a recomputation
    until the backward. Weights in ``cached`` also stay until the backwards of all microbatches in flight have used
    them. Weights in ``cached_for_step`` stay until their last use.
    """
    remaining = Counter((use.weight, use.microbatch) for use in order if use.phase != FORWARD)
    uses = Counter(use.weight for use in order)
    pending: Counter[str] = Counter()  # number of later uses in the backwards of microbatches in flight
    kept = []
    for use, following in zip(order, [*order[1:], None], strict=True):
        if use.phase == FORWARD:
            # pop: a second use of the weight in the same forward must not add the count again.
            pending[use.weight] += remaining.pop((use.weight, use.microbatch), 0)
        else:
            pending[use.weight] -= 1
        uses[use.weight] -= 1
        next_is_own = following is not None and following.weight == use.weight
        next_is_own = next_is_own and (use.phase != BACKWARD or following == use)
        used_again = use.weight in cached and pending[use.weight] > 0
        used_again = used_again or (use.weight in cached_for_step and uses[use.weight] > 0)
        kept.append(next_is_own or use.phase == RECOMPUTATION or used_again)
    return kept


def prefetch_plan(
    order: Sequence[WeightUse], count: int, never_gathered: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """Return for each use the weights to prefetch during it: the weights of the next ``count`` uses.

    Uses of weights in ``never_gathered`` do not count. Links are idle during such uses, so the preceding use prefetches
    one more weight for each of them. The backward of a microbatch does not prefetch the first weights of the next
    microbatch.
    """
    ahead: list[tuple[str, ...]] = []
    upcoming: deque[str] = deque()  # weights to gather, up to the next microbatch's forward
    idle = 0  # number of following uses that gather nothing
    for use, following in zip(reversed(order), [None, *reversed(order)], strict=False):
        if following == use:  # another chunk's use
            ahead.append(ahead[-1])
            continue
        if following is not None and following.weight in never_gathered:
            idle += 1
        elif following is not None:
            upcoming.appendleft(following.weight)
            idle = 0
        if following is not None and use.phase == BACKWARD and following.phase == FORWARD:
            upcoming.clear()
            idle = 0
        ahead.append(tuple(islice(upcoming, count + idle if count else 0)))
    return ahead[::-1]


class WeightPlan(NamedTuple):
    """The uses of weights in a step or an evaluation, and the decisions for each use (``WeightSchedule.plan``)."""

    order: Sequence[WeightUse] = ()
    kept: Sequence[bool] = ()  # whether the weight stays in memory after the use
    ahead: Sequence[tuple[str, ...]] = ()  # the weights to prefetch during the use


_MAX_INFLIGHT_REDUCE_SCATTERS = 8  # each holds an unsharded gradient in memory

_NO_WEIGHTS: tuple[str, ...] = ()
Tensor = TypeVar("Tensor")  # a gathered weight or its gradient
Pending = TypeVar("Pending")  # a collective in flight
# Computes a gradient, adds it in place to the earlier gradient if that is given, and returns the result.
ComputeGradient = Callable[[Tensor | None], Tensor]


class WeightDevice(Protocol[Tensor, Pending]):
    """The operations of a device on weights, by name, and on their gradients."""

    def is_split(self, weight: str) -> bool:
        """Return whether z splits the weight."""

    def start_gather(self, weight: str) -> Pending:
        """Start the all-gather of the weight over z, in the compute dtype."""

    def start_scatter(self, weight: str, gradient: Tensor) -> Pending:
        """Start the reduce-scatter of the gathered weight's gradient over z."""

    def wait(self, pending: Pending) -> Tensor:
        """Wait for a collective and return its result."""

    def gradient(self, weight: str) -> Tensor | None:
        """Return the accumulated gradient of a weight, or None."""

    def set_gradient(self, weight: str, gradient: Tensor) -> None:
        """Set the gradient of a weight that z does not split. It contains the earlier gradient."""

    def accumulate(self, weight: str, part: Tensor) -> None:
        """Add the result of a reduce-scatter over z to the gradient of a weight."""


class WeightSchedule(Generic[Tensor, Pending]):
    """The gathered weights of a stage during a step.

    Args:
        device: executes the collectives.
        overlap: which communication overlaps with computation.

    ``phase`` is the phase of a use outside a backward: FORWARD, or RECOMPUTATION while a backward recomputes blocks.
    """

    def __init__(self, device: WeightDevice[Tensor, Pending], overlap: OverlapConfig):
        self.device, self.overlap = device, overlap
        self.phase = FORWARD
        self.ready: dict[str, Tensor] = {}  # gathered weights that stay in memory
        self.gathering: dict[str, Pending] = {}  # all-gathers in flight
        self._scattering: deque[tuple[str, Pending]] = deque()
        self._accumulated: dict[str, Tensor] = {}  # partially accumulated gradients
        self._missing: dict[str, int] = {}  # number of contributions that these gradients lack
        self._contributions: Mapping[str, int] = {}  # number of contributions to each gradient
        self._delayed: deque[deque[tuple[str, ComputeGradient[Tensor]]]] = deque()  # gradients of each backward
        self._delays = False
        self._plan = WeightPlan()
        self.position = -1  # index of the last use in the order

    def plan(
        self, order: Sequence[WeightUse], cached: Collection[str] = (), cached_for_step: Collection[str] = ()
    ) -> WeightPlan:
        """Return the decisions for steps or evaluations that use weights in ``order``.

        Args:
            order: every use of a weight.
            cached: weights that stay gathered until their backward.
            cached_for_step: weights that stay gathered until their last use.
        """
        unsplit = {use.weight for use in order if not self.device.is_split(use.weight)}
        prefetch = self.overlap.prefetch if self.overlap.all_gather else 0
        kept = kept_after_use(order, cached, cached_for_step)
        return WeightPlan(order, kept, prefetch_plan(order, prefetch, unsplit))

    def begin(
        self,
        plan: WeightPlan,
        contributions: Mapping[str, int] | None = None,
        continued: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Start a step or an evaluation, which ``finish`` ends. Outside of a step, nothing is prefetched.

        Args:
            plan: the uses of weights and the decisions for them.
            contributions: number of contributions to a weight's gradient before its reduce-scatter; 1 by default.
            continued: weights that earlier microbatches of the step have gathered, and their accumulated gradients.
        """
        assert self.next_use is None, "the previous order is not finished"
        self._plan, self.position, self._contributions = plan, -1, contributions or {}
        for name, (weight, gradient) in (continued or {}).items():
            self.ready[name], self._accumulated[name] = weight, gradient

    @property
    def last_used(self) -> str | None:
        """The weight that was used last in this step."""
        return self._plan.order[self.position].weight if self.position >= 0 else None

    @property
    def next_use(self) -> WeightUse | None:
        """The use of a weight that follows the last one; None at the end of the order, and without one."""
        following, order = self.position + 1, self._plan.order
        return order[following] if following < len(order) else None

    @property
    def recomputation_ends(self) -> bool:
        """Whether a recomputation is in progress that uses no other weight."""
        following = self.next_use
        return self.phase == RECOMPUTATION and following is not None and following.phase != RECOMPUTATION

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Return a context in which a backward recomputes blocks."""
        self.phase = RECOMPUTATION
        try:
            yield
        finally:
            self.phase = FORWARD

    def gather(self, weight: str, phase: str | None = None) -> Tensor:
        """Wait for a gathered weight, return it, and prefetch the following weights.

        ``phase``: BACKWARD for the use of a backward; None: ``self.phase``.
        """
        phase = phase or self.phase
        kept, ahead = phase == RECOMPUTATION, _NO_WEIGHTS
        if self._plan.order:
            expected, self.position = self.next_use, self.position + 1
            assert expected and (expected.phase, expected.weight) == (phase, weight), (
                f"the {phase} uses weight {weight} where the model's description has {expected}"
            )
            kept, ahead = self._plan.kept[self.position], self._plan.ahead[self.position]
        value = self.ready.pop(weight, None)
        if value is None:
            pending = self.gathering.pop(weight, None)
            value = self.device.wait(self.device.start_gather(weight) if pending is None else pending)
        if kept:
            self.ready[weight] = value
        for following in ahead:
            if following not in self.ready and following not in self.gathering:
                self.gathering[following] = self.device.start_gather(following)
        return value

    @contextmanager
    def delaying_gradients(self) -> Iterator[None]:
        """Return the context of a backward whose gradients ``compute_delayed_gradients`` computes."""
        self._delayed.append(deque())
        self._delays = True
        try:
            yield
        finally:
            self._delays = False

    def compute_delayed_gradients(self) -> None:
        """Compute the gradients of the earliest backward that delayed them."""
        delayed = self._delayed.popleft()
        while delayed:
            self.scatter(*delayed.popleft())  # and forget its tensors

    def add_gradient(self, weight: str, compute: ComputeGradient[Tensor]) -> None:
        """``scatter`` a gradient: now, or with the delayed gradients."""
        if self._delays:
            self._delayed[-1].append((weight, compute))
        else:
            self.scatter(weight, compute)

    def scatter(self, weight: str, compute: ComputeGradient[Tensor]) -> None:
        """Compute the gradient of a gathered weight, and reduce-scatter it over z after the last contribution.

        ``compute`` returns the gradient, added to its argument if that is not None. The reduce-scatter ends before
        ``finish`` returns.
        """
        split = self.device.is_split(weight)
        earlier = self._accumulated.pop(weight, None)
        if earlier is None and not split:
            earlier = self.device.gradient(weight)
        gradient = compute(earlier)
        missing = self._missing.pop(weight, self._contributions.get(weight, 1)) - 1
        if missing:
            self._missing[weight], self._accumulated[weight] = missing, gradient
        elif not split:
            self.device.set_gradient(weight, gradient)
        else:
            del earlier
            self._scattering.append((weight, self.device.start_scatter(weight, gradient)))
            del gradient
            max_inflight = _MAX_INFLIGHT_REDUCE_SCATTERS if self.overlap.reduce_scatter else 0
            while len(self._scattering) > max_inflight:
                self._add_gradient()

    def wait_for_collectives(self) -> None:
        """Wait for all collectives in flight. Their results are used as if they were still in flight."""
        for pending in (*self.gathering.values(), *(pending for _, pending in self._scattering)):
            self.device.wait(pending)

    def _add_gradient(self) -> None:
        weight, pending = self._scattering.popleft()
        self.device.accumulate(weight, self.device.wait(pending))

    def finish(self) -> None:
        """End a step or an evaluation: every gradient is in place, and no gathered weight outlives the next update."""
        assert not self._delayed, "the program has no action for some weight gradients"
        while self._scattering:
            self._add_gradient()
        for pending in self.gathering.values():
            self.device.wait(pending)  # a collective must end before its memory is reused
        self.gathering.clear()
        self.ready.clear()
        assert not self._missing, "a gradient has fewer contributions than its description says"
        remaining, self._contributions = self.next_use, {}
        self._plan, self.position = WeightPlan(), -1
        assert not remaining, f"the model did not use {remaining}, which its description has"
