"""The order in which a stage uses its z-sharded weights, from its schedule and its layers. No torch here.

The weight stream and the planner decide by it alone when a weight is gathered and how long it is kept.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpt4d.parallel.pipeline.schedule import Action

FORWARD, RECOMPUTATION, BACKWARD = "forward", "recomputation", "backward"


class LayerWeights(NamedTuple):
    """Names of the weights that one layer or block takes from the stream in each phase, in the order of execution.

    ``recomputation`` comes before ``backward`` when the backward of a microbatch reaches the layer.
    """

    forward: tuple[str, ...] = ()
    recomputation: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


class WeightUse(NamedTuple):
    """One use of a gathered weight: in the forward, the recomputation or the backward of a microbatch."""

    phase: str
    weight: str
    microbatch: int = 0


def weight_order(schedule: Iterable[Action], layers: Sequence[LayerWeights]) -> list[WeightUse]:
    """Return every use of a weight, in the order in which a stage of ``layers`` executes ``schedule``."""
    order = []
    for kind, microbatch in schedule:
        if kind == "F":
            for layer in layers:
                order += [WeightUse(FORWARD, weight, microbatch) for weight in layer.forward]
        else:
            for layer in reversed(layers):
                order += [WeightUse(RECOMPUTATION, weight, microbatch) for weight in layer.recomputation]
                order += [WeightUse(BACKWARD, weight, microbatch) for weight in layer.backward]
    return order


def kept_after_use(
    order: Sequence[WeightUse], cached: Collection[str], cached_for_step: Collection[str] = ()
) -> list[bool]:
    """Return for each use whether the gathered weight stays in memory after it.

    A weight stays if the very next use is its own, from a recomputation until the backward, and, if it is ``cached``,
    as long as the backward of a microbatch whose forward has used it is still to come. Several microbatches may be in
    flight. Weights in ``cached_for_step`` stay until their last use.
    """
    remaining = Counter((use.weight, use.microbatch) for use in order if use.phase != FORWARD)
    uses = Counter(use.weight for use in order)
    pending: Counter[str] = Counter()  # uses to come in backwards of microbatches in flight
    kept = []
    for use, following in zip(order, [*order[1:], None], strict=True):
        if use.phase == FORWARD:
            # Moving the count makes a second forward use of the weight add nothing.
            pending[use.weight] += remaining.pop((use.weight, use.microbatch), 0)
        else:
            pending[use.weight] -= 1
        uses[use.weight] -= 1
        next_is_own = following is not None and following.weight == use.weight and use.phase != BACKWARD
        used_again = use.weight in cached and pending[use.weight] > 0
        used_again = used_again or (use.weight in cached_for_step and uses[use.weight] > 0)
        kept.append(next_is_own or use.phase == RECOMPUTATION or used_again)
    return kept


def weights_ahead(
    order: Sequence[WeightUse], position: int, count: int, never_gathered: Collection[str] = ()
) -> Iterator[str]:
    """Yield the weights of the ``count`` uses after ``position``, the ones to gather while that one computes.

    While weights in ``never_gathered`` are used, links have time for more: each use of one adds another weight. A
    microbatch's first weights are not gathered behind the backward of the one before.
    """
    for index in range(position + 1, len(order)):
        if count == 0 or (order[index - 1].phase == BACKWARD and order[index].phase == FORWARD):
            return
        if order[index].weight in never_gathered:
            count += 1
        else:
            count -= 1
            yield order[index].weight
