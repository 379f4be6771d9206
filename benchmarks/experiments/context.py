"""Forward and backward of one long sequence that all ranks share, in gpt4d and in plain torch, on an emulated cluster.

    python -m benchmarks context [length=8192] [hidden=512] [exchanges=all_gather,ring] [mbit=200] [repeats=5]
        [continued=true] [out=benchmarks/results/context]

The ranks are virtual devices, first two hosts with four ranks each, and then one host. gpt4d shares the sequence with
``parallel.context``, with x, and with both. Plain torch has ring attention with balanced segments, and Ulysses. All
contenders first compute real values on this machine: their loss and gradients must agree, and their peaks of memory are
measured. Then their steps alternate. ``computation_s`` is the time of one virtual device that is as fast as all ranks
together and does not communicate. ``planned_s`` is the planner's time of a step, from the rates of links and devices.

The peak of memory is also measured for 1, 2, 4 and 8 ranks per sequence, with a model of ``memory_layers`` layers and
``memory_hidden`` features. The imbalance
of attention between ranks is counted and measured, with segments and with contiguous parts of a sequence.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks import report
from benchmarks.adapters.gpt4d_context import SharedSequences
from benchmarks.cluster import LocalHost
from benchmarks.context_steps import ContextConfig, context_grids, worker_arguments
from benchmarks.driver import measure, measure_parts, print_rows
from benchmarks.gradient_steps import compared_gradients
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.settings import parse_grid, plain_rates
from gpt4d.config import Config, ConfigError, ParallelConfig, PipelineConfig, TrainConfig, divisors
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.layers.context_attention import GatheredKeys, KeyBlock, block_attention
from gpt4d.planner.estimate import Estimate

PACKAGES = ("torch",)
_EXCHANGES = ("all_gather", "ring")  # of parallel.context_exchange
_TOLERANCE = 1e-5  # relative difference of gradients, in float32
_COLORS = {"ours": "#7a9cc6", "torch": "#b7b7b7", "waiting": "#d62728"}


@dataclass
class Settings(ContextConfig):
    exchanges: str = "all_gather"  # how gpt4d exchanges keys and values; of all_gather and ring
    balance_repeats: int = 15  # repetitions of the attention of all ranks
    memory_layers: int = 4
    memory_hidden: int = 256
    memory_ranks: int = 8  # maximum number of ranks that share the sequence
    warm_up: int = 1
    continued: bool = False  # keep the parts that ``out``.json has: an earlier run was interrupted
    out: str = "benchmarks/results/context"


def run(settings: Settings) -> Iterator[dict]:
    exchanges = settings.exchanges.split(",")
    if not set(exchanges) <= set(_EXCHANGES):
        raise ConfigError(f"exchanges={settings.exchanges}: must be a list of {', '.join(_EXCHANGES)}")
    parts: dict[str, Callable[[], Any]] = {
        "balance": lambda: [balance(settings, ranks) for ranks in (2, 4, 8)],
        "memory": lambda: memory(settings),
        "values": lambda: values(settings, exchanges),
        f"hosts_{settings.hosts}": lambda: steps(settings, exchanges),
        "hosts_1": lambda: steps(replace(settings, hosts=1), exchanges),
    }
    results = {**settings.description(), "model": asdict(settings.work.model), "tokens": settings.length}
    yield from measure_parts(parts, results, settings.out, settings.continued)


def steps(settings: Settings, exchanges: Sequence[str]) -> dict:
    """Return the time of the computation alone and a row per contender, which alternate."""
    print(f"--- {settings.hosts} host(s) with {settings.ranks} ranks each", flush=True)
    rows = measure(settings, specs(settings, exchanges))
    found = with_computation(rows, computation(settings))
    for row in report.counting(rows):
        if row["family"] == "ours":
            row["planned_s"] = planned_seconds(settings, row["name"])
            print(f"{row['name']}: planned {row['planned_s']:.3f} s, {row['planned_s'] / row['median_s'] - 1:+.1%}")
    print_rows(rows)
    return found


def planned_seconds(settings: ContextConfig, name: str) -> float:
    """Return the planner's seconds of a step on a grid such as ``1x1x1x8/context=8``."""
    sizes, parallel, _ = parse_grid(name)
    config = Config(
        model=settings.work.model,
        train=TrainConfig(seq_len=settings.length, batch_size=1, precision="fp32"),
        parallel=ParallelConfig(cache_layers="all", pipeline=PipelineConfig(stages=1), **parallel),
        cluster=plain_rates(settings),
    )
    return Estimate(config, sizes).step(1).step_time_s


