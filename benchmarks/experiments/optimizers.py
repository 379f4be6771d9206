"""Steps and seconds that Muon takes to AdamW's final validation loss.

    python -m benchmarks optimizers [model=gpt_tiny] [overrides='train.batch_size=8 …'] [steps=600] [seeds=3] \
[adamw=0.004] [muon=0.016] [out=benchmarks/results/optimizers]

For each seed, train.py runs with AdamW and then with Muon, on this machine alone. ``adamw`` and ``muon`` are the tuned
learning rates, and ``overrides`` are additional settings of all runs. A run validates every ``every`` steps. Validation
and saving do not count as seconds.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.training import train, validations

OPTIMIZERS = "adamw", "muon"
PACKAGES = ("torch",)


@dataclass
class Settings:
    model: str = "gpt_tiny"
    overrides: str = ""
    steps: int = 600
    seeds: int = 3
    every: int = 20
    adamw: float = 0.004
    muon: float = 0.016
    out: str | None = None


def run(settings: Settings) -> Iterator[dict]:
    curves: dict[str, list[list[dict]]] = {name: [] for name in OPTIMIZERS}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        for seed in range(settings.seeds):
            for name in OPTIMIZERS:
                curves[name].append(losses(settings, name, seed, Path(directory)))
            yield summary(curves)


def losses(settings: Settings, optimizer: str, seed: int, directory: Path) -> list[dict]:
    """Return the points of a run's curve."""
    overrides = [
        f"model={settings.model}", f"optim.algorithm={optimizer}", f"optim.lr={getattr(settings, optimizer)}",
        f"train.steps={settings.steps}", f"train.seed={seed}", f"train.validate_every={settings.every}",
        *settings.overrides.split(),
    ]  # fmt: skip
    points = validations(train(directory / f"{optimizer}-{seed}", overrides))
    last = points[-1]
    print(f"{optimizer:6} seed {seed}: validation loss {last['loss']:.4f} after {last['seconds']:.0f} s", flush=True)
    return points


def summary(curves: dict[str, list[list[dict]]]) -> dict:
    """Return the curves, and for each seed the shares of AdamW's steps and seconds after which Muon has its loss."""
    shares: dict[str, list[float]] = {"steps": [], "seconds": []}
    for adamw, muon in zip(*(curves[name] for name in OPTIMIZERS), strict=True):
        reached = crossing(muon, adamw[-1]["loss"])
        if reached is not None:
            shares["steps"].append(reached["step"] / adamw[-1]["step"])
            shares["seconds"].append(reached["seconds"] / adamw[-1]["seconds"])
    medians = {unit: statistics.median(values) if values else None for unit, values in shares.items()}
    final = {name: [curve[-1]["loss"] for curve in found] for name, found in curves.items()}
    print("shares of AdamW's run:", ", ".join(f"{unit} {value}" for unit, value in medians.items()), flush=True)
    return {"medians": medians, "shares": shares, "final": final, "curves": curves}


def crossing(curve: list[dict], loss: float) -> dict | None:
    """Return step and seconds at which a curve reaches a loss, between two validations; None if it does not."""
    for before, after in pairwise(curve):
        if after["loss"] <= loss:
            part = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return {key: before[key] + part * (after[key] - before[key]) for key in ("step", "seconds")}
    return None


def plot(settings: Settings, results: dict) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    colors = {"adamw": "tab:gray", "muon": "tab:blue"}
    for axes, unit in zip(figure.subplots(1, 2, sharey=True), ("step", "seconds"), strict=True):
        for name, curves in results["curves"].items():
            for curve in curves:
                values = [point[unit] for point in curve], [point["loss"] for point in curve]
                axes.plot(*values, color=colors[name], linewidth=1, label=name if curve is curves[0] else None)
        axes.set_xlabel({"step": "steps", "seconds": "seconds of training"}[unit])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.axes[0].set_ylabel("validation loss in nats")
    highest = max(curve[1]["loss"] for curves in results["curves"].values() for curve in curves)
    figure.axes[0].set_ylim(top=highest)
    figure.suptitle(f"{settings.model}: a line for each seed, rates {settings.adamw} and {settings.muon}")
    return figure
