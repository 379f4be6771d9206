"""Width transfer: the best learning rate of GPT-2s of several widths, and the coordinate check.

    python -m benchmarks width [widths=64,128,256,512] [base=256] [exponents=-11,-10,-9,-8,-7,-6] [steps=200] \
[seeds=1] [out=benchmarks/results/width]

Trains one run of train.py per width, learning rate 2^exponent and seed, without and with ``optim.width_transfer`` from
the width ``base``. All runs have ``layers`` blocks, heads of 32 features, equal data, and a warm-up of half of their
steps. The coordinate check trains the same models on one batch, and measures how far the residual stream and the logits
move.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpt4d.config import Config, GridSizes, OptimConfig, TrainConfig
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.plan import one_stage
from gpt4d.step import TrainStep, build_stage

PACKAGES = ("torch",)
_HEAD_SIZE = 32
_CHECKED = {"rate": 2**-8, "steps": 10, "batch": 8}  # settings of the coordinate check


@dataclass
class Settings:
    widths: str = "64,128,256,512"
    base: int = 256
    exponents: str = "-11,-10,-9,-8,-7,-6"
    layers: int = 2
    batch: int = 32
    length: int = 64
    steps: int = 200
    seeds: int = 1
    out: str | None = None


def run(settings: Settings) -> Iterator[dict]:
    widths, exponents = (list(map(int, text.split(","))) for text in (settings.widths, settings.exponents))
    results: dict[str, Any] = {"coordinates": coordinates(settings, widths), "runs": []}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        for width in widths:
            for transfer in (False, True):
                if width == settings.base and transfer:  # m = 1 changes nothing
                    results["runs"].append(results["runs"][-1] | {"transfer": True})
                    continue
                losses = {}
                for exponent in exponents:
                    seeds = range(settings.seeds)
                    found = [train(settings, width, transfer, exponent, seed, Path(directory)) for seed in seeds]
                    losses[exponent] = statistics.fmean(found)
                best = min(losses, key=losses.__getitem__)
                print(f"width {width}, transfer {transfer}: best rate 2^{best}, loss {losses[best]:.4f}", flush=True)
                results["runs"].append({"width": width, "transfer": transfer, "losses": losses, "best": best})
                yield results


def train(settings: Settings, width: int, transfer: bool, exponent: int, seed: int, directory: Path) -> float:
    """Return the validation loss of a run; infinity if it diverges."""
    run_dir = directory / f"{width}-{transfer}-{exponent}-{seed}"
    overrides = [
        "model=gpt_tiny", "model.vocab_size=1024", "data.tokenizer_vocab=1024",
        f"model.hidden={width}", f"model.heads={width // _HEAD_SIZE}",
        f"model.layers={settings.layers}", "optim.algorithm=adamw",
        f"optim.lr={2.0**exponent}", f"optim.warmup_steps={settings.steps // 2}",
        f"train.batch_size={settings.batch}", f"train.seq_len={settings.length}", f"train.steps={settings.steps}",
        f"train.seed={seed}", "train.validation_batches=16", f"train.validate_every={settings.steps}",
        "logging.sample_tokens=0", "checkpoint.every=0", f"run.dir={run_dir}", f"data.cache_dir={directory / 'cache'}",
        *(["optim.width_transfer=true", f"model.base_hidden={settings.base}"] if transfer else []),
    ]  # fmt: skip
    process = subprocess.run([sys.executable, "train.py", *overrides], stdout=subprocess.DEVNULL)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if line.get("event") == "validation"]
    return losses[-1] if process.returncode == 0 and losses and math.isfinite(losses[-1]) else math.inf


def coordinates(settings: Settings, widths: list[int]) -> list[dict]:
    """Return the root mean square of the changes of residual stream and logits after each step of AdamW."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return [
            {
                "width": width,
                "transfer": transfer,
                **_changes(settings, width, width / settings.base if transfer else 1.0),
            }
            for width in widths
            for transfer in (False, True)
        ]
    finally:
        dist.destroy_process_group()


def _changes(settings: Settings, width: int, relative_width: float) -> dict[str, list[float]]:
    model = GPT2Config(
        layers=settings.layers, hidden=width, heads=width // _HEAD_SIZE, vocab_size=1024, width=relative_width
    )
    batch, length = int(_CHECKED["batch"]), settings.length
    config = Config(model=model, train=TrainConfig(seq_len=length, batch_size=batch))
    stage = build_stage(one_stage(config), Grid(GridSizes(1, 1, 1, 1)), torch.device("cpu"))
    train_step = TrainStep(
        stage, whole_model(lambda module, batch: module.loss_sum(*batch)), OptimConfig(lr=_CHECKED["rate"])
    )
    streams: list[torch.Tensor] = []
    stage.module.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].detach().clone()))
    ids = torch.randint(0, model.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    samples = torch.arange(batch)
    found: dict[str, list[torch.Tensor]] = {"stream": [], "logits": []}
    for _ in range(int(_CHECKED["steps"]) + 1):
        with torch.no_grad():
            found["logits"].append(stage.module(ids[:, :-1], samples)[..., : model.vocab_size].clone())
        found["stream"].append(streams[-1])
        train_step([(ids[:, :-1], ids[:, 1:], samples)], 1, batch * length, _CHECKED["rate"])
    return {
        name: [(tensor - tensors[0]).square().mean().sqrt().item() for tensor in tensors[1:]]
        for name, tensors in found.items()
    }


def plot(settings: Settings, results: dict) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    grid = figure.subplots(2, 2)
    titles = {False: "learning rate without transfer", True: "optim.width_transfer=true"}
    for axes, transfer in zip(grid[0], (False, True), strict=True):
        for entry in results["runs"]:
            if entry["transfer"] == transfer:
                points = [(int(exponent), loss) for exponent, loss in entry["losses"].items() if math.isfinite(loss)]
                (line,) = axes.plot(*zip(*points, strict=True), marker=".", label=f"hidden {entry['width']}")
                best = int(entry["best"])
                axes.plot(best, dict(points)[best], marker="o", markersize=9, color=line.get_color())
        axes.set_title(titles[transfer])
        axes.set_xlabel("log2 of optim.lr")
        axes.grid(alpha=0.3)
        axes.legend()
    grid[0][0].set_ylabel("validation loss in nats")
    grid[0][1].sharey(grid[0][0])
    for axes, transfer in zip(grid[1], (False, True), strict=True):
        for name, style in (("stream", "--"), ("logits", "-")):
            for step, color in ((1, "tab:blue"), (3, "tab:orange"), (10, "tab:red")):
                entries = [entry for entry in results["coordinates"] if entry["transfer"] == transfer]
                values = [entry["width"] for entry in entries], [entry[name][step - 1] for entry in entries]
                label = f"{name}, {step} step{'s' * (step > 1)}"
                axes.loglog(*values, style, base=2, marker=".", color=color, label=label)
        axes.set_title(f"coordinate check, {titles[transfer]}")
        axes.set_xlabel("hidden features")
        axes.grid(alpha=0.3)
    grid[1][0].set_ylabel("root mean square of the change")
    grid[1][0].legend()
    grid[1][1].sharey(grid[1][0])
    return figure
