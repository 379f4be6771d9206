"""Reports of a run: metrics.jsonl, console, trackers, and its other files in ``run.dir``."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt4d.config import Config, ConfigError
from gpt4d.runs import starts
from gpt4d.runs.history import History
from gpt4d.runs.lock import DirectoryLock
from gpt4d.runs.plots import plot_losses
from gpt4d.runs.tables import duration
from gpt4d.runtime.errors import warn
from gpt4d.runtime.files import LineLog, read_log, replace_when_complete, required_file
from gpt4d.trackers.run_trackers import RunTrackers, start_trackers

_LARGEST_EXPONENT = 700.0  # math.exp overflows above 709


class RunFiles:
    """The files of a run in ``run.dir`` without its checkpoints: its lock, log, starts and plot of the losses.

    Rank 0 calls ``enter``, ``open_log`` and ``record_start`` in this order. On other ranks ``step``, ``event``,
    ``fail`` and ``close`` do nothing.

    Each line of metrics.jsonl has ``time``, in seconds since 1970, and ``elapsed_s``, the seconds that all jobs of the
    run have taken. ``unit``: the task's unit, such as tokens.
    """

    def __init__(self, config: Config, unit: str):
        self.config, self.unit, self.run_dir = config, unit, Path(config.run.dir)
        self.curve = self.run_dir / "loss.png"
        self.lock: DirectoryLock | None = None
        self._log: LineLog | None = None
        self._trackers: RunTrackers
        self._line = _ProgressLine()
        self._average_step_s = 0.0
        self._facts: tuple[Any, ...] = ()  # about this start, for starts.jsonl
        self._started_at: float | None = None  # the time of this start in starts.jsonl
        self._history: History | None = None

    def enter(self) -> None:
        """Create the run directory and lock it until ``close``."""
        with required_file(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self.lock = DirectoryLock(self.run_dir)

    def open_log(self) -> None:
        """Open metrics.jsonl, and start the trackers. Raises ConfigError if the file or a tracker cannot be used."""
        path = self.run_dir / "metrics.jsonl"
        log, earlier = LineLog(path), read_log(path)
        self._began_s = time.monotonic() - last_elapsed_s(earlier)
        self._trackers = start_trackers(self.config, self.run_dir, earlier)
        self._log = log

    def record_start(self, reached: Mapping[str, int], *facts: Any) -> None:
        """Append this start, which continues the run from ``reached``, to starts.jsonl and to the log.

        ``reached``: the result of ``Progress.values``. ``facts``: the remaining arguments of ``starts.record``.
        """
        self._facts = facts
        self._started_at = starts.record(self.config, reached["step"], *facts)
        self._write({"event": "start", **reached})

    def keep(self, reached: Mapping[str, int]) -> None:
        """Create the run directory again if somebody has removed it, so that the run can be saved.

        Raises ConfigError if another run's directory is at its path.
        """
        assert self.lock and self._log
        if self.lock.is_valid():
            return
        self.lock.close()
        self.enter()
        found = starts.read(self.run_dir)
        if found and found[-1].get("time") != self._started_at:
            raise ConfigError(
                f"run.dir={self.run_dir}: replaced during the run by the directory of another run; move that one "
                f"elsewhere. This run is not saved after step {reached['step']}"
            )
        if not found:
            self._log.close()  # the next line creates the file again
            self._history = None
            message = f"warning: {self.run_dir} was removed during the run; it is created again"
            self.event("removed", message, step=reached["step"])
            self.record_start(reached, *self._facts)

    def step(self, values: dict) -> None:
        """Report one step; the documentation of metrics.jsonl lists the keys of ``values``."""
        if not self._log:
            return
        self._write(values)
        new, steps = values["step_time_s"], self.config.train.steps
        self._average_step_s = 0.8 * self._average_step_s + 0.2 * new if self._average_step_s else new
        left = (steps - values["step"]) * self._average_step_s
        self._line.show(
            f"step {values['step']}/{steps}  loss {values['loss']:.4f}  "
            f"{values[f'{self.unit}_per_s']:,.0f} {self.unit}/s  {duration(left)} left{time_breakdown(values)}"
        )

    def event(self, event: str, message: str, /, **values) -> None:
        """Write ``values`` with the key ``event`` to metrics.jsonl, and print ``message``."""
        if self._log:
            self._write({"event": event, **values})
            self._line.print(message)

    def _write(self, values: dict) -> None:
        self._append(values)
        self._trackers.log(values)

    def _append(self, values: dict) -> None:
        assert self._log
        values = {**values, "time": time.time(), "elapsed_s": time.monotonic() - self._began_s}
        self._log.append(json.dumps(without_nan(values), allow_nan=False))

    def plot(self) -> None:
        """Plot the losses of the run. An error is a warning, because a run must not end for its plot."""
        try:
            with replace_when_complete(self.curve) as partial:  # the end of a failed job may cut off the plot
                # The history reads only new lines, so the time for a plot does not grow with the run.
                self._history = self._history or History(self.run_dir)
                self._history.update()
                plot_losses({self.run_dir.name: self._history}, partial, "tokens", "hours", title=self.run_dir.name)
        except Exception as error:
            warn(f"{self.curve}: {type(error).__name__}: {error}")

    def fail(self, problem: str) -> None:
        """Write that the job ends with an error, plot the losses and close the log, unless no start is recorded.

        Any thread may call it, even after ``close``.
        """
        if self._started_at:
            self._append({"event": "failed", "problem": problem})
            self.plot()
            self.close_log(briefly=True)  # a tracker may lose values that it has not written when the process ends

    def close_log(self, briefly: bool = False) -> None:
        """Close the log and the trackers. A second call does nothing. ``briefly``: as in ``RunTrackers.close``."""
        if self._log:
            self._line.close()
            self._log.close()
            self._trackers.close(briefly)

    def close(self) -> None:
        self.close_log(briefly=True)
        if self.lock:
            self.lock.close()

    @property
    def hangs(self) -> bool:
        """Whether a tracker has not ended in time."""
        return self._log is not None and self._trackers.hang


class _ProgressLine:
    """Progress line: rewritten in place on a terminal, a new line every ``every_s`` seconds in a log file."""

    def __init__(self, every_s: float = 10.0):
        self.terminal = sys.stdout.isatty()
        self.every_s, self.last, self.open = every_s, 0.0, False

    def show(self, text: str) -> None:
        if self.terminal:
            print(f"\r\x1b[2K{text}", end="", flush=True)
            self.open = True
        elif time.monotonic() - self.last >= self.every_s:
            print(text, flush=True)
            self.last = time.monotonic()

    def print(self, text: str) -> None:
        self.close()
        print(text, flush=True)

    def close(self) -> None:
        if self.open:
            print(flush=True)
            self.open = False


def last_elapsed_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds that all jobs of a run have taken by the last line of its metrics.jsonl; 0 without a line."""
    return next((line["elapsed_s"] for line in reversed(lines) if "elapsed_s" in line), 0.0)


