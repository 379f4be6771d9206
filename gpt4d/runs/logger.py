"""Reports of a run: metrics.jsonl, console, trackers."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt4d.config import Config
from gpt4d.runs.tables import duration
from gpt4d.runtime.writing import LineLog, read_log
from gpt4d.trackers.run_trackers import start_trackers

_LARGEST_EXPONENT = 700.0  # math.exp overflows above 709


class RunLogger:
    """Writer of rank 0's reports. ``step`` and ``event`` append one line each to metrics.jsonl.

    Each line has ``time``, in seconds since 1970, and ``elapsed_s``, the seconds that all jobs of the run have taken.
    ``unit``: the task's unit, such as tokens. Steps have the keys ``{unit}`` (total so far) and ``{unit}_per_s``.
    """

    def __init__(self, config: Config, run_dir: Path, unit: str = "tokens"):
        self.steps, self.run_dir, self.unit = config.train.steps, run_dir, unit
        self.file = LineLog(run_dir / "metrics.jsonl")
        earlier = read_log(run_dir / "metrics.jsonl")
        self.began_s = time.monotonic() - last_elapsed_s(earlier)
        self.trackers = start_trackers(config, run_dir, earlier)
        self.line = _ProgressLine()
        self.average_step_s = 0.0

    def step(self, values: dict) -> None:
        """Report one step; the documentation of metrics.jsonl lists the keys of ``values``."""
        self._write(values)
        new = values["step_time_s"]
        self.average_step_s = 0.8 * self.average_step_s + 0.2 * new if self.average_step_s else new
        left = (self.steps - values["step"]) * self.average_step_s
        self.line.show(
            f"step {values['step']}/{self.steps}  loss {values['loss']:.4f}  "
            f"{values[f'{self.unit}_per_s']:,.0f} {self.unit}/s  {duration(left)} left{time_breakdown(values)}"
        )

    def event(self, event: str, message: str, /, **values) -> None:
        """Write ``values`` with the key ``event`` to metrics.jsonl, and print ``message``."""
        self._write({"event": event, **values})
        self.line.print(message)

    def start(self, **values) -> None:
        """Write that starts.jsonl contains a new start of the run, to which all following lines belong."""
        self._write({"event": "start", **values})

    def failed(self, problem: str) -> None:
        """Write that the job ends with an error. Any thread may call it, even after ``close``."""
        self.file.append(self._line({"event": "failed", "problem": problem}))

    def _line(self, values: dict) -> str:
        values = {**values, "time": time.time(), "elapsed_s": time.monotonic() - self.began_s}
        return json.dumps(without_nan(values), allow_nan=False)

    def _write(self, values: dict) -> None:
        self.file.append(self._line(values))
        self.trackers.log(values)

    def reopen(self) -> None:
        """Continue in a new file, after the run directory was created again."""
        self.file.close()

    def close(self, briefly: bool = False) -> None:
        """Close all outputs. A second call does nothing. ``briefly``: as in ``RunTrackers.close``."""
        self.line.close()
        self.file.close()
        self.trackers.close(briefly)

    @property
    def hangs(self) -> bool:
        """Whether a tracker has not ended in time."""
        return self.trackers.hang


class NullLogger:
    """Logger of ranks other than 0, which discards all reports."""

    hangs = False

    def step(self, values: dict) -> None: ...

    def event(self, event: str, message: str, /, **values) -> None: ...

    def start(self, **values) -> None: ...

    def failed(self, problem: str) -> None: ...

    def reopen(self) -> None: ...

    def close(self, briefly: bool = False) -> None: ...


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
