"""The JSON file of results, which is complete after each check, and the expected times of checks on a GPU."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt4d.runs.logger import without_nan

REPOSITORY = Path(__file__).resolve().parents[2]
PART_S = 480  # limit of a part
COMPILE_S = 5  # estimate for one function; a GPT trains with ten
_COLUMNS = "host", "compile", "work", "sum", "limit"
_TITLE = f"""
Expected seconds of a first run on a GPU.
host: measured in this rehearsal. compile: {COMPILE_S} s for each function. work: estimate in the marker of a check."""
PASS, FAIL, NOT_POSSIBLE = "pass", "FAIL", "not possible here"


class Results:
    """Results of checks, by number. Earlier results of the same code, torch and devices remain unless ``fresh``."""

    def __init__(self, path: Path, device_type: str, machine: dict[str, Any], fresh: bool):
        self.path, self.device_type = path, device_type
        self.document: dict[str, Any] = {
            "command": "make gpu-check",
            "device": device_type,
            "machine": machine,
            "fingerprint": _fingerprint(machine),
            "checks": {},
        }
        if path.exists() and not fresh:
            earlier = json.loads(path.read_text())
            if earlier["fingerprint"] == self.document["fingerprint"]:
                self.document = earlier

    @property
    def checks(self) -> dict[str, dict]:
        return self.document["checks"]

    def passed(self, number: int) -> bool:
        return self.checks.get(str(number), {}).get("status") == PASS

    def values(self) -> dict[int, dict[str, Any]]:
        return {int(number): entry["values"] for number, entry in self.checks.items()}

    def add(self, number: int, entry: dict[str, Any]) -> None:
        self.checks[str(number)] = entry
        self.document["checks"] = dict(sorted(self.checks.items(), key=lambda item: int(item[0])))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"partial_{self.path.name}")
        partial.write_text(json.dumps(without_nan(self.document), indent=1, allow_nan=False) + "\n")
        partial.replace(self.path)


def _fingerprint(machine: dict[str, Any]) -> str:
    """Return a hash of the code and the machine. Results belong together if it is equal."""
    python = [path for package in ("tests/gpu", "gpt4d") for path in (REPOSITORY / package).rglob("*.py")]
    code = sorted([*python, *(REPOSITORY / "configs").rglob("*.yaml")])
    facts = *(machine.get(key) for key in ("torch", "name", "devices", "nccl")), *(path.read_bytes() for path in code)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def table(checks: Mapping[str, Mapping]) -> str:
    """Return the expected times of a rehearsal's checks that have run, and their sums by part, as text."""
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
