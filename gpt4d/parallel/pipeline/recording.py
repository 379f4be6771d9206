"""Measured times of a step: each stage records its actions and transfers, and a timeline joins those of all stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpt4d.parallel.pipeline.program import Transfer
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import Span, Timeline, TransferSpan
from gpt4d.parallel.traffic import seconds_between


@dataclass
class Recording:
    """When a rank computed each action, and when it started each transfer and had completed it.

    Transfers of a link are in the order in which they were started. Times are results of ``now``
    (gpt4d.parallel.traffic).
    """

    actions: list[tuple[Action, Any, Any]] = field(default_factory=list)
    transfers: list[tuple[Transfer, Any, Any]] = field(default_factory=list)

    def since(self, origin: Any) -> "Recording":
        """Return the same times in seconds after ``origin``."""

        def seconds(entries: list) -> list:
            return [(what, seconds_between(origin, a), seconds_between(origin, b)) for what, a, b in entries]

        return Recording(seconds(self.actions), seconds(self.transfers))

    def to_json(self) -> list:
        """Return a recording in seconds as lists for JSON."""
        return [self.actions, self.transfers]

    @classmethod
    def from_json(cls, values: list) -> "Recording":
        actions, transfers = values
        return cls(
            [(Action(*action), start, stop) for action, start, stop in actions],
            [(Transfer(Action(*action), target), start, stop) for (action, target), start, stop in transfers],
        )


def timeline(recordings: Sequence[Recording]) -> Timeline:
    """Return the step of which one rank of each stage made a recording, in seconds since its first action.

    A transfer begins when its sender has started it and has sent what it started before on the same link. It ends when
    its receiver has all of it. Clocks may differ: between neighbors, the fastest transfer of each direction is taken to
    last equally long.

    Args:
        recordings: of each stage, in seconds of a clock of its own.
    """
    count = len(recordings)
    sent = [_begins(recording, stage, count) for stage, recording in enumerate(recordings)]
    received = [{transfer: stop for transfer, _, stop in recording.transfers} for recording in recordings]
    fastest: dict[tuple[int, int], float] = {}  # by the stages that send and receive, seconds on different clocks
    for stage, begins in enumerate(sent):
        for transfer, begin in begins.items():
            target = transfer.target % count
            seconds = received[target][transfer] - begin
            fastest[stage, target] = min(fastest.get((stage, target), seconds), seconds)
    clocks = [0.0]  # what to add to the times of each stage
    for stage in range(count - 1):
        clocks.append(clocks[-1] + (fastest[stage + 1, stage] - fastest[stage, stage + 1]) / 2)
    first = min(recording.actions[0][1] + clock for recording, clock in zip(recordings, clocks, strict=True))
    clocks = [clock - first for clock in clocks]
    return Timeline(
        [
            [Span(action, start + clock, stop + clock) for action, start, stop in recording.actions]
            for recording, clock in zip(recordings, clocks, strict=True)
        ],
        [
            TransferSpan(
                transfer.action,
                transfer.action.virtual_stage,
                transfer.target,
                begin + clocks[stage],
                received[transfer.target % count][transfer] + clocks[transfer.target % count],
            )
            for stage, begins in enumerate(sent)
            for transfer, begin in begins.items()
        ],
    )


def _begins(recording: Recording, stage: int, count: int) -> dict[Transfer, float]:
    """Return when each transfer that a stage sends begins."""
    begins, free = {}, dict[int, float]()  # by receiving stage, when the link to it becomes free
    for transfer, start, stop in recording.transfers:
        if transfer.action.virtual_stage % count == stage:
            target = transfer.target % count
            begins[transfer] = max(start, free.get(target, start))
            free[target] = stop
    return begins
