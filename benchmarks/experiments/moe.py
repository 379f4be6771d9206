"""Forward and backward of layers of a mixture of experts, in gpt4d, plain torch and megatron-core.

    python -m benchmarks moe [grids=1x1x8x1,1x1x8x1/chunks=2] [tokens=2048] [hidden=512] [inner=1344] [mbit=200]
        [repeats=5] [virtual=false] [continued=true] [out=benchmarks/results/moe]

The ranks are virtual devices, first two hosts with four ranks each, and then one host. Each layer has 8 experts and
adds the outputs of a token's two experts to its input. The experts of each token are drawn in advance, so all
contenders have equal loads. All contenders first compute real values on this machine: outputs and gradients must agree.
Then their steps alternate, and gradients of weights are reduced in each. ``exposed_s`` is the time in which a device of
gpt4d waits for an axis. megatron-core takes part if it is installed.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks import report
from benchmarks.driver import measure, measure_parts, print_rows
from benchmarks.gradient_steps import compared_gradients
from benchmarks.interleave import WorkerSpec
from benchmarks.moe_steps import MoeConfig, worker_arguments
from benchmarks.settings import parse_grids

PACKAGES = ("torch", "megatron-core")
_TOLERANCE = 1e-5  # relative difference of outputs and gradients, in float32
_GRIDS = "1x1x8x1", "2x1x4x1/tokens", "1x2x4x1"


@dataclass
class Settings(MoeConfig):
    # Grids of gpt4d, gx·gy·gz·gdata.
    grids: str = ",".join(f"{grid}{chunks}" for grid in _GRIDS for chunks in ("", "/chunks=2"))
    warm_up: int = 1
    continued: bool = False  # keep the parts that ``out``.json has: an earlier run was interrupted
    out: str = "benchmarks/results/moe"


def run(settings: Settings) -> Iterator[dict]:
    parse_grids(settings.grids, settings.hosts * settings.ranks)
    hosts, ranks = settings.hosts, settings.hosts * settings.ranks
    # The link inside a host has the same rate in both clusters, although more ranks share the uplink of one host.
    one_host = replace(settings, hosts=1, ranks=ranks, intra_host_ratio=settings.intra_host_ratio * hosts)
    clusters = [settings, one_host]
    parts: dict[str, Callable[[], Any]] = {"values": lambda: values(settings)}
    parts |= {f"hosts_{cluster.hosts}": partial(steps, cluster) for cluster in clusters}
    sizes = "layers", "hidden", "inner", "experts", "per_token", "tokens"
    results = {**settings.description(), **{size: getattr(settings, size) for size in sizes}}
    yield from measure_parts(parts, results, settings.out, settings.continued)


def steps(settings: Settings) -> list[dict]:
    """Return a row per contender, which alternate."""
    print(f"--- {settings.hosts} host(s) with {settings.ranks} ranks each", flush=True)
    rows = measure(settings, specs(settings))
    print_rows(rows)
    return rows


def specs(settings: Settings, **changes: object) -> list[WorkerSpec]:
    """Return the worker groups of all frameworks."""
    adapters = {"ours": ("gpt4d", "torch"), "torch": ("torch", "torch"), "megatron-core": ("megatron", "megatron")}
    arguments = worker_arguments(settings, settings.grids, **changes)
    return [
        WorkerSpec(family, f"benchmarks.adapters.{adapter}_moe", "steps", package, arguments)
        for family, (adapter, package) in adapters.items()
    ]


def values(settings: Settings) -> list[dict]:
    """Return the difference of each contender's output and gradients to the first contender's.

    Raises RuntimeError if they differ.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        stored = specs(settings, virtual=False, gradients=directory)
        rows = compared_gradients(settings.hosts * settings.ranks, stored, directory)
    kept = "family", "name", "peak_mib", "gradient_difference"
    rows = [{key: row[key] for key in kept} for row in rows]
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if row["gradient_difference"] > _TOLERANCE:
            raise RuntimeError(f"{row['name']}: output or gradients differ from {rows[0]['name']}")
    return rows


def plot(settings: Settings, results: dict) -> Any:
    """Return a figure with a panel for each number of hosts; None before the first is measured."""
    from matplotlib.figure import Figure

    measured = {key: report.counting(results[key]) for key in results if key.startswith("hosts_")}
    if not measured:
        return None
    figure = Figure(figsize=(9, 1 + 3.4 * len(measured)), layout="constrained")
    for axes, (key, rows) in zip(figure.subplots(len(measured), 1, squeeze=False)[:, 0], measured.items(), strict=True):
        report.draw_bars(axes, rows, [f"{row['family']} {row['name']}" for row in rows])
        axes.set_title(f"{key.removeprefix('hosts_')} host(s): {results['layers']} layers of experts")
        axes.set_xlabel("seconds (median, min–max)")
    report.add_legend(figure, [row for rows in measured.values() for row in rows])
    return figure