def of_loss(total: float, units: int, text_bytes: int | None) -> dict[str, float]:
    """Return the loss per unit, and for text the perplexity per unit and the bits per byte.

    Args:
        total: the summed loss in nats.
        units: number of units that have a loss.
        text_bytes: number of UTF-8 bytes that the units encode; None if the units encode no text.
    """
    loss = total / units
    if text_bytes is None:
        return {"loss": loss}
    perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    bits_per_byte = total / (math.log(2) * text_bytes) if text_bytes else math.nan
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}


def time_breakdown(values: dict) -> str:
    """Return a text with seconds of computation, hidden and exposed communication; empty on one device."""
    exposed = {axis: comm["exposed_s"] for axis, comm in values["comm"].items()}
    if not exposed:
        return ""
    total_exposed = sum(exposed.values())
    hidden = sum(comm["hidden_s"] for comm in values["comm"].values())
    by_axis = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in exposed.items())
    compute = values["step_time_s"] - total_exposed
    return f"  compute {compute:.2f} s, hidden {hidden:.2f} s, exposed {total_exposed:.2f} s ({by_axis})"


def without_nan(values):
    """Replace NaN and infinity, which JSON lacks, with None."""
    if isinstance(values, dict):
        return {key: without_nan(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [without_nan(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values
