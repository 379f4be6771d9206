"""The planner's predictions for the 4D paper's scaling experiments, next to the published figures.

    python -m benchmarks scaling [out=benchmarks/results/scaling]

- weak scaling of GPTs (Table III): 5 to 80 billion parameters on 64 to 1024 devices of Perlmutter and Frontier
- strong scaling (Fig. 9 and 10): the GPT of 80 billion parameters on 64 to 1024 devices, and the parts of a step
- weak scaling of U-Nets (Fig. 12): 250 million to 4 billion parameters, against ZeRO-3

GPTs train on 4 million tokens per step with activation checkpointing, U-Nets on 2048 images. Trains nothing and takes
a minute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import Config, GridSizes, compose
from gpt4d.data.completion import complete
from gpt4d.model import registry
from gpt4d.planner.options import levels
from gpt4d.planner.search import rank
from gpt4d.planner.stages import PlanEstimate

PACKAGES = ()
_MACHINES = ("perlmutter", "frontier")
_DEVICES = (64, 128, 256, 512, 1024)
_GPTS = ("gpt_5b", "gpt_10b", "gpt_20b", "gpt_40b", "gpt_80b")
_UNETS = ("unet_250m", "unet_500m", "unet_1b", "unet_2b", "unet_4b")
# Hardware FLOP/s utilization (with recomputation) on Perlmutter, Table III.
_PUBLISHED = {"AxoNN": (0.67, 0.63, 0.67, 0.64, 0.57), "Megatron-LM": (0.37, 0.42, 0.42, 0.44, 0.42)}
_BATCH = 2048  # sequences of 2048 tokens, or images


@dataclass
class Settings:
    out: str = "benchmarks/results/scaling"


def configuration(model: str, cluster: str) -> Config:
    """Return the configuration of an experiment, without a grid."""
    checkpointing = "full" if model.startswith("gpt") else "none"
    overrides = [f"model={model}", f"cluster={cluster}", f"train.batch_size={_BATCH}", "parallel.pipeline.stages=1"]
    return complete(compose([*overrides, f"train.activation_checkpointing={checkpointing}"]))


def best_plan(config: Config, devices: int) -> PlanEstimate:
    ranking = rank(config, devices, top=1)
    ranking.check(config, devices)
    return ranking.plans[0]


def zero_plan(config: Config, devices: int) -> PlanEstimate:
    """Return ZeRO-3 in our terms: z alone, and data with sharded states where the model limits z."""
    limits = [rule.extent for rule in registry.describe(config.model).rules if "z" in rule.axes]
    z = max(size for size in _divisors(devices) if all(limit % size == 0 for limit in limits))
    sharded = replace(config, optim=replace(config.optim, shard_states=z < devices))
    return levels(sharded)[0].step((GridSizes(1, 1, z, devices // z),), 1)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def row(model: str, devices: int, cluster: str, plan: PlanEstimate) -> dict:
    return {
        "model": model,
        "devices": devices,
        "cluster": cluster,
        "grid": plan.grid,
        "micro_batch_size": plan.micro_batch,
        "step_time_s": plan.step_time_s,
        "compute_s": plan.slowest.compute_s,
        "communication_s": sum(used["time_s"] for used in plan.slowest.comm.values()),
        "exposed_s": {axis: used["exposed_s"] for axis, used in plan.slowest.comm.items()},
        "memory_gib": plan.memory_gib,
        "hfu": plan.hfu,
        "mfu": plan.mfu,
    }


def best_rows(models: Sequence[str], cluster: str) -> list[dict]:
    pairs = zip(models, _DEVICES, strict=True)
    return [row(model, n, cluster, best_plan(configuration(model, cluster), n)) for model, n in pairs]


def predictions() -> dict[str, list[dict]]:
    """Return the rows of each experiment."""
    weak = [each for cluster in _MACHINES for each in best_rows(_GPTS, cluster)]
    strong = [each for cluster in _MACHINES for each in best_rows(["gpt_80b"] * len(_DEVICES), cluster)]
    unets = [each for cluster in _MACHINES for each in best_rows(_UNETS, cluster)]
    zero = [
        row(model, n, cluster, zero_plan(configuration(model, cluster), n))
        for cluster in _MACHINES
        for model, n in zip(_UNETS, _DEVICES, strict=True)
    ]
    return {"gpt_weak": weak, "gpt_strong": strong, "unet_weak": unets, "unet_zero": zero}


def describe(plan: dict) -> str:
    waits = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in plan["exposed_s"].items() if seconds >= 0.005)
    share = "" if plan["hfu"] is None else f", {plan['hfu']:.0%} of the peak"
    return (
        f"{plan['model']:9} on {plan['devices']:4} of {plan['cluster']:10} {plan['grid']:>20}, microbatch "
        f"{plan['micro_batch_size']:2}: {plan['step_time_s']:7.3f} s per step, waits {waits or 'none'} s, "
        f"{plan['memory_gib']:.1f} GiB{share}"
    )


def plot(settings: Settings, rows: dict) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), layout="constrained")
    weak, strong, unets = figure.subplots(1, 3)

    def on(experiment: str, cluster: str, key: str) -> list[float]:
        return [each[key] for each in rows[experiment] if each["cluster"] == cluster]

    bars = {
        "gpt4d on Perlmutter, predicted": on("gpt_weak", "perlmutter", "hfu"),
        **{f"{name} on Perlmutter, published": values for name, values in _PUBLISHED.items()},
        "gpt4d on Frontier, predicted": on("gpt_weak", "frontier", "hfu"),
    }
    for index, (name, values) in enumerate(bars.items()):
        places = [place + 0.2 * (index - 1.5) for place in range(len(values))]
        weak.bar(places, [100 * value for value in values], width=0.18, label=name)
    weak.set_xticks(range(len(_GPTS)), [f"{model}\n{n}" for model, n in zip(_GPTS, _DEVICES, strict=True)])
    weak.set_ylabel("% of the peak FLOP/s, including recomputation")
    weak.set_ylim(0, 125)
    weak.set_title("Weak scaling of GPTs (Table III)")
    for cluster, color in zip(_MACHINES, ("C0", "C1"), strict=True):
        seconds = on("gpt_strong", cluster, "step_time_s")
        strong.loglog(_DEVICES, seconds, "o-", color=color, label=f"{cluster}, predicted")
        strong.loglog(_DEVICES, [seconds[0] * _DEVICES[0] / n for n in _DEVICES], ":", color=color)
        unets.loglog(
            _DEVICES, on("unet_weak", cluster, "step_time_s"), "o-", color=color, label=f"{cluster}, best grid"
        )
        zero = on("unet_zero", cluster, "step_time_s")
        unets.loglog(_DEVICES, zero, "s--", color=color, label=f"{cluster}, ZeRO-3")
    strong.set_title("Strong scaling of gpt_80b (Fig. 9); dotted: ideal")
    unets.set_title("Weak scaling of U-Nets (Fig. 12), predicted")
    for panel in (strong, unets):
        panel.set_xticks(_DEVICES, map(str, _DEVICES), minor=False)
        panel.set_xlabel("devices")
        panel.set_ylabel("seconds per step")
    for panel in (weak, strong, unets):
        panel.legend(fontsize=8)
    return figure


def run(settings: Settings) -> Iterator[dict]:
    rows = predictions()
    for experiment, plans in rows.items():
        print(f"--- {experiment}")
        print("\n".join(map(describe, plans)), flush=True)
    yield {"batch": _BATCH, **rows}
