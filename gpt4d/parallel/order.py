"""The order in which a stage uses its z-sharded weights, from its schedule and its layers. No torch here.

The weight stream and the planner decide by it alone when a weight is gathered and how long it is kept.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
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


def weight_order(
    actions: Iterable[Action],
    layers: Mapping[int, Sequence[LayerWeights]],
    chunks: Mapping[str, int] | None = None,
) -> list[WeightUse]:
    """Return every use of a weight, in the order in which a stage executes ``actions``.

    Args:
        actions: of the stage. The gradients of weights ("W") use no weight.
        layers: of each virtual stage that the actions name.
        chunks: number of chunks that use a weight one after another, where there are several.
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
    """Return for each use whether the gathered weight stays in memory after it.

    A weight stays if the very next use is its own, such as another chunk's, from a recomputation until the backward,
    and, if it is ``cached``, as long as the backward of a microbatch whose forward has used it is still to come.
    Several microbatches may be in flight. Weights in ``cached_for_step`` stay until their last use.
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
        next_is_own = following is not None and following.weight == use.weight
        next_is_own = next_is_own and (use.phase != BACKWARD or following == use)
        used_again = use.weight in cached and pending[use.weight] > 0
        used_again = used_again or (use.weight in cached_for_step and uses[use.weight] > 0)
        kept.append(next_is_own or use.phase == RECOMPUTATION or used_again)
    return kept


def weights_ahead(
    order: Sequence[WeightUse], count: int, never_gathered: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """Return for each use the weights of the ``count`` uses that follow: those to gather while it computes.

    Uses of weights in ``never_gathered`` do not count. Links would be idle during them, so a use that they follow
    directly has as many more weights. A microbatch's first weights are not gathered behind the backward of the one
    before.
    """
    ahead: list[tuple[str, ...]] = []
    upcoming: deque[str] = deque()  # weights to gather, up to the next microbatch's forward
    idle = 0  # uses before the first of them that gather nothing
    for use, following in zip(reversed(order), [None, *reversed(order)], strict=False):
        if following == use:  # of another chunk
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
