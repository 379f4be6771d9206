"""Checks of gpt4d on a machine with GPUs: results, speed, memory, checkpoints and failures.

    python -m benchmarks.gpu_check [part=1] [fresh=true] [device=cpu] [out=FILE]

Each check prints one line and adds its values to ``out``, a JSON file. The exit code is 1 if a check failed or was not
reached; a check that cannot run fails. The three parts take at most eight minutes each. A second call runs only what
has not passed yet with the same code, torch and device. docs/reference/gpu_check.md describes the checks.

Needs torch 2.11 or newer and the packages of requirements.txt, no network, and

- checks 6, 8, 10, 11: a GPU with about 40 GiB of memory
- check 8: 20 GB of disk space in TMPDIR and 20 GB of host memory
- check 9: several GPUs, or NCCL 2.30 or newer
- checks 10, 11: the result of check 6

``device=cpu`` is a rehearsal of the same code with tiny models in less than a minute.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Check, CheckContext, Outcome
from benchmarks.gpu.isolation import run_isolated
from gpt4d.config import ConfigError, check_choice, from_arguments
from gpt4d.metrics import without_nan
from gpt4d.runtime.errors import one_line_errors

_REPOSITORY = Path(__file__).resolve().parents[1]
_PART_LIMIT_S = 480.0
_DESCRIBE_LIMIT_S = 60.0
PASS, FAIL, NOT_REACHED = "pass", "FAIL", "not reached"

PARTS: tuple[tuple[Check, ...], ...] = (
    (
        Check(0, "versions, copy, product", 40, "benchmarks.gpu.hardware:check"),
        Check(1, "layers against float64", 90, "benchmarks.gpu.layers:check"),
        Check(2, "no synchronization in a step", 60, "benchmarks.gpu.synchronization:check"),
        Check(3, "training against the CPU", 130, "benchmarks.gpu.training:check"),
        Check(4, "traffic of collectives", 50, "benchmarks.gpu.traffic:check"),
        Check(5, "grids of eight ranks", 110, "benchmarks.gpu.grids:check"),
    ),
    (
        Check(6, "speed and memory of gpt_1b3", 200, "benchmarks.gpu.speed:check_1b3"),
        Check(7, "speed and memory of gpt_125m", 100, "benchmarks.gpu.speed:check_125m"),
        Check(8, "checkpoint of gpt_1b3", 180, "benchmarks.gpu.saving:check"),
    ),
    (
        Check(9, "ranks, link and failures", 180, "benchmarks.gpu.jobs:check"),
        Check(10, "variants of a step", 150, "benchmarks.gpu.variants:check"),
        Check(11, "planned step time", 150, "benchmarks.gpu.planning:check"),
    ),
)


@dataclass
class GpuCheck:
    device: str = "cuda"  # or cpu: a rehearsal
    part: int | None = None  # null: all three
    fresh: bool = False  # forget earlier results
    out: str | None = None  # JSON file; null: benchmarks/results/gpu_check.json, or for a rehearsal a file in runs


class Results:
    """The JSON file of results, which is complete after each check."""

    def __init__(self, path: Path, machine: dict[str, Any], fresh: bool):
        self.path = path
        self.document: dict[str, Any] = {"command": "python -m benchmarks.gpu_check", **machine, "checks": {}}
        if path.exists() and not fresh:
            earlier = json.loads(path.read_text())
            if earlier["fingerprint"] == machine["fingerprint"]:
                self.document = earlier

    @property
    def checks(self) -> dict[str, dict]:
        return self.document["checks"]

    def passed(self, check: Check) -> bool:
        return self.checks.get(str(check.number), {}).get("status") == PASS

    def values(self) -> dict[int, dict[str, Any]]:
        return {int(number): entry["values"] for number, entry in self.checks.items()}

    def add(self, check: Check, status: str, outcome: Outcome, seconds: float) -> None:
        self.checks[str(check.number)] = {
            "name": check.name,
            "status": status,
            "problems": outcome.problems,
            "figure": outcome.figure,
            "seconds": round(seconds, 2),
            "rehearsal": self.document["device"] == "cpu",
            "values": outcome.values,
        }
        self.document["checks"] = dict(sorted(self.checks.items(), key=lambda item: int(item[0])))
        partial = self.path.with_name(f"partial_{self.path.name}")
        partial.write_text(json.dumps(without_nan(self.document), indent=1, allow_nan=False) + "\n")
        partial.replace(self.path)


def run_part(checks: Sequence[Check], device: str, results: Results, limit_s: float = _PART_LIMIT_S) -> bool:
    """Run the checks that have not passed, until ``limit_s`` seconds are over. Return whether all have passed."""
    ends = time.monotonic() + limit_s
    for check in checks:
        if results.passed(check):
            _print(check, results.checks[str(check.number)]["figure"], f"{PASS} (earlier)")
            continue
        started = time.monotonic()
        if started >= ends:
            outcome, status = Outcome(problems=["the time of its part is over"]), NOT_REACHED
        else:
            with tempfile.TemporaryDirectory(prefix="gpu_check_") as directory:
                context = CheckContext(device, Path(directory), results.values())
                outcome = run_isolated(check.target, context, min(check.limit_s, ends - started))
            status = FAIL if outcome.problems else PASS
        results.add(check, status, outcome, time.monotonic() - started)
        _print(check, outcome.figure, ": ".join([status, *filter(None, ["; ".join(outcome.problems)])]))
    return all(results.passed(check) for check in checks)


def _print(check: Check, figure: str, verdict: str) -> None:
    print(f"{check.number:2}  {check.name:30} {figure}  {verdict}", flush=True)


def describe_machine(device: str) -> dict[str, Any]:
    """Return the device and the versions, and the fingerprint of results that belong together.

    Raises ConfigError if the device cannot be used.
    """
    with tempfile.TemporaryDirectory() as directory:
        context = CheckContext(device, Path(directory))
        outcome = run_isolated("benchmarks.gpu.hardware:describe", context, _DESCRIBE_LIMIT_S)
    if outcome.problems:
        raise ConfigError(f"device={device}: {'; '.join(outcome.problems)}")
    code = hashlib.sha256()
    for path in _code():
        code.update(path.read_bytes())
    facts = *(outcome.values.get(key) for key in ("torch", "name", "devices", "nccl")), code.hexdigest()
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()
    return {"device": device, "machine": outcome.values, "fingerprint": fingerprint}


def _code() -> Iterable[Path]:
    own = [*(_REPOSITORY / "benchmarks").glob("gpu*.py"), *(_REPOSITORY / "benchmarks" / "gpu").rglob("*.py")]
    return sorted([*own, *(_REPOSITORY / "gpt4d").rglob("*.py"), *(_REPOSITORY / "configs").rglob("*.yaml")])


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    config = from_arguments(GpuCheck, arguments)
    check_choice("device", config.device, ("cuda", "cpu"))
    if config.part is not None and config.part not in range(1, len(PARTS) + 1):
        raise ConfigError(f"part={config.part}: there are {len(PARTS)} parts; use 1 to {len(PARTS)}")
    results_dir = _REPOSITORY / "benchmarks" / "results"
    if config.device == "cpu":
        results_dir = _REPOSITORY / "runs"  # a rehearsal is no result of a GPU
        # Tiny models: several threads, or ranks with several threads each, would only wait for each other.
        os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    out = Path(config.out or results_dir / "gpu_check.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(out, describe_machine(config.device), config.fresh)
    chosen = PARTS if config.part is None else (PARTS[config.part - 1],)
    try:
        passed = [run_part(part, config.device, results) for part in chosen]
    except KeyboardInterrupt:
        print(f"interrupted; the same command continues (without fresh=true); see {out}")
        return 130
    print(f"{'all checks have passed' if all(passed) else 'some checks have not passed'}; see {out}")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
