"""The planner's predictions for the 4D paper's weak scaling (Table III), and the published figures.

    python -m benchmarks.scaling [out=docs/scaling]

Plans GPTs of 5 to 80 billion parameters on 64 to 1024 devices of Perlmutter and Frontier, with 4 million tokens per
step and activation checkpointing. Trains nothing and takes seconds. Writes ``out``.json and draws ``out``.png.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from gpt4d.config import compose, from_arguments
from gpt4d.planner.estimate import Plan
from gpt4d.planner.search import rank
from gpt4d.runtime.errors import one_line_errors

# GPUs, model, and the hardware FLOP/s utilization (with recomputation) of AxoNN and of Megatron-LM on Perlmutter.
_PUBLISHED = (
    (64, "gpt_5b", 0.67, 0.37),
    (128, "gpt_10b", 0.63, 0.42),
    (256, "gpt_20b", 0.67, 0.42),
    (512, "gpt_40b", 0.64, 0.44),
    (1024, "gpt_80b", 0.57, 0.42),
)
_SEQUENCES = 2048  # of 2048 tokens


@dataclass
class ScalingBenchmark:
    out: str = "docs/scaling"


def best_plan(model: str, devices: int, cluster: str) -> Plan:
    overrides = [f"model={model}", f"cluster={cluster}", f"train.batch_size={_SEQUENCES}"]
    config = compose([*overrides, "train.activation_checkpointing=full", "parallel.pipeline.stages=1"])
    ranking = rank(config, devices, top=1)
    ranking.check(config, devices)
    return ranking.plans[0]


def row(model: str, devices: int, cluster: str) -> dict:
    plan = best_plan(model, devices, cluster)
    return {
        "model": model,
        "devices": devices,
        "cluster": cluster,
        "grid": str(plan.sizes),
        "micro_batch_size": plan.micro_batch,
        "step_time_s": plan.step_time_s,
        "exposed_s": {axis: used["exposed_s"] for axis, used in plan.comm.items()},
        "memory_gib": plan.memory_gib,
        "hfu": plan.hfu,
        "mfu": plan.mfu,
    }


def plot(rows: list[dict], out: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.add_subplot()
    bars = {
        "gpt4d on Perlmutter, predicted": [r["hfu"] for r in rows if r["cluster"] == "perlmutter"],
        "AxoNN on Perlmutter, published": [published[2] for published in _PUBLISHED],
        "Megatron-LM on Perlmutter, published": [published[3] for published in _PUBLISHED],
        "gpt4d on Frontier, predicted": [r["hfu"] for r in rows if r["cluster"] == "frontier"],
    }
    for index, (name, values) in enumerate(bars.items()):
        places = [place + 0.2 * (index - 1.5) for place in range(len(values))]
        panel.bar(places, [100 * value for value in values], width=0.18, label=name)
    panel.set_xticks(range(len(_PUBLISHED)), [f"{model}\n{devices}" for devices, model, *_ in _PUBLISHED])
    panel.set_ylabel("% of the peak FLOP/s, including recomputation")
    panel.set_ylim(0, 100)
    panel.legend(fontsize=8)
    figure.savefig(out.with_suffix(".png"), dpi=120)


def main(arguments: list[str]) -> None:
    out = Path(from_arguments(ScalingBenchmark, arguments).out)
    rows = [row(model, n, cluster) for cluster in ("perlmutter", "frontier") for n, model, *_ in _PUBLISHED]
    for plan, published in zip(rows, _PUBLISHED * 2, strict=True):
        published_share = f", published {published[2]:.0%}" if plan["cluster"] == "perlmutter" else ""
        waits = ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in plan["exposed_s"].items() if seconds >= 0.005)
        print(
            f"{plan['model']:8} on {plan['devices']:4} of {plan['cluster']:10} {plan['grid']:>12}, "
            f"microbatch {plan['micro_batch_size']:2}: {plan['step_time_s']:6.2f} s per step, "
            f"waits {waits or 'none'} s, {plan['memory_gib']:.1f} GiB, {plan['hfu']:.0%} of the peak{published_share}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {"command": "python -m benchmarks.scaling", "sequences": _SEQUENCES, "rows": rows}
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    plot(rows, out)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
