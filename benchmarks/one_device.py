"""A training step of a small GPT-2 on one device: ours, plain torch.nn and transformers, eager and compiled.

    python -m benchmarks.one_device [cases=8192:fp32,8192:bf16,50304:fp32] [repeats=9]
        [out=benchmarks/results/one_device]
    python -m benchmarks.one_device grid=2x1x1x2 cases=8192:fp32 out=benchmarks/results/four_ranks
    python -m benchmarks.one_device device=cuda layers=12 hidden=768 heads=12 length=1024 batch=32 cases=50304:bf16

All have the same weights, tokens, precision and AdamW, and take turns. A case is a vocabulary and a precision. On a
``grid`` of several ranks, gx·1·1·gdata, ours is compared with megatron-core. Prints tokens per second and per second of
processor time, and the most that the allocator has given out. On a CPU each rank has one thread. Writes ``out``.json
and ``out``.png.
"""

import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from benchmarks import report
from benchmarks.cluster import LocalHost
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.settings import parse_sizes
from benchmarks.workers.one_device import OneDeviceConfig
from gpt4d.config import ConfigError, from_arguments
from gpt4d.runtime.errors import one_line_errors

_ONE_RANK = {"ours": "torch", "torch": "torch", "transformers": "transformers"}  # trainers, and what they need
_SEVERAL_RANKS = {"ours": "torch", "megatron-core": "megatron"}


@dataclass
class OneDeviceBenchmark(OneDeviceConfig):
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


def run_case(config: OneDeviceBenchmark, vocabulary: int, precision: str) -> dict:
    """Measure all trainers and return rows, and how ours compares with the best of the others."""
    config = replace(config, vocabulary=vocabulary, precision=precision)
    arguments = tuple(f"{field.name}={getattr(config, field.name)}" for field in fields(OneDeviceConfig))
    ranks = parse_sizes(config.grid).devices
    specs = [
        WorkerSpec(name, "benchmarks.workers.one_device", needs, (*arguments, f"trainer={name}"))
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
    """Return our best speed over that of the others, and our peak of memory over that of torch.nn, run eagerly."""
    best = max((row for row in rows if row["family"] == "ours"), key=lambda row: row[speed])
    others = [row[speed] for row in rows if row["family"] != "ours"]
    comparison = {f"{speed}_over_best": best[speed] / max(others)} if others else {}
    for row in rows:
        if (row["family"], row["name"]) == ("torch", "eager"):
            comparison["peak_over_torch_nn"] = best["peak_mib"] / row["peak_mib"]
    return comparison


def plot(cases: list[dict], out: Path) -> None:
    """Draw ``out``.png: two panels per case, speed and memory."""
    from matplotlib.figure import Figure

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
    figure.savefig(out.with_suffix(".png"), dpi=120)


def main(arguments: list[str]) -> None:
    config = from_arguments(OneDeviceBenchmark, arguments)
    cases, out, results = parse_cases(config.cases), Path(config.out), []
    command = "python -m benchmarks.one_device " + " ".join(arguments)
    for vocabulary, precision in cases:
        print(f"--- vocabulary {vocabulary:,}, {precision}", flush=True)
        results.append(run_case(config, vocabulary, precision))
        machine = report.machine("torch", "transformers", "megatron-core")
        report.write(out, command.strip(), machine, [], config=asdict(config), cases=results)
        plot(results, out)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
