"""The starts of a run: ``starts.jsonl`` has one line for each, and ``configs/`` its configuration. No torch here."""

import io
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
from typing import Any, cast

import yaml

from gpt4d.config import CONFIG_DIR, Change, Config, ConfigError, changes, check_changes, recorded_settings
from gpt4d.runtime import activity
from gpt4d.runtime.files import open_regular, read_json_lines, read_log, replace_file, required_file

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
    path = run_dir / _FILE
    earlier = read_log(path)
    number = len(earlier) + 1
    file = f"configs/{number:04}.yaml"
    for settings in (run_dir / file, run_dir / "config.yaml"):
        with required_file(settings):
            settings.parent.mkdir(exist_ok=True)
            replace_file(settings, OmegaConf.to_yaml(OmegaConf.structured(config)))
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
    with required_file(path):
        replace_file(path, "".join(f"{json.dumps(entry)}\n" for entry in [*earlier, line]))
    return started_at


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first. Raises ConfigError if its file cannot be read."""
    path = run_dir / _FILE
    with required_file(path):
        return read_json_lines(path)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a config.yaml, as nested dictionaries. Raises ConfigError if they cannot be read."""
    from omegaconf import OmegaConf

    with required_file(path), open(path, "rb", opener=open_regular) as file:
        content = file.read()
    try:
        text = content.decode()
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has aliases of YAML, which can expand to gigabytes")
        values = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        if not isinstance(values, dict):
            raise TypeError("it has no keys")
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: damaged ({type(error).__name__}: {reason}); restore or remove it") from None
    return cast(dict[str, Any], values)


def check_last(config: Config) -> dict[str, Change]:
    """Return the settings that differ from the last start in ``run.dir``; empty before the first start.

    Raises ConfigError if a difference changes results and ``checkpoint.allow_changes`` does not list it.
    """
    run_dir = Path(config.run.dir)
    file = next((start["config"] for start in reversed(read(run_dir)) if "config" in start), None)
    if file is None:
        return {}
    try:
        before = read_settings(run_dir / file)
        if not before:
            raise ConfigError(f"{run_dir / file}: empty; restore it")
    except ConfigError as error:
        raise ConfigError(f"run.dir={run_dir}: {error}, or set another run.name") from None
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
