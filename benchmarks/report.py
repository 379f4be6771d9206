"""Results of the benchmarks: medians and spread, the machine, JSON files, table lines, bar charts."""

import json
import os
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_COLORS = {
    "ours": "#7a9cc6",
    "AxoNN": "#c6a07a",
    "torch": "#b7b7b7",
    "megatron-core": "#9fbf9f",
    "plain": "#d9c89e",
    "HFLM": "#b7b7b7",
}
_WAIT_COLORS = {"x": "#1f77b4", "y": "#2ca02c", "z": "#d62728", "data": "#9467bd", "world": "#8c564b"}


def row(family: str, name: str, answers: list[dict]) -> dict:
    """Return one contender's median step time, minimum, maximum, every repeat, and additional keys of its answers.

    The value of a key that ends in ``_s`` or ``_share`` is its median, or the median of each item, such as the wait for
    each axis in ``exposed_s``. The value of any other key is its last value. Runs on virtual devices in which the
    processor was the bottleneck do not count: ``not_counted`` is their number. If no run counts, there are no figures.
    """
    result: dict = {"family": family, "name": name}
    counted = [answer for answer in answers if not answer.get("cpu_bound")]
    if "cpu_bound" in answers[-1]:
        result["not_counted"] = len(answers) - len(counted)
    if not counted:
        return result
    seconds = [answer["seconds"] for answer in counted]
    result |= {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "seconds": seconds,
    }
    for key, last in counted[-1].items():
        if isinstance(last, dict):
            result[key] = {item: statistics.median(a[key][item] for a in counted) for item in last}
        elif key.endswith(("_s", "_share")):
            result[key] = statistics.median(a[key] for a in counted)
        elif key not in ("seconds", "cpu_bound"):
            result[key] = last
    return result


def counting(rows: list[dict]) -> list[dict]:
    """Return the rows that have figures."""
    return [row for row in rows if "median_s" in row]


def machine(*packages: str) -> dict:
    """Return this machine's architecture and cores, and the versions of Python and the installed ``packages``."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"arch": platform.machine(), "cores": os.cpu_count(), "versions": versions}


def write(out: Path, command: str, machine_info: dict, **results) -> None:
    """Write ``out``.json: the command that reproduces the results, the machine, and the results."""
    document = {"command": command, "machine": machine_info, **results}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


def line(row: dict) -> str:
    """Format a row as one line of text."""
    text = f"{row['family']:13} {row['name']:28} "
    if "median_s" not in row:
        return f"{text}no run counts: the processor was the bottleneck in all {row['not_counted']}"
    text += f"{row['median_s']:.3f} s ({row['min_s']:.3f}–{row['max_s']:.3f})"
    if "loss" in row:
        text += f"  loss {row['loss']:.6f}"
    if row.get("exposed_s"):
        text += "  waiting: " + ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in row["exposed_s"].items())
    if "busy_s" in row:
        text += f"  computing: {row['busy_s']:.2f}, host late {row['host_late_share']:.1%}"
    if row.get("not_counted"):
        text += f"  runs not counted: {row['not_counted']}"
    return text


def bars(rows: list[dict], title: str) -> Any:
    """Return a figure with a bar and its spread per row; the waits per axis, if known, are stacked inside the bar.

    Rows without figures are left out.
    """
    from matplotlib.figure import Figure

    rows = counting(rows)
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    draw_bars(axes, rows, [f"{row['family']} {row['name']}" for row in rows])
    axes.set_xlabel("seconds (median, min–max)")
    axes.set_title(title)
    add_legend(figure, rows)
    return figure


def add_legend(figure: Any, rows: list[dict]) -> None:
    """Name the colors of ``rows`` below all panels: the families, and the axes for which devices wait."""
    from matplotlib.patches import Patch

    families = {row["family"] for row in rows}
    waiting = {axis for row in rows for axis, seconds in row.get("exposed_s", {}).items() if seconds}
    legend = [Patch(color=color, label=family) for family, color in _COLORS.items() if family in families]
    legend += [Patch(color=color, label=f"waiting for {a}") for a, color in _WAIT_COLORS.items() if a in waiting]
    figure.legend(handles=legend, loc="outside lower center", ncols=4)


def draw_bars(axes: Any, rows: list[dict], labels: list[str]) -> None:
    """Draw a bar and its spread per row; the waits per axis, if known, are stacked inside the bar."""
    places = range(len(rows))
    for place, row in zip(places, rows, strict=True):
        exposed = row.get("exposed_s", {})
        start = row["median_s"] - sum(exposed.values())
        axes.barh(place, start, color=_COLORS[row["family"]])
        for axis, seconds in exposed.items():
            axes.barh(place, seconds, left=start, color=_WAIT_COLORS[axis])
            start += seconds
        spread = [[row["median_s"] - row["min_s"]], [row["max_s"] - row["median_s"]]]
        axes.errorbar(row["median_s"], place, xerr=spread, fmt="none", ecolor="black", capsize=3)
    axes.set_yticks(places, labels, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(left=0)
