"""A training step of a small GPT-2 on one device: gpt4d, plain torch.nn and transformers, eager and compiled.

    python -m benchmarks one_device [cases=8192:fp32,8192:bf16,50304:fp32] [repeats=9]
        [out=benchmarks/results/one_device]
    python -m benchmarks one_device grid=2x1x1x2 cases=8192:fp32 out=benchmarks/results/four_ranks
    python -m benchmarks one_device device=cuda layers=12 hidden=768 heads=12 length=1024 batch=32 cases=50304:bf16

All have the same weights, tokens, precision and AdamW, and alternate. A case is a vocabulary and a precision. On a
``grid`` of several ranks, gx·1·1·gdata, gpt4d is compared with megatron-core. Prints tokens per second and per second
of processor time, and the peak of allocated memory. On a CPU each rank has one thread.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.adapters import gpt4d, megatron
from benchmarks.adapters import torch as torch_adapter
from benchmarks.cluster import LocalHost
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.laboratory.memory import allocated_peak
from benchmarks.settings import arguments_of, parse_sizes
from benchmarks.worker import Contender, Step, share_process_groups
from benchmarks.workloads import OneDeviceConfig
from gpt4d.config import ConfigError

PACKAGES = ("torch", "transformers", "megatron-core")
_ONE_RANK = {"ours": "torch", "torch": "torch", "transformers": "transformers"}  # trainers and their packages
_SEVERAL_RANKS = {"ours": "torch", "megatron-core": "megatron"}


@dataclass
class Settings(OneDeviceConfig):
    cases: str = "8192:fp32,8192:bf16,50304:fp32"
    repeats: int = 9
    warm_up: int = 1
    out: str = "benchmarks/results/one_device"


def parse_cases(text: str) -> list[tuple[int, str]]:
    """Return the vocabulary and the precision of each case. Raises ConfigError for another text."""
    try:
        cases = [(int(size), precision) for size, precision in (case.split(":") for case in text.split(","))]
    except ValueError:
        cases = []
    if not cases or not all(size > 0 and precision in ("fp32", "bf16") for size, precision in cases):
        raise ConfigError(f"cases={text}: not a list of vocabulary:precision; use 8192:fp32,8192:bf16, for example")
    return cases


def run_case(config: Settings, vocabulary: int, precision: str) -> dict:
    """Measure all trainers and return rows, and the ratio of gpt4d to the best other trainer."""
    config = replace(config, vocabulary=vocabulary, precision=precision)
    ranks = parse_sizes(config.grid).devices
    specs = [
        WorkerSpec(name, __name__, "trainers", needs, arguments_of(config, OneDeviceConfig, trainer=name))
        for name, needs in (_ONE_RANK if ranks == 1 else _SEVERAL_RANKS).items()
    ]
    rows = interleave(LocalHost(ranks), specs, config.repeats, config.warm_up)
    tokens = config.batch * config.length
    for row in rows:
        row |= {"tokens_per_s": tokens / row["median_s"], "tokens_per_cpu_s": tokens / row["cpu_s"]}
        print(
            f"{report.line(row)}  {row['tokens_per_s']:,.0f} tokens/s, {row['tokens_per_cpu_s']:,.0f} per CPU second, "
            f"peak {row['peak_mib']:,.0f} MiB",
            flush=True,
        )
    comparison = compare(rows, "tokens_per_cpu_s" if config.device == "cpu" else "tokens_per_s")
    print(comparison, flush=True)
    return {"vocabulary": vocabulary, "precision": precision, "rows": rows, "comparison": comparison}


def compare(rows: list[dict], speed: str) -> dict[str, float]:
    """Return gpt4d's best speed relative to the best other speed, and its peak of memory relative to eager torch.nn."""
    best = max((row for row in rows if row["family"] == "ours"), key=lambda row: row[speed])
    others = [row[speed] for row in rows if row["family"] != "ours"]
    comparison = {f"{speed}_over_best": best[speed] / max(others)} if others else {}
    for row in rows:
        if (row["family"], row["name"]) == ("torch", "eager"):
            comparison["peak_over_torch_nn"] = best["peak_mib"] / row["peak_mib"]
    return comparison


def plot(settings: Settings, results: dict) -> Any:
    """Return a figure with two panels per case, speed and memory."""
    from matplotlib.figure import Figure

    cases = results["cases"]
    figure = Figure(figsize=(4.2 * len(cases), 5.4), layout="constrained")
    panels = figure.subplots(2, len(cases), squeeze=False)
    for (above, below), case in zip(panels.T, cases, strict=True):
        rows = case["rows"]
        labels = [f"{row['family']}\n{row['name']}" for row in rows]
        colors = ["#7a9cc6" if row["family"] == "ours" else "#b7b7b7" for row in rows]
        above.bar(labels, [row["tokens_per_s"] for row in rows], color=colors)
        above.set_ylabel("tokens per second")
        above.set_title(f"vocabulary {case['vocabulary']:,}, {case['precision']}", fontsize=10)
        below.bar(labels, [row["peak_mib"] for row in rows], color=colors)
        below.set_ylabel("peak of the allocator, MiB")
        for panel in (above, below):
            panel.tick_params(axis="x", labelsize=5.5)
    return figure


def run(settings: Settings) -> Iterator[dict]:
    results: list[dict] = []
    for vocabulary, precision in parse_cases(settings.cases):
        print(f"--- vocabulary {vocabulary:,}, {precision}", flush=True)
        results.append(run_case(settings, vocabulary, precision))
        yield {"config": asdict(settings), "cases": results}


Training = gpt4d.Training | torch_adapter.PlainTraining | megatron.MegatronTraining


@dataclass
class TrainerSettings(OneDeviceConfig):
    trainer: str = "ours"


def trainings(settings: TrainerSettings) -> Mapping[str, Training]:
    """Return a trainer's contenders."""
    if settings.trainer == "ours":
        return gpt4d.one_device(settings)
    if settings.trainer == "megatron-core":
        return megatron.one_device(settings)
    return torch_adapter.one_device(settings, library=settings.trainer == "transformers")


def repeat_step(training: Training, steps: int, device: torch.device) -> Step:
    """Return a run of ``steps`` steps.

    It answers with the loss, the processor seconds of all ranks per step and the peak of the first rank's memory.
    """
    for _ in range(2):
        training.step()
    standing = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in training.tensors()}.values())
    peak = standing + allocated_peak(training.step, device)

    def run_steps() -> Callable[[], dict]:
        started = time.process_time()
        for _ in range(steps):
            collect_loss = training.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        cpu_s = torch.tensor((time.process_time() - started) / steps)

        def collect_results() -> dict:
            dist.all_reduce(cpu_s)
            return {"loss": collect_loss()["loss"], "cpu_s": cpu_s.item(), "peak_mib": peak / 2**20, "steps": steps}

        return collect_results

    return run_steps


def trainers(settings: TrainerSettings, device: None) -> dict[str, Contender]:
    share_process_groups()
    place = torch.device(settings.device)
    return {
        name: Contender(repeat_step(training, settings.steps, place)) for name, training in trainings(settings).items()
    }
