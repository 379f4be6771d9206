"""The trackers of ``logging.trackers``: their start, and the reports of a run to all of them."""

import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from gpt4d.config import Config, ConfigError, flattened
from gpt4d.runtime import activity
from gpt4d.runtime.errors import warn
from gpt4d.runtime.files import read_regular, replace_file, required_file
from gpt4d.trackers.backends import MlflowTracker, TensorBoardTracker, Tracker, TrackioTracker, WandbTracker

_NOT_IN_TAGS = re.compile(r"[^-/\w.]")  # characters that TensorBoard replaces, and MLflow partly rejects
_SEPARATOR = re.compile(r"\.*/[./]*")  # MLflow rejects a//b and a/../b
END_S, STOP_S = 45.0, 8.0  # timeouts for trackers to write everything: after the last step, after a signal
_WAITING = 10_000  # maximum number of lines that wait for a tracker
_KEPT = "metrics.jsonl has all values"


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


class RunTrackers:
    """Sends the lines of metrics.jsonl to trackers.

    Each tracker has a thread, so a slow tracker delays neither a step nor another tracker. A tracker that fails gets no
    other lines, and the training continues. A restart repeats steps if its checkpoint is older than the last line.
    Repeated steps are not sent again, so each tracker has one curve.

    Args:
        trackers: the started trackers by name.
        earlier: the lines of earlier starts of the run.

    Attributes:
        hang: whether a tracker has not ended in time. Its package may also block the end of Python.
    """

    def __init__(self, trackers: Mapping[str, Tracker], earlier: Sequence[dict]):
        self._last_step = max((line.get("step", 0) for line in earlier), default=0)
        self._events = {line.get("event") for line in earlier if line.get("step", 0) == self._last_step}
        self._senders = [_Sender(name, tracker) for name, tracker in trackers.items()]
        self.hang = False

    def log(self, values: Mapping[str, Any]) -> None:
        """Send the numbers of a line, and text and image of a sample."""
        step, event = values.get("step", 0), values.get("event")
        if not self._senders or step < self._last_step or (step == self._last_step and event in self._events):
            return
        scalars = {
            tag(key, event): float(value)
            for key, value in flattened(values, "/").items()
            if isinstance(value, int | float) and key != "step"
        }
        if scalars:
            self._send(lambda tracker: tracker.scalars(scalars, step))
        if event == "sample":
            if text := values.get("text"):
                self._send(lambda tracker: tracker.text("sample/text", text, step))
            if (image := values.get("image")) and Path(image).is_file():
                self._send(lambda tracker: tracker.image("sample/image", Path(image), step))

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for sender in self._senders:
            sender.send(call)

    def close(self, briefly: bool = False) -> None:
        """Wait until everything is sent and written, at most for ``END_S``. A second call does nothing.

        ``briefly``: after a signal or an error, at most for ``STOP_S``.
        """
        deadline = time.monotonic() + (STOP_S if briefly else END_S)
        for sender in self._senders:
            sender.finish()
        with activity.unlimited():
            for sender in self._senders:
                self.hang |= not sender.ended(max(0.0, deadline - time.monotonic()))
        self._senders = []


class _Sender:
    """Calls one tracker on a thread. Whatever the tracker does costs a warning."""

    def __init__(self, name: str, tracker: Tracker):
        self.name, self._tracker = name, tracker
        self._calls: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()  # None: the last call
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[Tracker], None]) -> None:
        if not self._thread.is_alive():
            return
        if self._calls.qsize() < _WAITING:
            self._calls.put(call)
            return
        if not self._dropped:
            warn(f"{self.name}: it is slow or does not answer; lines are dropped while {_WAITING:,} wait, and {_KEPT}")
        self._dropped += 1

    def finish(self) -> None:
        self._calls.put(None)

    def ended(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the tracker to end, and return whether it has."""
        self._thread.join(timeout_s)
        hangs = self._thread.is_alive()
        if hangs:
            waiting = self._dropped + self._calls.qsize()
            warn(f"{self.name}: does not answer; about {waiting:,} line(s) are not sent, and {_KEPT}")
        elif self._dropped:
            warn(f"{self.name}: {self._dropped:,} line(s) were dropped; {_KEPT}")
        return not hangs

    def _work(self) -> None:
        try:
            for call in iter(self._calls.get, None):
                call(self._tracker)
            self._tracker.close()
        except BaseException as error:  # also SystemExit, which ends a thread without a message
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            warn(f"{self.name}: {problem}; nothing more is logged to it, and {_KEPT}")


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


def tag(key: str, event: str | None = None) -> str:
    """Return the tag of a number, which is the same in every tracker: ``comm/x/bytes``, ``validation/loss``."""
    return _SEPARATOR.sub("/", _NOT_IN_TAGS.sub("_", f"{event}/{key}" if event else key))
