"""Where to cut a sequence of layers into stages of equal work. No torch here."""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

_ROUNDING = 1 + 1e-9


def balanced(work: Sequence[float], parts: int, places: Collection[int]) -> list[int]:
    """Return the indices at which all parts but the first begin, so that the part with the most work has the least.

    Of several such choices it is the most even one: that with the smallest sum of squares.

    Args:
        work: of each layer.
        parts: number of parts, at most one more than the places.
        places: indices of layers that a part may begin with, other than 0.
    """
    total = [0.0, *accumulate(work)]
    ends = [*sorted(places), len(work)]

    def least(cost: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
        """Return the least cost and its beginnings; ``cost`` adds a part's work to the cost of those before it."""
        best: dict[int, tuple[float, tuple[int, ...]]] = {end: (cost(0.0, total[end]), ()) for end in ends}
        for _ in range(parts - 1):
            following = {}
            for end in ends:
                choices = [
                    (cost(before, total[end] - total[begin]), (*begins, begin))
                    for begin, (before, begins) in best.items()
                    if begin < end
                ]
                if choices:
                    following[end] = min(choices)
            best = following
        return best[len(work)]

    most = least(max)[0] * _ROUNDING
    return list(least(lambda before, part: before + part**2 if part <= most else math.inf)[1])
