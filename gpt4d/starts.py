"""The starts of a run: ``starts.jsonl`` has one line for each, and ``configs/`` its configuration. No torch here."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from gpt4d import activity
from gpt4d.config import CONFIG_DIR, Change, Config, ConfigError, changes, check_changes, recorded_settings
from gpt4d.files import read_json_lines
from gpt4d.writing import replace_file, required_file

_FILE = "starts.jsonl"
_PACKAGES = ("torch", "transformers", "datasets", "tokenizers", "numpy")
_GIT_TIMEOUT_S = 10.0


def record(
    config: Config,
    step: int,
    hosts: Sequence[str],
    grids: Sequence[str],
    identity: Mapping[str, str],
    found: Mapping[str, Change],
    initial: Path | None = None,
) -> float:
    """Append a start to ``run.dir/starts.jsonl``, and write its configuration to ``configs/NNNN.yaml`` and config.yaml.

    Return its time, which identifies it. Raises ConfigError if a file cannot be written.

    Args:
        config: the configuration of this start.
        step: the step from which the run continues.
        hosts: the host of each rank.
        grids: the grid of each pipeline stage.
        identity: the fingerprints of the data (Task.identity).
        found: the settings that differ from the settings with which the run was trained.
        initial: the checkpoint whose weights this start began with (``checkpoint.init``).
    """
    from omegaconf import OmegaConf

    run_dir = Path(config.run.dir)
    number = len(read(run_dir)) + 1
    file = f"configs/{number:04}.yaml"
    for path in (run_dir / file, run_dir / "config.yaml"):
        with required_file(path):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, OmegaConf.to_yaml(OmegaConf.structured(config)))
    (commit, clean), started_at = _commit(), time.time()
    line = {
        "start": number,
        "time": started_at,
        "step": step,
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "commit": commit,
        "clean": clean,
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in _PACKAGES},
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "grids": list(grids),
        "data": dict(identity),
        "config": file,
        "init": str(initial) if initial else None,
        "differences": {key: list(change) for key, change in found.items()},
    }
    path = run_dir / _FILE
    with required_file(path):
        replace_file(path, "".join(f"{json.dumps(entry)}\n" for entry in [*read(run_dir), line]))
    return started_at


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first."""
    path = run_dir / _FILE
    return read_json_lines(path) if path.exists() else []


def check_last(config: Config) -> dict[str, Change]:
    """Return the settings that differ from the last start in ``run.dir``; empty before the first start.

    Raises ConfigError if a difference changes results and ``checkpoint.allow_changes`` does not list it.
    """
    from omegaconf import OmegaConf

    run_dir = Path(config.run.dir)
    starts = read(run_dir)
    if not starts:
        return {}
    path = run_dir / starts[-1]["config"]
    try:
        before: Any = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ConfigError(f"run.dir={run_dir}: {path}: {error.strerror}; restore it or set another run.name") from None
    found = changes(recorded_settings(before), recorded_settings(asdict(config)))
    check_changes(found, config.checkpoint.allow_changes, str(run_dir))
    return found


def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the clone that contains gpt4d, and whether its files are unchanged; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(CONFIG_DIR.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S).stdout

    if not (CONFIG_DIR.parent / "train.py").exists():  # an installed package, which another repository may contain
        return None, None
    try:
        with activity.unlimited():  # git has its own timeout
            return git("rev-parse", "HEAD").strip(), not git("status", "--porcelain").strip()
    except (OSError, subprocess.SubprocessError):  # no git, no clone, or a slow file system
        return None, None