def specs(settings: ContextConfig, exchanges: Sequence[str], **changes: object) -> list[WorkerSpec]:
    """Return the worker groups of gpt4d and of plain torch on all ranks of ``settings``."""
    grids = context_grids(settings.hosts * settings.ranks, exchanges)
    return [
        _spec("ours", "gpt4d_context", worker_arguments(settings, grids, **changes)),
        _spec("torch", "torch_context", worker_arguments(settings, **changes)),
    ]


def _spec(family: str, adapter: str, arguments: tuple[str, ...]) -> WorkerSpec:
    return WorkerSpec(family, f"benchmarks.adapters.{adapter}", "steps", "torch", arguments)


# -------------------------------------------------------------------------------------------------------- values


def values(settings: Settings, exchanges: Sequence[str]) -> list[dict]:
    """Return loss and peak of memory of each contender, and the difference of its gradients to the first contender's.

    Raises RuntimeError if losses or gradients differ.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        stored = specs(settings, exchanges, virtual=False, gradients=directory)
        rows = compared_gradients(settings.hosts * settings.ranks, stored, directory)
    kept = "family", "name", "loss", "peak_mib", "gradient_difference"
    rows = [{key: row[key] for key in kept} for row in rows]
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        loss_difference = abs(row["loss"] / rows[0]["loss"] - 1)
        if max(loss_difference, row["gradient_difference"]) > _TOLERANCE:
            raise RuntimeError(f"{row['name']}: loss or gradients differ from {rows[0]['name']}")
    return rows


# -------------------------------------------------------------------------------------------------------- memory


def memory(settings: Settings) -> list[dict]:
    """Return the peak of memory of a step in gpt4d for each number of ranks that share the sequence.

    ``over_share`` is the peak relative to the same share of the peak with one rank. Weights are replicated.
    """
    smaller = replace(settings, layers=settings.memory_layers, hidden=settings.memory_hidden, virtual=False)
    rows: list[dict] = []
    for ranks in divisors(settings.memory_ranks):
        grid = f"1x1x1x{ranks}" + (f"/context={ranks}" if ranks > 1 else "")
        with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
            arguments = worker_arguments(smaller, [grid], gradients=directory)
            (row,) = interleave(LocalHost(ranks), [_spec("ours", "gpt4d_context", arguments)], 1, 0)
        peak = row["peak_mib"]
        first = rows[0]["peak_mib"] if rows else peak
        rows.append({"context": ranks, "peak_mib": peak, "over_share": peak * ranks / first})
        print(f"context {ranks}: peak {peak:.1f} MiB, {rows[-1]['over_share']:.3f} of a share", flush=True)
    return rows


# ------------------------------------------------------------------------------------------------------- balance


def balance(settings: Settings, ranks: int) -> dict:
    """Return the imbalance of attention's work between ranks, with segments and with contiguous parts of a sequence.

    The imbalance is the maximum over the mean, minus 1. The work is the number of pairs of a query and a key, and the
    measured processor time of gpt4d's kernels.
    """
    result: dict[str, Any] = {"context": ranks}
    for kind, blocks in (("segments", segment_blocks), ("contiguous", contiguous_blocks)):
        by_rank = [blocks(settings.length, ranks, rank) for rank in range(ranks)]
        result[f"{kind}_pairs"] = imbalance([sum(map(pairs, found)) for found in by_rank])
        result[f"{kind}_measured"] = imbalance(attention_seconds(settings, by_rank, settings.balance_repeats))
    print(", ".join(f"{key} {value:.4g}" for key, value in result.items()), flush=True)
    return result


def imbalance(work: Sequence[float]) -> float:
    return max(work) / statistics.fmean(work) - 1


def pairs(block: KeyBlock) -> int:
    """Return the number of pairs of a query and a key that it attends to."""
    queries, keys = block.stop - block.first, block.stop_key - block.first_key
    return queries * (queries + 1) // 2 if block.causal else queries * keys


def segment_blocks(length: int, ranks: int, rank: int) -> list[KeyBlock]:
    """Return the blocks of a rank of gpt4d."""
    queries = torch.empty(1, length // ranks, 1, 1)
    steps = GatheredKeys(Axis("context", ranks, rank)).steps(queries)
    return [block for step in steps for block, _ in step]


def contiguous_blocks(length: int, ranks: int, rank: int) -> list[KeyBlock]:
    """Return the blocks of a rank that has part ``rank`` of a sequence."""
    own = length // ranks
    before = [KeyBlock(0, own, 0, rank * own)] if rank else []
    return [KeyBlock(0, own, 0, own, causal=True), *before]


def attention_seconds(settings: ContextConfig, blocks: Sequence[Sequence[KeyBlock]], repeats: int) -> list[float]:
    """Return the processor seconds of each rank's blocks: the minimum of the repetitions, in which ranks alternate."""
    model, own = settings.work.model, settings.length // len(blocks)
    q = torch.randn(1, own, model.heads, model.head_size)
    k, v = torch.randn(2, 1, settings.length, model.key_value_heads, model.head_size).unbind()
    seconds: list[list[float]] = [[] for _ in blocks]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(repeats):
        for found, times in zip(blocks, seconds, strict=True):
            started = time.process_time()
            for block in found:
                block_attention(q, k, v, None, block, None)
            times.append(time.process_time() - started)
    torch.set_num_threads(threads)
    return [min(times) for times in seconds]


