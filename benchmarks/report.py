"""What the benchmarks share in telling what they found: medians and spread, the machine, JSON, a table, bars."""

import json
import os
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_COLOURS = {"ours": "#7a9cc6", "AxoNN": "#c6a07a", "torch": "#b7b7b7", "megatron-core": "#9fbf9f", "plain": "#d9c89e"}
_WAITING = {"x": "#1f77b4", "y": "#2ca02c", "z": "#d62728", "data": "#9467bd"}


def row(family: str, name: str, answers: list[dict]) -> dict:
    """One contender: its median step and the spread, every repeat, and what else its answers tell.

    ``exposed_s``: the median wait for each axis; other keys in ``_s``: the median. Other numbers are the last step's.
    """
    seconds = [answer["seconds"] for answer in answers]
    result = {
        "family": family,
        "name": name,
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "seconds": seconds,
    }
    for key, last in answers[-1].items():
        if key == "exposed_s":
            result[key] = {axis: statistics.median(a[key][axis] for a in answers) for axis in last}
        elif key.endswith("_s"):
            result[key] = statistics.median(a[key] for a in answers)
        elif key != "seconds":
            result[key] = last
    return result


def machine(*packages: str) -> dict:
    """Where figures come from: architecture, cores, and the versions of those of ``packages`` that are installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"arch": platform.machine(), "cores": os.cpu_count(), "versions": versions}


def write(out: Path, command: str, where: dict, rows: list[dict], **settings) -> None:
    """``out``.json: the command that makes it anew, the machine, the settings, a row for each contender."""
    document = {"command": command, "machine": where, **settings, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")


def line(row: dict) -> str:
    text = f"{row['family']:13} {row['name']:28} {row['median_s']:.3f} s ({row['min_s']:.3f}–{row['max_s']:.3f})"
    if "loss" in row:
        text += f"  loss {row['loss']:.6f}"
    if row.get("exposed_s"):
        text += "  waiting: " + ", ".join(f"{axis} {seconds:.2f}" for axis, seconds in row["exposed_s"].items())
    return text


def bars(rows: list[dict], out: Path, title: str) -> None:
    """``out``.png: a bar for each row, its spread, and stacked in it the wait for each axis where that is known."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    for place, entry in zip(places, rows, strict=True):
        exposed = entry.get("exposed_s", {})
        start = entry["median_s"] - sum(exposed.values())
        axes.barh(place, start, color=_COLOURS[entry["family"]])
        for axis, seconds in exposed.items():
            axes.barh(place, seconds, left=start, color=_WAITING[axis])
            start += seconds
        spread = [[entry["median_s"] - entry["min_s"]], [entry["max_s"] - entry["median_s"]]]
        axes.errorbar(entry["median_s"], place, xerr=spread, fmt="none", ecolor="black", capsize=3)
    axes.set_yticks(places, [f"{entry['family']} {entry['name']}" for entry in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds (median, min–max)")
    axes.set_title(title)
    families = {entry["family"] for entry in rows}
    waiting = {axis for entry in rows for axis in entry.get("exposed_s", ())}
    legend = [Patch(color=colour, label=family) for family, colour in _COLOURS.items() if family in families]
    legend += [Patch(color=colour, label=f"waiting for {a}") for a, colour in _WAITING.items() if a in waiting]
    figure.legend(handles=legend, loc="outside lower center", ncols=4)
    figure.savefig(out.with_suffix(".png"), dpi=120)
