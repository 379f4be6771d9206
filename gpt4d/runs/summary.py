"""The state, progress and settings of runs, and the differences between runs."""

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpt4d.config import Change, ConfigError, Effect, effect_of, flattened
from gpt4d.runs import lock, starts
from gpt4d.runs.history import History, Point
from gpt4d.runtime.files import required_file

_NOT_RUNS = {"checkpoints", "configs", "traces", "hang"}  # directories inside a run
_RECENT_S = 120.0
AVERAGED_LINES = 10  # logged training losses per reported mean
_IDENTITY = ("model.name", "data.name")


class State(StrEnum):
    """The state of a run, as lists of runs show it."""

    NEW = "new"  # imported, or never started
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"  # the same command resumes it
    FAILED = "failed"
    UNREADABLE = "unreadable"


def state_of(history: History, locked: bool, holder: lock.Holder | None, now: float, host: str) -> State:
    """Return the state of a run.

    Args:
        history: the run's history.
        locked: whether another process holds the run's lock.
        holder: the process that holds or has held the lock.
        now: the time in seconds since 1970.
        host: the name of this host.
    """
    if locked:
        return State.RUNNING
    if history.unreadable:
        return State.UNREADABLE
    if not history.started:
        return State.NEW
    if history.ending:
        return {"done": State.FINISHED, "signal": State.INTERRUPTED, "failed": State.FAILED}[history.ending]
    # A file system may not show locks of other hosts.
    elsewhere = holder is not None and holder.host != host
    recent = history.time is not None and now - history.time < _RECENT_S
    return State.RUNNING if elsewhere and recent else State.INTERRUPTED


@dataclass
class Run:
    """A run directory. ``update`` reads the changes since the last call."""

    path: Path

    def __post_init__(self) -> None:
        self.history = History(self.path)
        self.settings: dict[str, Any] = {}  # values of the newest start by key; empty before the first start
        self._read_at: float | None = None  # time of the config.yaml with these settings
        self._unreadable: str | None = None  # why it cannot be read
        self.update()

    def update(self) -> None:
        # Read the lock before the history: a run that ends in between has then written its last event.
        locked, holder = lock.is_locked(self.path), lock.last_holder(self.path)
        self.history.update()
        self.state = state_of(self.history, locked, holder, time.time(), socket.gethostname())

        self._update_settings()

    def _update_settings(self) -> None:
        path = self.path / "config.yaml"
        try:
            with required_file(path):
                changed_at = path.stat().st_mtime if os.path.lexists(path) else None
            if changed_at != self._read_at:
                self._read_at, self.settings, self._unreadable = changed_at, {}, None
                self.settings = flattened(starts.read_settings(path), ".") if changed_at is not None else {}
        except ConfigError as error:
            self._unreadable = str(error)

    @property
    def problem(self) -> str | None:
        """The error of the newest start, or why a file of the run cannot be read."""
        return self.history.problem or self.history.unreadable or self._unreadable

    @property
    def steps(self) -> int | None:
        """The number of steps of the newest start."""
        steps = self.settings.get("train.steps")
        return steps if isinstance(steps, int) else None

    @property
    def loss(self) -> float | None:
        """The mean training loss of the last ten logged steps."""
        last = list(self.history.training.values())[-AVERAGED_LINES:]
        return sum(point.loss for point in last) / len(last) if last else None

    @property
    def validation_loss(self) -> float | None:
        """The last loss of the held-out data."""
        return _last(self.history.validation)

    @property
    def set_losses(self) -> dict[str, float | None]:
        """The last loss of each additional validation set, by the name of the set."""
        return {name: _last(losses) for name, losses in self.history.sets.items()}

    @property
    def left_s(self) -> float | None:
        """The seconds that a running job still needs."""
        if self.state is not State.RUNNING or not self.steps or self.history.step_time_s is None:
            return None
        return (self.steps - self.history.step) * self.history.step_time_s

    def to_json(self) -> dict[str, Any]:
        history = self.history
        return {
            "run": str(self.path),
            "state": self.state.value,
            "step": history.step,
            "steps": self.steps,
            "loss": self.loss,
            "validation_loss": self.validation_loss,
            "validation_sets": self.set_losses,
            f"{history.unit}_per_s": history.per_s,
            "time": history.time,
            "elapsed_s": max((point.elapsed_s for point in history.training.values()), default=None),
            "problem": self.problem,
        }


def _last(losses: dict[int, Point]) -> float | None:
    return next((point.loss for point in reversed(losses.values())), None)


def find_runs(directories: Iterable[Path], known: Iterable[Run] = ()) -> list[Run]:
    """Return the runs in and below ``directories``, sorted by path. Raises ConfigError for a directory without runs.

    ``known`` runs are updated, which is faster than reading their files again.
    """
    found: dict[Path, Run] = {}
    by_path = {run.path: run for run in known}
    for run in by_path.values():
        run.update()
    for directory in directories:
        if not os.path.isdir(directory):
            raise ConfigError(f"{directory}: no such directory; pass a run or a directory of runs")
        paths = []
        for root, inner, _ in os.walk(directory):
            inner[:] = set(inner) - _NOT_RUNS
            paths += [Path(root)] * is_run(Path(root))
        if not paths:
            raise ConfigError(f"{directory}: no run in it or below; pass a run or a directory of runs")
        found |= {path: by_path.get(path) or Run(path) for path in sorted(paths) if path not in found}
    return list(found.values())


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run directory."""
    return any(os.path.lexists(path / name) for name in ("metrics.jsonl", "starts.jsonl", "checkpoints"))


def open_run(path: Path) -> Run:
    """Return the run at ``path``. Raises ConfigError if there is no run."""
    if not is_run(path):
        raise ConfigError(f"{path}: not a run; pass a directory with metrics.jsonl")
    return Run(path)


def differing_keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between runs, given the settings of each run.

    Settings that depend on the model and on the data are compared between runs of the same model and data. The result
    omits keys that cannot change a number, and the planner's description of the machine.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for settings in runs:
        groups.setdefault(tuple(settings.get(key) for key in _IDENTITY), []).append(settings)
    found = dict.fromkeys(key for key in _IDENTITY if len({settings.get(key) for settings in runs if settings}) > 1)
    for group in groups.values():
        for key in dict.fromkeys(key for settings in group for key in settings):
            differs = len({repr(settings[key]) for settings in group if key in settings}) > 1
            if differs and not key.startswith("cluster.") and effect_of(key) is not Effect.NONE:
                found[key] = None
    return list(found)


def differences(first: Run, second: Run) -> dict[str, Change]:
    """Return the differences between the newest starts of two runs: settings, commit, versions, grids, data."""
    described = []
    for run in (first, second):
        start: dict[str, Any] = next(reversed(starts.read(run.path)), {})
        settings = {key: value for key, value in run.settings.items() if not key.startswith("run.")}
        code = {key: start.get(key) for key in ("commit", "clean")}
        others = {name: start.get(key, {}) for name, key in (("version of", "versions"), ("identity of", "data"))}
        named = {f"{name} {key}": value for name, values in others.items() for key, value in values.items()}
        described.append(settings | code | named | {key: start.get(key) for key in ("grids", "hosts")})
    before, after = described
    keys = dict.fromkeys([*before, *after])
    return {key: Change(before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
