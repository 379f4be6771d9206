"""Schedules: the order in which stages compute the forwards and backwards of microbatches. No torch here.

A pipeline of S stages with v model chunks each has S·v virtual stages. Virtual stage q is on stage q % S. All schedules
except interleaved 1F1B have v = 1.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, combinations
from typing import NamedTuple


class Action(NamedTuple):
    """One forward ("F") or backward ("B") of one microbatch, counted from 0, on one virtual stage.

    A backward may be split: "I" computes the gradient of the input, "W" the gradients of the weights.
    """

    kind: str
    microbatch: int
    virtual_stage: int = 0

    def __str__(self) -> str:
        return f"{self.virtual_stage}{self.kind}{self.microbatch}"


Order = list[Action]  # actions of one stage


def single_stage(microbatches: int) -> Order:
    """Return the order of a single stage: F0 B0 F1 B1 …, with one microbatch in flight."""
    return [Action(kind, microbatch) for microbatch in range(microbatches) for kind in "FB"]


def gpipe(stages: int, microbatches: int) -> list[Order]:
    """Return the orders of GPipe: all forwards, then all backwards, with every microbatch in flight."""
    return [_alternating(_of_stage(stage, microbatches), microbatches) for stage in range(stages)]


def one_forward_one_backward(stages: int, microbatches: int) -> list[Order]:
    """Return the orders of 1F1B (PipeDream-Flush): stage i runs S - i forwards first."""
    return [_alternating(_of_stage(stage, microbatches), stages - stage) for stage in range(stages)]


def eager_1f1b(stages: int, microbatches: int, delayed: int | None = None) -> list[Order]:
    """Return the orders of eager 1F1B (arXiv 2211.05322, §4): 2(S - i) - 1 forwards first, to overlap transfers.

    Args:
        stages: number of stages, S.
        microbatches: number of microbatches.
        delayed: number of weight gradients that a stage delays, with split backwards; None: unsplit backwards.
    """
    return [_alternating(_of_stage(stage, microbatches), 2 * (stages - stage) - 1, delayed) for stage in range(stages)]


def zb_h1(stages: int, microbatches: int) -> list[Order]:
    """Return the orders of ZB-H1 (arXiv 2401.10241, §2.2): 1F1B with i delayed weight gradients on stage i."""
    return [_alternating(_of_stage(stage, microbatches), stages - stage, delayed=stage) for stage in range(stages)]


def interleaved_1f1b(stages: int, microbatches: int, chunks: int) -> list[Order]:
    """Return the orders of interleaved 1F1B (arXiv 2104.04473, §2.2).

    Groups of S microbatches pass through the model chunks of a stage. ``microbatches`` must be a multiple of
    ``stages``.
    """
    assert microbatches % stages == 0, "the groups of the interleaved schedule have S microbatches"

    def actions(stage: int) -> tuple[Order, Order]:
        forwards, backwards = [], []
        for index in range(microbatches * chunks):
            group, place = divmod(index, stages * chunks)
            chunk, microbatch = divmod(place, stages)
            microbatch += group * stages
            forwards.append(Action("F", microbatch, chunk * stages + stage))
            backwards.append(Action("B", microbatch, (chunks - 1 - chunk) * stages + stage))
        return forwards, backwards

    first = [2 * (stages - stage - 1) + (chunks - 1) * stages + 1 for stage in range(stages)]
    return [_alternating(actions(stage), first[stage]) for stage in range(stages)]


def _of_stage(stage: int, microbatches: int) -> tuple[Order, Order]:
    """Return the forwards and the backwards of a stage with one model chunk."""
    forwards, backwards = ([Action(kind, m, stage) for m in range(microbatches)] for kind in "FB")
    return forwards, backwards


def _alternating(actions: tuple[Order, Order], first: int, delayed: int | None = None) -> Order:
    """Return ``first`` forwards, followed by alternating backwards and forwards.

    ``delayed``: number of later input gradients that precede the weight gradients of a split backward; None: do not
    split the backwards.
    """
    forwards, backwards = actions
    order = forwards[:first]
    for number, backward in enumerate(backwards):
        if delayed is None:
            order.append(backward)
        else:
            order.append(backward._replace(kind="I"))
            if number >= delayed:
                order.append(backwards[number - delayed]._replace(kind="W"))
        order += forwards[first + number : first + number + 1]
    if delayed:
        order += [late._replace(kind="W") for late in backwards[-delayed:]]
    return order


def problem(orders: Sequence[Order], virtual_stages: int, microbatches: int) -> str | None:
    """Return the reason why ``orders`` are not a valid schedule, or None if they are valid.

    Each virtual stage must compute the forward and then the backward of every microbatch. A backward may be split.
    """
    stages = len(orders)
    for stage, order in enumerate(orders):
        seen: set[Action] = set()
        for action in order:
            kind, microbatch, virtual_stage = action
            if virtual_stage % stages != stage or not 0 <= virtual_stage < virtual_stages:
                return f"{action} is not on stage {stage}"
            if action in seen:
                return f"{action} occurs twice"
            before = {"F": None, "B": "F", "I": "F", "W": "I"}[kind]
            if before and action._replace(kind=before) not in seen:
                return f"{action} is not after its {before}"
            if kind in "BI" and action._replace(kind="I" if kind == "B" else "B") in seen:
                return f"{action} computes a gradient again"
            seen.add(action)
        for virtual_stage in range(stage, virtual_stages, stages):
            for microbatch in range(microbatches):
                unsplit, split = (Action(kind, microbatch, virtual_stage) for kind in "BW")
                if unsplit not in seen and split not in seen:
                    return f"stage {stage} has no {unsplit}"
    return None


def peak_of_others(order: Iterable[Action], forward: float, delayed: float) -> float:
    """Return the peak memory of microbatches other than the microbatch of the current action.

    Args:
        order: the actions of a stage.
        forward: memory of a microbatch from its forward until its backward.
        delayed: memory of a microbatch from its split backward until its weight gradients.
    """
    held = peak = 0.0
    after = {"F": forward, "B": 0.0, "I": delayed, "W": 0.0}
    for action in order:
        before = {"F": 0.0, "B": forward, "I": forward, "W": delayed}[action.kind]
        peak = max(peak, held - before)
        held += after[action.kind] - before
    return peak


def peak_in_flight(order: Iterable[Action]) -> int:
    """Return the maximum number of microbatches in flight on a stage, from the forward until the last gradient.

    A microbatch counts once for each model chunk.
    """
    return int(peak_of_others(order, 1, 1)) + 1


_ROUNDING = 1 + 1e-9


def balanced(work: Sequence[float], parts: int, places: Collection[int]) -> list[int]:
    """Split layers into consecutive parts such that the maximum work of a part is minimal.

    Return the index of the first layer of each part except the first part. Among several solutions, the result has the
    minimum sum of squared work.

    Args:
        work: work of each layer.
        parts: number of parts, at most ``len(places) + 1``.
        places: indices of layers that a part may begin with, other than 0.
    """
    bounds, before = [0, *sorted(places), len(work)], [0.0, *accumulate(work)]
    done = [before[bound] for bound in bounds]  # work before each bound

    def suffices(limit: float) -> bool:
        end = 0
        for _ in range(parts):
            end = bisect_right(done, done[end] + limit * _ROUNDING) - 1
        return end == len(done) - 1

    limits = sorted({done[end] - done[begin] for begin, end in combinations(range(len(done)), 2)})
    limit = limits[bisect_left(limits, True, key=suffices)] * _ROUNDING
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # sum of squares and ends of parts, by the last end
    for further in reversed(range(parts)):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (cost, ends) in best.items():
            least = bisect_left(done, done[-1] - further * limit, begin + 1)  # further parts can have the rest
            for end in range(least, bisect_right(done, done[begin] + limit)):
                choice = cost + (done[end] - done[begin]) ** 2, (*ends, end)
                following[end] = min(choice, following.get(end, choice))
        best = following
    return [bounds[end] for end in best[len(done) - 1][1][:-1]]
