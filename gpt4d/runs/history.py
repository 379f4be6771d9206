"""The history of a run: its metrics.jsonl, read while the run may still write to it."""

from contextlib import suppress
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


class History:
    """The losses and events of a run. ``update`` reads the lines that the run has written since the last call.

    Attributes:
        training: logged training losses by step. Steps that a restart repeats or discards count once or not at all.
        validation: losses of the held-out data by step.
        sets: losses of each additional validation set by step, by the name of the set.
        unit: the unit of ``Point.seen``, tokens or images.
        step: the last logged step.
        step_time_s: seconds per step, from the last line of a step.
        per_s: tokens or images per second, from the same line.
        time: when the last line was written, in seconds since 1970.
        started: whether a start is recorded.
        ending: the event that ended the newest start: done, signal or failed; None while it runs or if it was killed.
        problem: the error of a failed start.
        unreadable: why metrics.jsonl cannot be read.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / "metrics.jsonl"
        self.training: dict[int, Point] = {}
        self.validation: dict[int, Point] = {}
        self.sets: dict[str, dict[int, Point]] = {}
        self.unit = "tokens"
        self.step = 0
        self.step_time_s: float | None = None
        self.per_s: float | None = None
        self.time: float | None = None
        self.started = False
        self.ending: str | None = None
        self.problem: str | None = None
        self.unreadable: str | None = None
        self._read_bytes = 0
        self.update()

    def update(self) -> None:
        """Read the new complete lines. A line that a crash has cut off is ignored."""
        try:
            content = read_regular(self.path, self._read_bytes)
            self.unreadable = None
        except OSError as error:
            self.unreadable = f"{self.path.name}: {error.strerror}"
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
