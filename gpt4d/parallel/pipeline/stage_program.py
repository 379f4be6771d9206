"""The program of each stage in a step: its actions, and the starts of its transfers. No torch here.

The sending stage starts a transfer as soon as its tensor exists. In the simulated step, some action of the receiving
stage is running at that time. The receiving stage starts the transfer before this action, so that it is ready to
receive while it computes. All transfers have one global order, the order in which their tensors exist, and every stage
starts its transfers in this order. So stages never wait for each other in a cycle, even if a transfer blocks all later
operations of a stage.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gpt4d.config import ConfigError
from gpt4d.config.schema import SCHEDULES as SCHEDULES
from gpt4d.parallel.pipeline import schedule
from gpt4d.parallel.pipeline.schedule import Action, Order
from gpt4d.parallel.pipeline.simulation import Costs, simulate


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
        own = [span for span in crossing if stage in (span.source % count, span.target % count)]
        program: Program = []
        started = 0
        for action, start, stop in spans:
            while started < len(own):
                receives = own[started].target % count == stage
                exists = stops[own[started].action]
                if exists > start and not (receives and exists < stop):
                    break
                program.append(StageTransfer(own[started].action, own[started].target))
                started += 1
            program.append(action)
        result.append(program + [StageTransfer(span.action, span.target) for span in own[started:]])
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
