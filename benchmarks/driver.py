"""The steps that all benchmarks share: settings, alternating contenders, results, plot.

A benchmark is a module of ``benchmarks.experiments`` with

- ``Settings``: a dataclass of its ``key=value`` arguments. ``out`` is the path of the results without suffix;
  or a function ``read_settings`` of the arguments
- ``PACKAGES``: packages whose versions the results state
- ``run(settings)``: prints results and yields them for the JSON file, again after each case
- ``plot(settings, results)``, optional: returns a figure of matplotlib.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import report
from benchmarks.cluster import EmulatedCluster
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.settings import DeviceConfig, read_settings


def run(name: str, *arguments: str) -> None:
    """Run the benchmark ``name`` and write its results and its plot after each case."""
    benchmark = import_module(f"benchmarks.experiments.{name}")
    settings = settings_of(benchmark, list(arguments))
    # A continued run completes the results of the command without ``continued``.
    words = [argument for argument in arguments if not argument.startswith("continued=")]
    command = " ".join(["python -m benchmarks", name, *words])
    for results in benchmark.run(settings):
        if settings.out is None:
            continue
        out = Path(settings.out)
        report.write(out, command, report.machine(*benchmark.PACKAGES), **results)
        figure = benchmark.plot(settings, results) if hasattr(benchmark, "plot") else None
        if figure is not None:
            figure.savefig(out.with_suffix(".png"), dpi=120)


def settings_of(benchmark: ModuleType, arguments: list[str]) -> Any:
    """Return the settings of a benchmark from its arguments. Raises ConfigError for others."""
    if hasattr(benchmark, "read_settings"):
        return benchmark.read_settings(arguments)
    return read_settings(benchmark.Settings, arguments)


def measure(settings: DeviceConfig, specs: Sequence[WorkerSpec]) -> list[dict]:
    """Return one row per contender, which alternate on the emulated cluster of ``settings``."""
    with EmulatedCluster(settings) as cluster:
        return interleave(cluster, specs, settings.repeats, settings.warm_up)


def measure_parts(
    parts: Mapping[str, Callable[[], Any]], results: dict[str, Any], out: str, continued: bool
) -> Iterator[dict]:
    """Measure parts by name, and yield ``results`` with the parts so far after each.

    ``continued``: keep the parts that ``out``.json has, because an earlier run was interrupted.
    """
    earlier = json.loads(Path(out).with_suffix(".json").read_text()) if continued else {}
    results |= {part: earlier[part] for part in parts if part in earlier}
    for part, measure_part in parts.items():
        if part not in results:
            results[part] = measure_part()
            yield results


def print_rows(rows: Iterable[dict]) -> None:
    for row in rows:
        print(report.line(row), flush=True)
