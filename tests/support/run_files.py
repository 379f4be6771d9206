"""Files of runs, written by tests, and the lock of a run that another process holds."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import sys
from gpt4d.runs.lock import *
held = DirectoryLock(Path(sys.argv[1]), *sys.argv[2:3], *([True] if sys.argv[3:] else []))
print("held", flush=True)
input()
"""


@contextmanager
def locked_by_another_process(directory: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """Hold the lock of a directory in another process. ``arguments``: the lock's name, and anything to share it."""
    directory.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _HOLD, str(directory), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def step(number: int, loss: float | None = 2.0, **values: object) -> dict:
    """Return the line of a step in metrics.jsonl."""
    line = {"step": number, "tokens": 10 * number, "loss": loss, "time": 1000.0 + number, "elapsed_s": float(number)}
    return line | {"step_time_s": 0.5, "tokens_per_s": 20.0} | values


def event(name: str, number: int = 0, **values: object) -> dict:
    """Return the line of an event in metrics.jsonl."""
    return {"event": name, "step": number, "tokens": 10 * number, "time": 1000.0 + number, "elapsed_s": 1.0} | values


def append(run: Path, *lines: dict) -> None:
    """Append lines to the metrics.jsonl of a run."""
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def events(run: str | Path, *kinds: str) -> list[dict]:
    """Return the lines of events in metrics.jsonl, of all or of some kinds."""
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" in line and (not kinds or line["event"] in kinds)]


def write_run(path: Path, *lines: dict, config: str = "", **start: object) -> Path:
    """Write the files of a run with these lines in its metrics.jsonl, and return its directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "config.yaml").write_text(config)
    (path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return path
