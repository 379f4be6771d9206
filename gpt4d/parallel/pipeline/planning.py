"""The orders of a schedule by its name, and the number of delayed weight gradients that hides its transfers."""

from gpt4d.config import ConfigError
from gpt4d.config.schema import SCHEDULES as SCHEDULES
from gpt4d.parallel.pipeline import schedule
from gpt4d.parallel.pipeline.schedule import Order
from gpt4d.parallel.pipeline.simulation import Costs, simulate

_WITHOUT_COSTS = {
    "gpipe": schedule.gpipe,
    "1f1b": schedule.one_forward_one_backward,
    "eager_1f1b": schedule.eager_1f1b,
    "zb_h1": schedule.zb_h1,
}


def orders_of(name: str, stages: int, microbatches: int, costs: Costs, chunks_per_stage: int = 1) -> list[Order]:
    """Return the order of each stage under the schedule ``name``.

    Args:
        name: one of ``SCHEDULES``.
        stages: number of stages.
        microbatches: parts of the global batch.
        costs: of the virtual stages; only ``eager_1f1b_w`` depends on them.
        chunks_per_stage: model chunks of a stage; more than one with ``interleaved_1f1b`` alone.

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
    """Return eager 1F1B with split backwards, and the fewest delayed weight gradients of those with the fastest step.

    A delayed gradient occupies memory. With none, each still runs beside the transfer of its input's gradient.
    """
    choices = [schedule.eager_1f1b(stages, microbatches, delayed) for delayed in range(min(stages, microbatches) + 1)]
    return min(choices, key=lambda orders: simulate(orders, costs).seconds)
