"""What each stage does in a step: its actions, and when it starts to send and to receive. No torch here.

The sending stage starts a transfer as soon as its tensor exists. The receiving one starts it before the action during
which that happens in the simulated step, so that it is ready while it computes something else. All transfers have one
global order, that of these times, and each stage starts its own in this order. So no stages wait for each other in a
cycle, even where a transfer blocks all that a stage starts after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gpt4d.parallel.pipeline.schedule import Action, Order
from gpt4d.parallel.pipeline.simulation import Costs, simulate


class Transfer(NamedTuple):
    """What ``action`` produces for another virtual stage: tensors after a forward, their gradients after a backward."""

    action: Action
    target: int  # virtual stage

    def __str__(self) -> str:
        return f"{self.action}>{self.target}"


Program = list[Action | Transfer]  # of one stage: a transfer stands where the stage starts to send or to receive it


def link_name(source: int, target: int) -> str:
    """Return the name of the link from one stage to another, by which its bytes are planned and counted."""
    return f"stage {source} to {target}"


def programs(orders: Sequence[Order], costs: Costs) -> list[Program]:
    """Return the program of each stage. A tensor that stays on its stage has no transfer."""
    count, timeline = len(orders), simulate(orders, costs)
    stops = {span.action: span.stop for spans in timeline.stages for span in spans}
    crossing = [span for span in timeline.transfers if span.source % count != span.target % count]
    crossing.sort(key=lambda span: stops[span.action])  # stable: of one action's, in the order of its edges
    result = []
    for stage, spans in enumerate(timeline.stages):
        own = [span for span in crossing if stage in (span.source % count, span.target % count)]
        program: Program = []
        started = 0
        for action, start, stop in spans:
            while started < len(own):
                receives = own[started].target % count == stage
                exists = stops[own[started].action]
                if exists > start and not (receives and exists < stop):
                    break
                program.append(Transfer(own[started].action, own[started].target))
                started += 1
            program.append(action)
        result.append(program + [Transfer(span.action, span.target) for span in own[started:]])
    return result
