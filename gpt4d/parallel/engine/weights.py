"""When z-sharded weights are gathered, how long they stay, and when gradients are reduce-scattered. No torch here.

The weight stream (gpt4d.parallel.weights) and the planner carry out the same decisions, each on a device of its own.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from gpt4d.config import OverlapConfig
from gpt4d.parallel.order import RECOMPUTATION, WeightUse, kept_after_use, weights_ahead

_MAX_INFLIGHT_REDUCE_SCATTERS = 8  # each holds a full gradient in memory

Tensor = TypeVar("Tensor")  # a gathered weight, or the gradient of one
Pending = TypeVar("Pending")  # a collective in flight


class WeightDevice(Protocol[Tensor, Pending]):
    """What a device does with weights, which have names, and with their gradients."""

    def is_split(self, weight: str) -> bool:
        """Return whether z splits the weight."""

    def start_gather(self, weight: str) -> Pending:
        """Start to gather the weight over z, in the compute dtype."""

    def start_scatter(self, weight: str, gradient: Tensor) -> Pending:
        """Start to sum the gradient of the gathered weight over z; each rank receives its part."""

    def wait(self, pending: Pending) -> Tensor:
        """Wait for a collective and return its result."""

    def gradient(self, weight: str) -> Tensor | None:
        """Return the gradient that a weight has so far."""

    def set_gradient(self, weight: str, gradient: Tensor) -> None:
        """Set the gradient of a weight that z does not split, which contains the earlier gradient."""

    def add_gradient(self, weight: str, part: Tensor) -> None:
        """Add this rank's part of a sum over z to the gradient of a weight."""


class WeightSchedule(Generic[Tensor, Pending]):
    """The gathered weights of a stage through a step.

    Args:
        device: carries out the collectives.
        overlap: which communication overlaps with computation.
    """

    def __init__(self, device: WeightDevice[Tensor, Pending], overlap: OverlapConfig):
        self.device, self.overlap = device, overlap
        self.ready: dict[str, Tensor] = {}  # gathered weights that stay in memory
        self.gathering: dict[str, Pending] = {}  # weights in flight
        self._scattering: deque[tuple[str, Pending]] = deque()
        self._accumulated: dict[str, Tensor] = {}  # gradients that lack terms before their sum over z
        self._missing: dict[str, int] = {}  # number of terms that these gradients lack
        self._terms: Mapping[str, int] = {}
        self.order: Sequence[WeightUse] = ()
        self.kept: Sequence[bool] = ()
        self._ahead: Sequence[tuple[str, ...]] = ()
        self.position = -1  # of the last use in the order

    def begin(
        self,
        order: Sequence[WeightUse],
        cached: Collection[str] = (),
        cached_for_step: Collection[str] = (),
        terms: Mapping[str, int] | None = None,
        continued: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Start a step or an evaluation that uses weights in ``order``. ``finish`` ends it.

        Args:
            order: every use of a weight; without an order nothing is gathered ahead.
            cached: weights that stay gathered until their backward.
            cached_for_step: weights that stay gathered until their last use.
            terms: number of terms of a weight's gradient that are accumulated before their sum over z, where not one.
            continued: weights that earlier microbatches of the step have gathered, with the gradients that they have
                accumulated.
        """
        assert self.position == len(self.order) - 1, "the last order was not finished"
        self.order, self.kept, self.position = order, kept_after_use(order, cached, cached_for_step), -1
        unsplit = {use.weight for use in order if not self.device.is_split(use.weight)}
        prefetch = self.overlap.prefetch if self.overlap.all_gather else 0
        self._ahead = weights_ahead(order, prefetch, unsplit)
        self._terms = terms or {}
        for name, (weight, gradient) in (continued or {}).items():
            self.ready[name], self._accumulated[name] = weight, gradient

    @property
    def last_used(self) -> str | None:
        """The weight that a layer has used last in this step."""
        return self.order[self.position].weight if 0 <= self.position < len(self.order) else None

    @property
    def next_use(self) -> WeightUse | None:
        following = self.position + 1
        return self.order[following] if following < len(self.order) else None

    def gather(self, weight: str, phase: str | None = None) -> Tensor:
        """Wait for a gathered weight, return it, and start to gather the weights that follow.

        ``phase``: the phase of the use, for a check; None: no check.
        """
        kept, ahead = phase == RECOMPUTATION, tuple[str, ...]()
        if self.order:
            expected, self.position = self.next_use, self.position + 1
            assert expected and expected.weight == weight and phase in (None, expected.phase), (
                f"the {phase} uses weight {weight} where the model's description has {expected}"
            )
            kept, ahead = self.kept[self.position], self._ahead[self.position]
        if weight in self.ready:
            value = self.ready.pop(weight)
        elif weight in self.gathering:
            value = self.device.wait(self.gathering.pop(weight))
        else:
            value = self.device.wait(self.device.start_gather(weight))
        if kept:
            self.ready[weight] = value
        for following in ahead:
            if following not in self.ready and following not in self.gathering:
                self.gathering[following] = self.device.start_gather(following)
        return value

    def earlier_gradient(self, weight: str) -> Tensor | None:
        """Return the sum to which the gradient of a gathered weight is added next; None if there is none."""
        if weight in self._accumulated:
            return self._accumulated[weight]
        return None if self.device.is_split(weight) else self.device.gradient(weight)

    def scatter(self, weight: str, compute: Callable[[Tensor | None], Tensor]) -> None:
        """Compute the gradient of a gathered weight and sum it over z, perhaps later, but before ``finish`` returns.

        ``compute`` returns the gradient, added to its argument if that is not None.
        """
        earlier = self.earlier_gradient(weight)
        self._accumulated.pop(weight, None)
        gradient = compute(earlier)
        missing = self._missing.pop(weight, self._terms.get(weight, 1)) - 1
        if missing:
            self._missing[weight], self._accumulated[weight] = missing, gradient
        elif not self.device.is_split(weight):
            self.device.set_gradient(weight, gradient)
        else:
            del earlier
            self._scattering.append((weight, self.device.start_scatter(weight, gradient)))
            del gradient
            max_inflight = _MAX_INFLIGHT_REDUCE_SCATTERS if self.overlap.reduce_scatter else 0
            while len(self._scattering) > max_inflight:
                self._add_gradient()

    def _add_gradient(self) -> None:
        weight, pending = self._scattering.popleft()
        self.device.add_gradient(weight, self.device.wait(pending))

    def finish(self) -> None:
        """End a step or an evaluation: every gradient is in place, and no gathered weight outlives the next update."""
        while self._scattering:
            self._add_gradient()
        for pending in self.gathering.values():
            self.device.wait(pending)  # a collective that was started must end before its memory is used again
        self.gathering.clear()
        self.ready.clear()
        assert not self._missing, "a gradient has fewer terms than its description says"
        remaining, self._terms = self.order[self.position + 1 :], {}
        self.order, self.kept, self._ahead, self.position = (), (), (), -1
        assert not remaining, f"the model did not use {remaining[0]}, which its description has"
