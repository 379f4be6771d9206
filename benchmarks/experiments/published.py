"""Planned steps of published runs of other trainers, next to the published steps.

    python -m benchmarks published [rows=benchmarks/published.json] [out=benchmarks/results/published] [mfu=FILE]

Every row is planned with the profile of its trainer (gpt4d.config.trainer_profiles) on the profile of its machine
(benchmarks.machines). Rates of machines were fitted on one half of the rows, and tested on the second half: the rows of
each machine, ordered by a hash of their id, belong to the two halves alternately. All rows that
benchmarks/published.json lacks belong to the test. Trains nothing and takes about a minute. mfu=FILE also writes the
published MFU by GPU and size of the model, the planner's gpt4d/planner/published_mfu.yaml.
"""

import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published import ROWS, NotPlanned, mfu_text, planned, read_rows, summary

PACKAGES = ()
FIT, TEST = "fit", "test"
_WORST = 8  # number of printed rows
_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")


@dataclass
class Settings:
    rows: str = ROWS
    out: str = "benchmarks/results/published"
    mfu: str | None = None


def halves(rows: Iterable[dict]) -> dict[str, str]:
    """Return the half of each row by its id: rates of machines are fitted on ``fit``."""
    ordered = sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).hexdigest())
    counts: Counter[str] = Counter()
    found = {}
    for row in ordered:
        found[row["id"]] = (FIT, TEST)[counts[row["hardware"]] % 2]
        counts[row["hardware"]] += 1
    return found


def score(row: dict, half: str) -> dict[str, Any]:
    """Return the planned and the published step of a row. Raises NotPlanned."""
    if not row["step_s"]:
        raise NotPlanned("no step time is published")
    plan = planned(row)
    return {
        "id": row["id"],
        "system": row["system"],
        "hardware": row["hardware"],
        "gpus": row["gpus"],
        "half": half,
        "planned_s": plan.step_time_s,
        "published_s": row["step_s"],
        "published_gib": row["published"].get("memory_gib"),
        **summary(row, plan),
    }


def ratio(row: dict) -> float:
    return row["planned_s"] / row["published_s"]


def mean_error(rows: Iterable[dict]) -> float | None:
    """Return the mean of ``|planned / published - 1|``; None without rows."""
    errors = [abs(ratio(row) - 1) for row in rows]
    return statistics.fmean(errors) if errors else None


def source_of(row: dict) -> str:
    """Return the trainer of a row without the version."""
    return row["system"].split(" (")[0]


def errors(rows: list[dict]) -> dict[str, Any]:
    """Return mean errors of halves, sources and memory, and the worst rows."""
    by_half, by_source = defaultdict(list), defaultdict(list)
    for row in rows:
        by_half[row["half"]].append(row)
        by_source[source_of(row)].append(row)
    memory = [abs(row["memory_gib"] / row["published_gib"] - 1) for row in rows if row["published_gib"]]
    return {
        "halves": {half: mean_error(by_half[half]) for half in (FIT, TEST)},
        "sources": {source: mean_error(found) for source, found in by_source.items()},
        "megatron_table_5": mean_error(row for row in rows if row["id"].startswith("megatron_seqsel")),
        "memory": statistics.fmean(memory) if memory else None,
        "worst": [row["id"] for row in sorted(rows, key=lambda row: -abs(ratio(row) - 1))[:_WORST]],
    }


def line(row: dict) -> str:
    memory = f" of {row['published_gib']}" if row["published_gib"] else ""
    return (
        f"{row['id']:38} {row['half']:4} {row['planned_s']:8.3f} of {row['published_s']:8.3f} s = {ratio(row):.2f}  "
        f"{row['grid']}, microbatch {row['micro_batch']}, {row['memory_gib']:.0f}{memory} GiB"
    )


def plot(settings: Settings, results: dict) -> Any:
    from matplotlib.figure import Figure

    rows = results["rows"]
    if not rows:
        return None
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    against, spread = figure.subplots(1, 2, width_ratios=(1, 1.6))
    sources = list(dict.fromkeys(map(source_of, rows)))
    limits = [min(row["published_s"] for row in rows) / 2, 2 * max(row["published_s"] for row in rows)]
    against.plot(limits, limits, color="black", linewidth=0.8)
    for number, source in enumerate(sources):
        for half, marker in ((FIT, "o"), (TEST, "D")):
            found = [row for row in rows if source_of(row) == source and row["half"] == half]
            filled = {"facecolors": "none"} if half == FIT else {}
            color = _COLORS[number % len(_COLORS)]
            seconds = [row["published_s"] for row in found]
            style = {"marker": marker, "s": 20, "edgecolors": color, "color": color, "linewidths": 0.8, **filled}
            against.scatter(seconds, [row["planned_s"] for row in found], **style)
            spread.scatter(
                [ratio(row) for row in found], [number + (0.15 if half == TEST else -0.15)] * len(found), **style
            )
    against.set_xscale("log")
    against.set_yscale("log")
    against.set_xlabel("published seconds per step")
    against.set_ylabel("planned seconds per step")
    for border in (0.75, 1.0, 1.25):
        spread.axvline(border, color="black", linewidth=0.8, linestyle="-" if border == 1.0 else ":")
    spread.set_yticks(range(len(sources)), sources)
    spread.invert_yaxis()
    spread.set_xlabel("planned / published; circles: rates were fitted on these rows, filled diamonds: test")
    found = results["errors"]["halves"]
    text = ", ".join(f"{half} {error:.1%}" for half, error in found.items() if error is not None)
    figure.suptitle(f"{len(rows)} published runs, mean error: {text}")
    return figure


def run(settings: Settings) -> Iterator[dict]:
    published = read_rows(settings.rows)
    if settings.mfu:
        Path(settings.mfu).write_text(mfu_text(published), encoding="utf-8")
    half_of = halves(read_rows(ROWS))
    rows, unplanned = [], []
    for row in published:
        try:
            rows.append(score(row, half_of.get(row["id"], TEST)))
            print(line(rows[-1]), flush=True)
        except NotPlanned as reason:
            unplanned.append({"id": row["id"], "reason": str(reason)})
            print(f"{row['id']:38} not planned: {reason}", flush=True)
    found = errors(rows)
    print(f"\n{len(rows)} rows are planned, {len(unplanned)} are not")
    for source, error in found["sources"].items():
        print(f"{source:24} mean error {error:.1%}")
    for half, error in found["halves"].items():
        if error is not None:
            print(f"{half:24} mean error {error:.1%}")
    if found["megatron_table_5"] is not None:
        print(f"{'arXiv 2205.05198 Table 5':24} mean error {found['megatron_table_5']:.1%} (Calculon: 3.65 %)")
    if found["memory"] is not None:
        print(f"{'memory':24} mean error {found['memory']:.1%}")
    print(f"worst: {', '.join(found['worst'])}")
    yield {"errors": found, "rows": rows, "unplanned": unplanned}
