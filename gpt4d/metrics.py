"""What a run reports: metrics.jsonl, the console, Weights & Biases, the loss curve."""

import fcntl
import json
import math
import os
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch

from gpt4d.config import Config, ConfigError

# Dense bf16 peak of a device in FLOP/s, by a part of the name torch gives it.
_PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "MI250X": 191.5e12, "MI300X": 1307e12}


def peak_flops(device: torch.device) -> float | None:
    """Of a device known here, in FLOP/s; None for others."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has used: of its GPU, or of the host where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def used_memory_gib(device: torch.device) -> float | None:
    """What this process uses now: of its GPU, or of the host; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 2**30
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:  # not Linux
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


class RunLogger:
    """Rank 0's account of a run. ``step`` and ``event`` write one line each to metrics.jsonl, at once."""

    def __init__(self, config: Config, run_dir: Path):
        self.steps, self.run_dir = config.train.steps, run_dir
        self.file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115, closed by close()
        _lock(self.file, run_dir)
        if self.file.tell() and not (run_dir / "metrics.jsonl").read_bytes().endswith(b"\n"):
            self.file.write("\n")  # the last run was cut off within a line
        self.wandb = _start_wandb(config, run_dir)
        self.line = _ProgressLine()
        self.wandb_step = 0
        self.seconds_a_step = 0.0

    def step(self, values: dict) -> None:
        """One logged step: keys as in README's table of metrics.jsonl."""
        self._write(values)
        new = values["step_time_s"]
        self.seconds_a_step = 0.8 * self.seconds_a_step + 0.2 * new if self.seconds_a_step else new
        left = (self.steps - values["step"]) * self.seconds_a_step
        self.line.show(
            f"step {values['step']}/{self.steps}  loss {values['loss']:.4f}  "
            f"{values['tokens_per_s']:,.0f} tokens/s  {_duration(left)} left{_where_time_went(values)}"
        )

    def event(self, event: str, words: str, **values) -> None:
        """Something that happened: a line with the key ``event``, and ``words`` on the console."""
        self._write({"event": event, **values})
        self.line.print(words)

    def _write(self, values: dict) -> None:
        self.file.write(json.dumps(_without_nan(values), allow_nan=False) + "\n")
        self.file.flush()
        if self.wandb:
            prefix = f"{values['event']}/" if "event" in values else ""
            numbers = {prefix + k: v for k, v in _flat(values).items() if isinstance(v, int | float)}
            # A save is told when it has ended, some steps later; wandb's steps only go up.
            self.wandb_step = max(self.wandb_step, values.get("step", 0))
            self.wandb.log(numbers, step=self.wandb_step)

    def close(self) -> None:
        self.line.close()
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def _lock(file: TextIO, run_dir: Path) -> None:
    """Keeps a run's directory to one job, as long as ``file`` is open. ConfigError if another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run.dir={run_dir}: another job writes to it; wait until it has ended, or choose another run.name"
        ) from None
    except OSError:
        pass  # a file system without locks


class NullLogger:
    """The report of the other ranks."""

    def step(self, values: dict) -> None: ...

    def event(self, event: str, words: str, **values) -> None: ...

    def close(self) -> None: ...


class _ProgressLine:
    """A line that is rewritten in place on a terminal; in a log file, a new line every few seconds."""

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


def _start_wandb(config: Config, run_dir: Path):
    wandb_config = config.logging.wandb
    if wandb_config.mode == "disabled":
        return None
    import wandb

    # The same id after a restart, so that the curves go on.
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    return wandb.init(
        project=wandb_config.project,
        name=config.run.name,
        id=id_file.read_text(),
        resume="allow",
        mode=wandb_config.mode,
        dir=str(run_dir),
        config=asdict(config),
    )


def _where_time_went(values: dict) -> str:
    """Of a step on more than one device: seconds of computation, of communication beside it, and of waiting for it."""
    exposed = {axis: used["exposed_s"] for axis, used in values["comm"].items()}
    if not exposed:
        return ""
    waited = sum(exposed.values())
    hidden = sum(used["hidden_s"] for used in values["comm"].values())
    by_axis = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in exposed.items())
    computing = values["step_time_s"] - waited
    return f"  computing {computing:.2f} s, hidden {hidden:.2f} s, exposed {waited:.2f} s ({by_axis})"


def _without_nan(values):
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(values, dict):
        return {key: _without_nan(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _readable(path: Path) -> list[dict]:
    """The whole lines of metrics.jsonl."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # a line that a crash cut off
            lines.append(json.loads(line))
    return lines


def plot_losses(run_dir: Path) -> Path:
    """Draws the losses of ``metrics.jsonl`` over the tokens seen, training and validation, as ``loss.png``."""
    from matplotlib.figure import Figure

    lines = _readable(run_dir / "metrics.jsonl")
    # By step: what a restarted run did again replaces what it did first.
    training = {line["step"]: line for line in lines if "event" not in line and line["loss"] is not None}
    validation = {line["step"]: line for line in lines if line.get("event") == "validation"}
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points, style in (("training", training, "-"), ("validation", validation, "o--")):
        steps = sorted(points)
        axes.plot([points[s]["tokens"] for s in steps], [points[s]["loss"] for s in steps], style, label=name)
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1e6:g} M" if tokens else "0")
    axes.set_title(run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / "loss.png"
    figure.savefig(path, dpi=120)
    return path