# --------------------------------------------------------------------------------------------------- computation


class SleepClock:
    """The functions of ``time`` for a virtual device on which time passes only while it sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def computation(settings: ContextConfig) -> float:
    """Return the seconds of a step on one virtual device that is as fast as all ranks of ``settings`` together."""
    ranks = settings.hosts * settings.ranks
    rates = settings.flops * ranks, settings.memory_gb_s * ranks, settings.launch_us
    # Built outside, because products on a virtual device have no values, and tables of random numbers are cached.
    step = SharedSequences("1x1x1x1", settings.work)
    with VirtualDevice(*rates, skips_masked_products=True, source=SleepClock()) as device:
        step.forward_backward()
        return device.stream.busy_s


def with_computation(rows: list[dict], seconds: float) -> dict:
    """Return the rows with their waiting time and the ratio of their time to the computation alone."""
    for row in report.counting(rows):
        row["waiting_s"] = row["median_s"] - row["busy_s"]
        row["over_computation"] = row["median_s"] / seconds
    return {"computation_s": seconds, "rows": rows}


def plot(settings: Settings, results: dict) -> Any:
    """Return a figure with the steps on each number of hosts and the peaks of memory."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    measured = {key: results[key] for key in results if key.startswith("hosts_")}
    figure = Figure(figsize=(9, 3 + 3 * len(measured)), layout="constrained")
    *panels, below = figure.subplots(len(measured) + 1, 1, squeeze=False)[:, 0]
    for axes, (key, found) in zip(panels, measured.items(), strict=True):
        rows = report.counting(found["rows"])
        for place, row in enumerate(rows):
            axes.barh(place, row["busy_s"], color=_COLORS[row["family"]])
            axes.barh(place, row["waiting_s"], left=row["busy_s"], color=_COLORS["waiting"])
            spread = [[row["median_s"] - row["min_s"]], [row["max_s"] - row["median_s"]]]
            axes.errorbar(row["median_s"], place, xerr=spread, fmt="none", ecolor="black", capsize=3)
            if "planned_s" in row:
                axes.plot(row["planned_s"], place, "d", color="black", markersize=4)
        axes.axvline(found["computation_s"], color="black", linestyle=":")
        axes.set_yticks(range(len(rows)), [f"{row['family']} {row['name']}" for row in rows], fontsize="small")
        axes.invert_yaxis()
        axes.set_title(f"{key.removeprefix('hosts_')} host(s): forward and backward of {results['tokens']:,} tokens")
        axes.set_xlabel("seconds (median, min–max); dotted: computation alone; diamonds: planned")
    memory_rows = results.get("memory", [])
    ranks, peaks = ([row[key] for row in memory_rows] for key in ("context", "peak_mib"))
    below.loglog(ranks, peaks, "o-", color=_COLORS["ours"], label="measured")
    below.loglog(
        ranks, [peaks[0] / count for count in ranks], ":", color="black", label="share of the peak on one rank"
    )
    below.set_xticks(ranks, list(map(str, ranks)))
    below.yaxis.set_major_formatter("{x:.0f}")
    below.yaxis.set_minor_formatter("{x:.0f}")
    below.xaxis.minorticks_off()
    below.set_xlabel("parallel.context")
    below.set_ylabel("peak of memory, MiB")
    below.legend()
    legend = {"gpt4d computes": "ours", "torch computes": "torch", "waits": "waiting"}
    patches = [Patch(color=_COLORS[key], label=label) for label, key in legend.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3)
    return figure
