"""The history of a run: its metrics.jsonl, read while the run may still write to it."""

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gpt4d.runtime.files import has_types, json_lines, read_regular

_ENDINGS = ("done", "signal", "failed")


class Point(NamedTuple):
    """A loss of a run. ``seen`` counts tokens or images, ``elapsed_s`` the seconds of all jobs of the run so far."""

    step: int
    seen: int
    elapsed_s: float
    loss: float


@dataclass
class History:
    """The losses and events of a run. ``update`` reads the lines that the run has written since the last call.

    Steps that a restart repeats or discards count once or not at all.
    """

    run_dir: Path
    training: dict[int, Point] = field(default_factory=dict)  # logged training losses by step
    validation: dict[int, Point] = field(default_factory=dict)  # losses of the held-out data by step
    sets: dict[str, dict[int, Point]] = field(default_factory=dict)  # losses of the other validation sets, by name
    unit: str = "tokens"  # the unit of ``Point.seen``, tokens or images
    step: int = 0  # the last logged step
    step_time_s: float | None = None  # seconds per step, from the last line of a step
    per_s: float | None = None  # tokens or images per second, from the same line
    time: float | None = None  # when the last line was written, in seconds since 1970
    started: bool = False  # whether a start is recorded
    ending: str | None = None  # how the newest start ended: done, signal or failed; None if it runs or was killed
    problem: str | None = None  # the error of a failed start
    unreadable: str | None = None  # why metrics.jsonl cannot be read
    _read_bytes: int = 0

    def __post_init__(self) -> None:
        self.update()

    def update(self) -> None:
        """Read the new complete lines. A line that a crash has cut off is ignored."""
        path = self.run_dir / "metrics.jsonl"
        try:
            content = read_regular(path, self._read_bytes)
            self.unreadable = None
        except OSError as error:
            self.unreadable = f"{path.name}: {error.strerror}"
            return
        complete = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(complete)
        for line in json_lines(complete):
            with suppress(KeyError, TypeError, AttributeError, StopIteration):  # a key is missing
                self._add(line)

    def _add(self, line: dict) -> None:
        event, step = line.get("event"), line.get("step", self.step)
        self.time = line["time"]
        if event is None:
            self.unit = next(key for key in line if key.endswith("_per_s")).removesuffix("_per_s")
            self.step, self.step_time_s, self.per_s = step, line["step_time_s"], line[f"{self.unit}_per_s"]
            self._add_loss(self.training, line)
        elif event == "validation":
            self._add_loss(self.validation, line)
            for name, values in line.get("sets", {}).items():
                if has_types(values):
                    self._add_loss(self.sets.setdefault(name, {}), {**line, **values})
        elif event == "start":
            self.started, self.ending, self.problem, self.step = True, None, None, step
            for losses in (self.training, self.validation, *self.sets.values()):
                for later in [known for known in losses if known > step]:
                    del losses[later]
        elif event in _ENDINGS:
            self.ending, self.problem, self.step = event, line.get("problem"), step

    def _add_loss(self, losses: dict[int, Point], line: dict) -> None:
        if line["loss"] is not None:
            losses[line["step"]] = Point(line["step"], line[self.unit], line["elapsed_s"], line["loss"])


def interval_means(points: list[Point], intervals: int) -> list[Point]:
    """Return the means of at most ``intervals`` groups of neighboring points, whose sizes differ by at most one.

    The counts of a mean come from the last point of its group.
    """
    count = min(intervals, len(points))
    bounds = [len(points) * index // count for index in range(count + 1)] if count else []
    groups = [points[start:end] for start, end in pairwise(bounds)]
    return [group[-1]._replace(loss=sum(point.loss for point in group) / len(group)) for group in groups]
