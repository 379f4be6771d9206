"""Recorded actions of a step on pipeline stages, and their plot with one row per stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt4d.parallel.comm.stats import seconds_between
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import Span, StageTransfer, Timeline, TransferSpan


@dataclass
class StageTrace:
    """The start and stop of each action and transfer on one rank.

    Transfers of a link are in the order of their starts. Times are results of ``now`` (gpt4d.parallel.comm.stats).
    """

    actions: list[tuple[Action, Any, Any]] = field(default_factory=list)
    transfers: list[tuple[StageTransfer, Any, Any]] = field(default_factory=list)

    def since(self, origin: Any) -> "StageTrace":
        """Return a trace with times in seconds since ``origin``."""

        def seconds(entries: list) -> list:
            return [(entry, seconds_between(origin, a), seconds_between(origin, b)) for entry, a, b in entries]

        return StageTrace(seconds(self.actions), seconds(self.transfers))

    def to_json(self) -> list:
        """Return a trace with times in seconds as lists for JSON."""
        return [self.actions, self.transfers]

    @classmethod
    def from_json(cls, values: list) -> "StageTrace":
        actions, transfers = values
        return cls(
            [(Action(*action), start, stop) for action, start, stop in actions],
            [(StageTransfer(Action(*action), target), start, stop) for (action, target), start, stop in transfers],
        )


def timeline(recordings: Sequence[StageTrace]) -> Timeline:
    """Return the timeline of a step from the traces of one rank per stage, in seconds since the first action.

    A transfer begins when its sender has started it and has completed the preceding transfers of the link. It ends when
    its receiver has all data. Clocks of stages may differ. They are aligned such that the fastest transfers between two
    neighbors take equally long in both directions.

    Args:
        recordings: a trace of each stage, in seconds of its own clock.
    """
    count = len(recordings)
    sent = [_begins(recording, stage, count) for stage, recording in enumerate(recordings)]
    received = [{transfer: stop for transfer, _, stop in recording.transfers} for recording in recordings]
    fastest: dict[tuple[int, int], float] = {}  # by sending and receiving stage: seconds between their clocks
    for stage, begins in enumerate(sent):
        for transfer, begin in begins.items():
            target = transfer.target % count
            seconds = received[target][transfer] - begin
            fastest[stage, target] = min(fastest.get((stage, target), seconds), seconds)
    clocks = [0.0]  # offset to add to the times of each stage
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


def _begins(recording: StageTrace, stage: int, count: int) -> dict[StageTransfer, float]:
    """Return the time at which each transfer that a stage sends begins."""
    begins, free = {}, dict[int, float]()  # free: by receiving stage, the time at which the link becomes free
    for transfer, start, stop in recording.transfers:
        if transfer.action.virtual_stage % count == stage:
            target = transfer.target % count
            begins[transfer] = max(start, free.get(target, start))
            free[target] = stop
    return begins


_COLORS = {"F": "#7a9cc6", "B": "#c6a07a", "I": "#c6a07a", "W": "#9fbf9f"}
_NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}
_MAX_LABELS = 400  # with more actions, labels are not legible


def draw(timeline: Timeline, title: str, path: Path) -> None:
    """Write a plot of a step to ``path``. Numbers are microbatches, and paler bars are other model chunks."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    count = len(timeline.stages)
    figure = Figure(figsize=(12, 1.2 + 0.55 * count), layout="constrained")
    panel = figure.subplots()
    labels = sum(map(len, timeline.stages)) <= _MAX_LABELS
    for stage, spans in enumerate(timeline.stages):
        for (kind, microbatch, virtual_stage), start, stop in spans:
            chunk = virtual_stage // count
            panel.broken_barh(
                [(start, stop - start)],
                (stage - 0.4, 0.8),
                color=_COLORS[kind],
                alpha=1 / (1 + 0.5 * chunk),
                ec="white",
            )
            if labels:
                panel.text((start + stop) / 2, stage, str(microbatch), ha="center", va="center", fontsize=7)
    for transfer in timeline.transfers:
        if transfer.stop > transfer.start:
            rows = transfer.source % count, transfer.target % count
            panel.plot([transfer.start, transfer.stop], rows, color="#555555", linewidth=0.6)
    panel.set_yticks(range(count), [f"stage {stage}" for stage in range(count)])
    panel.invert_yaxis()
    panel.set_xlim(0, timeline.seconds)
    panel.set_xlabel("seconds")
    panel.set_title(f"{title}: {timeline.seconds:.3g} s", fontsize=10)
    kinds = [kind for kind in _COLORS if any(span.action.kind == kind for spans in timeline.stages for span in spans)]
    handles = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), fontsize=8)
    figure.savefig(path, dpi=120)
