"""Print the order of a schedule, its activations in flight and the time of a step.

python -m gpt4d.parallel.pipeline schedule=eager_1f1b stages=4 microbatches=8

Other options: chunks_per_stage=1; forward=1.0 backward=2.0, seconds of a stage; transfer=0.0, seconds between two
stages; plot=FILE for a plot of the step. A row is a stage. 1F3 is the forward of microbatch 3 on virtual stage 1. B is
a backward. I and W are its halves, the gradient of the input and the gradients of the weights.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from gpt4d.config import ConfigError, asks_for_help, check_at_least, check_choice, check_image_format, from_arguments
from gpt4d.config.commands import one_line_errors
from gpt4d.config.schema import SCHEDULES
from gpt4d.parallel.pipeline.schedule import Order, peak_in_flight
from gpt4d.parallel.pipeline.simulation import Costs, Timeline, orders_of, simulate
from gpt4d.runtime.files import required_file

_MAX_WORK = 100_000  # forwards in a step


@dataclass
class ScheduleQuery:
    """The arguments of the command. Times are in seconds."""

    schedule: str = "eager_1f1b"
    stages: int = 4
    microbatches: int = 8
    chunks_per_stage: int = 1
    forward: float = 1.0  # seconds per stage and microbatch
    backward: float = 2.0
    transfer: float = 0.0
    plot: str | None = None


def main(arguments: list[str]) -> None:
    """Run the command."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    query = from_arguments(ScheduleQuery, arguments)
    check_choice("schedule", query.schedule, SCHEDULES)
    check_image_format("plot", query.plot)
    for key in ("stages", "microbatches", "chunks_per_stage"):
        check_at_least(key, getattr(query, key), 1)
    work = query.stages * query.microbatches * query.chunks_per_stage
    check_at_least("stages·microbatches·chunks_per_stage", work, 1, _MAX_WORK)
    for key in ("forward", "backward", "transfer"):
        check_at_least(key, getattr(query, key), 0)
    if query.forward == query.backward == 0:
        raise ConfigError("forward=0 backward=0: a stage without work; set forward or backward to a value above 0")
    orders, timeline = simulated(query)
    print(report(query, orders, timeline))
    if query.plot:
        from gpt4d.parallel.pipeline.trace import draw

        title = f"{query.schedule}, {query.stages} stages, {query.microbatches} microbatches"
        with required_file(Path(query.plot)):
            draw(timeline, title, Path(query.plot))
        print(f"plot: {query.plot}")


def simulated(query: ScheduleQuery) -> tuple[list[Order], Timeline]:
    """Return the orders of the schedule and the timeline of its step."""
    parts = query.chunks_per_stage
    half = query.backward / 2 / parts
    costs = Costs.equal(query.stages * parts, query.forward / parts, half, half, query.transfer)
    orders = orders_of(query.schedule, query.stages, query.microbatches, costs, parts)
    return orders, simulate(orders, costs)


def report(query: ScheduleQuery, orders: list[Order], timeline: Timeline) -> str:
    """Return one line per stage, and a line with the time of the step."""
    peaks = [peak_in_flight(order) for order in orders]
    lines = [
        f"stage {stage}: {' '.join(map(str, order))}  (at most {peak} in flight)"
        for stage, (order, peak) in enumerate(zip(orders, peaks, strict=True))
    ]
    busy = query.microbatches * (query.forward + query.backward)
    idle = timeline.seconds - busy
    lines.append(
        f"step: {timeline.seconds:g} s, of which each stage is idle for {idle:g} s ({idle / busy:.0%} of its work)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
