"""Validation loss of a mixture of experts and of a dense model of equal active parameters, after equal time.

    python -m benchmarks moe_quality [seconds=120] [seeds=3] [rates=0.004,0.008,0.016] \
[out=benchmarks/results/moe_quality]

Trains ``moe_tiny``, and the Llama whose MLPs are as large as the experts that a token uses. Both models train at the
same time on this machine alone, each with one thread. Time is processor time, so other work on the machine hardly
matters. Short runs first measure the processor seconds of a step, which determine how many steps a model has in
``seconds``. Validation does not count as seconds. The learning rate of each model is the one of ``rates`` with the
lowest loss after half of the seconds. ``processor_s`` is the processor time of the entire process.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training import train_together, validations
from gpt4d.config import compose
from gpt4d.data.completion import complete
from gpt4d.model import registry

PACKAGES = ("torch",)
MODELS = {
    "mixture": ["model=moe_tiny", "model.vocab_size=4096"],
    "dense": ["model=llama_tiny", "model.vocab_size=4096", "model.layers=2", "model.inner=352", "model.tied=false"],
}
_ROUNDS, _FEW, _MANY = 2, 10, 60  # repetitions and steps of the runs that measure the time of a step
_COLORS = {"mixture": "tab:blue", "dense": "tab:gray"}


@dataclass
class Settings:
    seconds: float = 120.0
    seeds: int = 3
    rates: str = "0.004,0.008,0.016"
    points: int = 10  # validations of a run
    out: str | None = None


def run(settings: Settings) -> Iterator[dict]:
    models: dict[str, dict] = {name: sizes(name) for name in MODELS}
    runs: dict[str, list[dict]] = {name: [] for name in MODELS}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        for name, seconds in step_times(Path(directory)).items():
            models[name] |= {"step_s": seconds, "steps": round(settings.seconds / seconds)}
        tune(settings, models, Path(directory))
        for seed in range(settings.seeds):
            settings_of = {
                name: of_run(settings, model["steps"], model["rate"], seed) for name, model in models.items()
            }
            for name, found in measured(Path(directory), f"seed-{seed}", settings_of).items():
                runs[name].append(found)
            yield {"models": models, "summary": summary(runs), "runs": runs}


def sizes(name: str) -> dict:
    """Return the settings of a model, and the number of its parameters and of those that a token uses."""
    description = registry.describe(complete(compose(MODELS[name])).model)
    total, active = description.num_parameters, description.active_parameters
    print(f"{name}: {total:,} parameters, {active:,} active", flush=True)
    return {"overrides": MODELS[name], "parameters": total, "active_parameters": active}


def step_times(directory: Path) -> dict[str, float]:
    """Return the processor seconds of a step of each model: the difference of runs with many and with few steps."""
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    _short_runs(directory, "tokenize", _FEW)
    for number in range(_ROUNDS):
        few, many = (_short_runs(directory, f"{steps}-steps-{number}", steps) for steps in (_FEW, _MANY))
        for name, found in seconds.items():
            found.append((many[name]["processor_s"] - few[name]["processor_s"]) / (_MANY - _FEW))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    print(", ".join(f"{name}: {median:.3f} s per step" for name, median in medians.items()), flush=True)
    return medians


def _short_runs(directory: Path, name: str, steps: int) -> dict[str, dict]:
    overrides = [f"train.steps={steps}", "optim.warmup_steps=0", "train.validation_batches=1"]
    return measured(directory, name, dict.fromkeys(MODELS, overrides))


def tune(settings: Settings, models: dict[str, dict], directory: Path) -> None:
    """Add to each model its losses after half of the seconds by learning rate, and the rate with the lowest loss."""
    for model in models.values():
        model["tuning"] = {}
    for rate in settings.rates.split(","):
        overrides = {name: of_run(settings, model["steps"] // 2, rate, 0) for name, model in models.items()}
        for name, found in measured(directory, f"rate-{rate}", overrides).items():
            models[name]["tuning"][rate] = found["curve"][-1]["loss"]
    for model in models.values():
        model["rate"] = min(model["tuning"], key=model["tuning"].__getitem__)


def of_run(settings: Settings, steps: int, rate: str, seed: int) -> list[str]:
    """Return the overrides of a run in addition to its model's."""
    return [
        "optim.algorithm=muon",
        f"optim.lr={rate}",
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"train.validate_every={-(-steps // settings.points)}",
        "train.validation_batches=16",
    ]


def measured(directory: Path, name: str, overrides: dict[str, list[str]]) -> dict[str, dict]:
    """Train both models at the same time, and return the curve and the processor seconds of each."""
    runs = {directory / f"{model}-{name}": [*MODELS[model], *words] for model, words in overrides.items()}
    results = {}
    for model, (lines, seconds) in zip(overrides, train_together(runs), strict=True):
        curve = validations(lines)
        last = curve[-1]
        print(
            f"{model:7} {name}: validation loss {last['loss']:.4f} after {last['step']} steps, "
            f"{seconds:.0f} processor seconds in all, {last['seconds']:.0f} s of steps",
            flush=True,
        )
        results[model] = {"processor_s": seconds, "curve": curve}
    return results


def summary(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Return the final losses of each model in the order of the seeds, and medians of the final values."""
    found = {}
    for name, of_model in runs.items():
        last = [run["curve"][-1] for run in of_model]
        medians = {key: statistics.median(point[key] for point in last) for key in last[0]}
        medians["processor_s"] = statistics.median(run["processor_s"] for run in of_model)
        found[name] = {"losses": [point["loss"] for point in last], "medians": medians}
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in medians.items()), flush=True)
    return found


def plot(settings: Settings, results: dict) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = {"loss": "validation loss in nats per token", "bits_per_byte": "validation loss in bits per byte"}
    for axes, (key, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name, runs in results["runs"].items():
            model, color = results["models"][name], _COLORS[name]
            seconds = [point["step"] * model["step_s"] for point in runs[0]["curve"]]
            losses = [[point[key] for point in run["curve"]] for run in runs]
            for of_seed in losses:
                axes.plot(seconds, of_seed, color=color, linewidth=0.7, alpha=0.6)
            medians = [statistics.median(values) for values in zip(*losses, strict=True)]
            axes.plot(seconds, medians, color=color, linewidth=2.5, label=_label(name, model))
        axes.set_xlabel("processor seconds of training")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.suptitle("Mixture of experts and dense model: a thin line for each seed, and the median")
    return figure


def _label(name: str, model: dict) -> str:
    active, total = (model[key] / 1e6 for key in ("active_parameters", "parameters"))
    return f"{name}: {active:.2f} M active of {total:.2f} M\n{model['step_s']:.2f} s per step, rate {model['rate']}"
