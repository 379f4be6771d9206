"""Losses of the same run on several grids.

    python -m benchmarks grids [grids=1x1x1x1,2x2x2x1,1x2x1x2,2x1x2x2] [model=gpt_tiny] [overrides='…'] [steps=100]
        [out=benchmarks/results/grids]

Trains ``train.py`` once on each grid, gx × gy × gz × gdata, under torchrun in a temporary directory, and compares the
losses with the losses of the first grid. ``ddp4`` in place of a grid is the same run in torch's DistributedDataParallel
on four ranks, with the model of transformers or diffusers (``benchmarks.adapters.ddp_run``). ``overrides`` are
additional settings of all runs. It takes a few minutes on two cores.
"""

import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt4d.config import ConfigError

_DDP = "ddp"
_REPOSITORY = Path(__file__).resolve().parents[2]


PACKAGES = ("torch",)


@dataclass
class Settings:
    grids: str = "1x1x1x1,2x2x2x1,1x2x1x2,2x1x2x2"  # the first is the reference
    steps: int = 100
    model: str = "gpt_tiny"
    overrides: str = ""
    lr: float = 1e-3  # At gpt_tiny's best 4e-3 training is at the edge of stability, which amplifies rounding errors.
    out: str = "benchmarks/results/grids"


def train(grid: str, config: Settings, directory: Path) -> list[float]:
    """Return the loss of each step on ``grid``, such as 2x2x2x1 or ddp4. Raises ConfigError if the run fails."""
    in_torch, sizes = grid.startswith(_DDP), () if grid.startswith(_DDP) else map(int, grid.split("x"))
    overrides = [f"parallel.g{axis}={size}" for axis, size in zip(("x", "y", "z", "data"), sizes, strict=not in_torch)]
    overrides += [f"model={config.model}", f"train.steps={config.steps}", "train.precision=fp32", "logging.every=1"]
    overrides += ["optim.algorithm=adamw", f"optim.lr={config.lr}", "optim.min_lr_ratio=0.1"]
    overrides += ["train.validation_batches=0", "logging.sample_tokens=0", "logging.sample_images=0"]
    overrides += ["checkpoint.resume=never"]
    overrides += [*config.overrides.split(), f"run.dir={directory / grid}", f"data.cache_dir={directory / 'cache'}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    losses = directory / f"{grid}.json"
    program = ["-m", "benchmarks.adapters.ddp_run", f"out={losses}"] if in_torch else ["train.py"]
    command = [*launcher, "--nproc-per-node", str(_ranks(grid)), *program, *overrides]
    job = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True)
    if job.returncode:
        raise ConfigError(f"grids={grid}: the run failed: {job.stderr.strip()[-2000:]}")
    if in_torch:
        return json.loads(losses.read_text())
    lines = map(json.loads, (directory / grid / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "event" not in line]


def differences(losses: list[float], reference: list[float]) -> list[float]:
    """Return the relative difference of each loss to the reference's."""
    return [abs(loss - other) / other for loss, other in zip(losses, reference, strict=True)]


def plot(settings: Settings, results: dict) -> Any:
    """Return the loss curves (left) and their relative differences to the first grid's on a log axis (right)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    losses = {row["grid"]: row["losses"] for row in results["rows"]}
    reference, *others = losses
    steps = range(1, len(losses[reference]) + 1)
    for index, (grid, curve) in enumerate(losses.items()):
        width = 2.2 * (len(losses) - index)  # Thick lines below, thin ones above, so that all of them show.
        left.plot(steps, curve, color=f"C{index}", linewidth=width, label=_name(grid))
    right.axhline(2**-23, color="gray", linestyle="--", linewidth=1, label="spacing of fp32 numbers")
    markers = itertools.cycle("sx+o.v")
    for index, grid in enumerate(others, 1):
        values = [value or math.nan for value in differences(losses[grid], losses[reference])]  # No log of 0.
        right.plot(steps, values, next(markers), color=f"C{index}", markersize=4, label=grid)
    left.set(xlabel="step", ylabel="loss", title=f"Loss of {settings.model}")
    right.set(
        xlabel="step", yscale="log", ylim=(1e-9, 1e-4), title=f"Relative difference to {reference}, where not equal"
    )
    left.legend(title="gx × gy × gz × gdata")
    right.legend()
    right.grid(alpha=0.3)
    return figure


def _ranks(grid: str) -> int:
    return int(grid.removeprefix(_DDP)) if grid.startswith(_DDP) else math.prod(map(int, grid.split("x")))


def _name(grid: str) -> str:
    ranks = _ranks(grid)
    return f"{'torch DDP' if grid.startswith(_DDP) else grid}: {ranks} device{'s' * (ranks > 1)}"


def run(settings: Settings) -> Iterator[dict]:
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for grid in settings.grids.split(","):
            losses[grid] = train(grid, settings, Path(directory))
            largest = max(differences(losses[grid], next(iter(losses.values()))))
            print(
                f"{_name(grid)}: last loss {losses[grid][-1]:.6f}, largest relative difference {largest:.1e}",
                flush=True,
            )
    rows = [{"grid": grid, "losses": values} for grid, values in losses.items()]
    yield {"model": settings.model, "steps": settings.steps, "lr": settings.lr, "rows": rows}
