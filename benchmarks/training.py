"""Runs of train.py on this machine alone, and the losses of their validations."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def train(run_dir: Path, overrides: Sequence[str]) -> list[dict]:
    """Run train.py without samples and checkpoints, and return the lines of metrics.jsonl, one per step and event.

    Runs in one directory share the tokens of their data.
    """
    subprocess.run(_command(run_dir, overrides), check=True, stdout=subprocess.DEVNULL)
    return _lines(run_dir)


def train_together(runs: Mapping[Path, Sequence[str]]) -> list[tuple[list[dict], float]]:
    """Run train.py with the overrides of each run directory, all at the same time and each with one thread.

    Returns the lines of each run and the processor seconds of its entire process. Raises RuntimeError if one fails.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [_command(run_dir, overrides) for run_dir, overrides in runs.items()]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) for command in commands]
    seconds = []
    try:
        for process in processes:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds.append(usage.ru_utime + usage.ru_stime)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                process.wait()
    if failed := [run_dir.name for run_dir, process in zip(runs, processes, strict=True) if process.returncode]:
        raise RuntimeError(f"train.py failed: {', '.join(failed)}")
    return list(zip(map(_lines, runs), seconds, strict=True))


def validations(lines: Sequence[dict]) -> list[dict]:
    """Return step, seconds of training so far, loss and, for text, bits per byte of each validation.

    Validation and saving do not count as seconds.
    """
    seconds, points = 0.0, []
    for line in lines:
        if "event" not in line:
            seconds += line["step_time_s"]
        elif line["event"] == "validation":
            values = {key: line[key] for key in ("loss", "bits_per_byte") if key in line}
            points.append({"step": line["step"], "seconds": seconds, **values})
    return points


def _command(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    fixed = ["logging.every=1", "logging.sample_tokens=0", "checkpoint.every=0"]
    paths = [f"run.dir={run_dir}", f"data.cache_dir={run_dir.parent / 'cache'}"]
    return [sys.executable, "train.py", *fixed, *paths, *overrides]


def _lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
