"""Expected time of a first ``make gpu-check`` on a GPU, from the times of a rehearsal and estimates."""

from collections import defaultdict
from collections.abc import Mapping

PART_S = 480  # limit of a part
COMPILE_S = 5  # estimate for one function; a GPT trains with ten
_COLUMNS = "host", "compile", "work", "sum", "limit"
_TITLE = f"""
Expected seconds of a first run on a GPU.
host: measured in this rehearsal. compile: {COMPILE_S} s for each function. work: estimate in the marker of a check."""


def table(checks: Mapping[str, Mapping]) -> str:
    """Return the expected times of all checks that have run, and their sums by part, as text.

    Args:
        checks: results of a rehearsal by number, as in the JSON file.
    """
    lines, totals = [_line("check", *_COLUMNS)], defaultdict[int, list[float]](lambda: [0.0] * len(_COLUMNS))
    for number, entry in sorted(checks.items(), key=lambda item: (item[1]["budget"]["part"], int(item[0]))):
        budget = entry["budget"]
        parts = [entry["seconds"], COMPILE_S * budget.get("functions", 0), budget["work_s"]]
        values = [*parts, sum(parts), budget["limit_s"]]
        total = totals[budget["part"]]
        total[:] = [a + b for a, b in zip(total, values, strict=True)]
        lines.append(_line(number, *values))
    for part, values in totals.items():
        lines.append(_line(f"part {part}", *values[:-1], PART_S))
    return "\n".join((_TITLE, *lines))


def _line(name: str, *values: str | float) -> str:
    texts = (value if isinstance(value, str) else f"{value:.0f}" for value in values)
    return f"{name:>7}" + "".join(f"{text:>9}" for text in texts)
