"""The trackers of ``logging.trackers``: checks of their packages and settings, and their start."""

import os
import re
import uuid
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from gpt4d.config import Config, ConfigError
from gpt4d.runtime import activity
from gpt4d.runtime.files import read_regular
from gpt4d.runtime.writing import replace_file, required_file
from gpt4d.trackers.mlflow import MlflowTracker
from gpt4d.trackers.run_trackers import RunTrackers
from gpt4d.trackers.tensorboard import TensorBoardTracker
from gpt4d.trackers.tracker import Tracker
from gpt4d.trackers.trackio import TrackioTracker
from gpt4d.trackers.wandb import WandbTracker


class _Entry(NamedTuple):
    start: Callable[[Config, Path, str], Tracker]
    modules: Sequence[str]  # modules that it imports
    install: str  # what pip installs for it


_TRACKERS = {
    "tensorboard": _Entry(TensorBoardTracker, ("tensorboard",), "'gpt4d[tensorboard]'"),
    "wandb": _Entry(WandbTracker, ("wandb",), "wandb"),
    "trackio": _Entry(TrackioTracker, ("trackio",), "'gpt4d[trackio]'"),
    "mlflow": _Entry(MlflowTracker, ("mlflow", "sqlalchemy", "alembic"), "'gpt4d[mlflow]'"),
}


def check_trackers(config: Config) -> None:
    """Raise ConfigError if a package of ``logging.trackers`` is missing, or a setting that a tracker needs."""
    logging = config.logging
    for name in logging.trackers:
        if missing := [module for module in _TRACKERS[name].modules if find_spec(module) is None]:
            raise ConfigError(
                f"logging.trackers=[{name}]: the package {missing[0]} is not installed; run pip install "
                f"{_TRACKERS[name].install}"
            )
    if logging.trackers and not logging.project:
        raise ConfigError("logging.project='': trackers need a name of the project; set it, or leave it out")
    if "mlflow" in logging.trackers and logging.online and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            "logging.online=true: logging.trackers=[mlflow] has no server; set the environment variable "
            "MLFLOW_TRACKING_URI, or logging.online=false"
        )


def start_trackers(config: Config, run_dir: Path, earlier: Sequence[dict]) -> RunTrackers:
    """Start the trackers of ``logging.trackers``.

    Args:
        config: the configuration of the run.
        run_dir: the run's directory. Its file ``run_id`` has the id of the run for all restarts and trackers.
        earlier: the lines of metrics.jsonl that earlier starts of the run have written.

    Raises ConfigError if a tracker cannot be started.
    """
    logging, trackers = config.logging, dict[str, Tracker]()
    if not logging.trackers:
        return RunTrackers({}, earlier)
    run_id = _run_id(run_dir)
    for name in dict.fromkeys(logging.trackers):
        if logging.online and name != "tensorboard":
            print(f"logging.online=true: connecting {name} to its server", flush=True)
        try:
            with activity.unlimited():  # packages have their own timeouts
                trackers[name] = _TRACKERS[name].start(config, run_dir, run_id)
        except (Exception, SystemExit) as error:  # no key, no network, an invalid project
            RunTrackers(trackers, ()).close(briefly=True)
            raise ConfigError(
                f"logging.trackers=[{name}] logging.project={logging.project} "
                f"logging.online={str(logging.online).lower()}: {name} reports {' '.join(str(error).split())!r}; "
                f"correct it, or leave {name} out"
            ) from None
    return RunTrackers(trackers, earlier)


def _run_id(run_dir: Path) -> str:
    """Return the id of the run, which its first start has chosen."""
    path = run_dir / "run_id"
    with required_file(path):
        found = read_regular(path).decode("ascii", "replace")
        if not re.fullmatch("[0-9a-f]{12}", found):  # a new run, or a damaged file
            found = uuid.uuid4().hex[:12]
            replace_file(path, found)
        return found
