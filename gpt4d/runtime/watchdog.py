"""What ranks tell each other outside of their collectives: that they live, that one has failed, what each waits for.

All of it goes through the store the ranks met at, on a thread of its own: a rank that waits in a collective for one
that is gone would never learn it otherwise.
"""

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch.distributed as dist
from torch import nn

_BEAT_S = 1.0  # between two signs of life
_SILENT_S = 40.0  # without any from a rank, it counts as lost
_STOPPED_S = 10.0  # between two looks: this process was stopped, by Ctrl-Z or a laptop's lid, and the others with it
_MISSED_S = 6.0  # the same, once a collective has failed because of some rank
_RECORDS_S = 10.0  # for a rank to write down what it waits for
PACKAGE_ROOT = str(Path(__file__).parents[1])
_LOST = "no sign of life: killed, out of memory, or its node is gone"


@dataclass
class Failure:
    """Why a job ends: the first rank that failed, as far as anyone knows."""

    rank: int
    host: str
    cause: str
    waiting: dict | None = None  # a hang: what that rank waited for
    hang: str = ""  # and who kept it waiting

    def __str__(self) -> str:
        return self.hang or f"rank {self.rank} on {self.host} failed: {self.cause}"


class WatchedTraffic(Protocol):
    """Collectives of one axis: how many have begun, and the one that this rank waits for now."""

    num_started: int
    current_wait: tuple[str, int, float] | None  # name, number, since when


class WatchedAxis(Protocol):
    """What the hang detector reads of a mesh axis."""

    group: dist.ProcessGroup | None
    traffic: WatchedTraffic


class HangDetector:
    """What a hang is during training, and where what each rank waited for is written to."""

    def __init__(self, axes: Mapping[str, WatchedAxis], model: nn.Module, timeout_s: float, directory: Path):
        self.axes = axes
        self.timeout_s, self.directory = timeout_s, directory
        if next(model.parameters()).is_cuda:  # a GPU's collectives are watched over by NCCL, with its flight recorder
            for axis in self.axes.values():
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), axis.group)
        self.main = threading.main_thread().ident
        self.names = {id(part): name for name, part in (*model.named_modules(), *model.named_parameters()) if name}

    def waiting(self, at_least_s: float = 0.0, since: float = 0.0) -> dict | None:
        """The collective that this rank has waited for so long: its axis, name and number there, and its layer.

        What it waited before ``since`` does not count.
        """
        for axis in self.axes.values():
            now = axis.traffic.current_wait
            if now and (waited := time.monotonic() - max(now[2], since)) >= at_least_s:
                name, number, _ = now
                found = {"axis": axis.name, "name": name, "number": number, "s": waited, "layer": self._layer()}
                return {**found, "members": dist.get_process_group_ranks(axis.group)}
        return None

    def record(self) -> dict:
        """What this rank is about: how many collectives it has begun on each axis, which it waits for, where it is."""
        begun = {name: axis.traffic.num_started for name, axis in self.axes.items()}
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        ours = [f"{Path(f.filename).name}:{f.lineno} ({f.name})" for f in stack if f.filename.startswith(PACKAGE_ROOT)]
        where = ours[-1] if ours else str(stack[-1])
        return {"begun": begun, "waiting": self.waiting(), "where": where, "stack": "".join(stack.format())}

    def _layer(self) -> str | None:
        """The innermost layer or parameter that any thread is about: autograd's has the backward on a GPU."""
        for frame in sys._current_frames().values():
            if found := self._layer_of(frame):
                return found
        return None

    def _layer_of(self, frame: FrameType | None) -> str | None:
        while frame:
            for value in (*frame.f_locals.values(), getattr(frame.f_locals.get("ctx"), "weight", None)):
                if id(value) in self.names:
                    return self.names[id(value)]
            frame = frame.f_back
        return None


class Watchdog:
    """One rank's part in watching over the job. ``ended`` is called, on the watching thread, with what the job ends of.

    Ranks watch in a ring, each its next, so that no store is asked for all by all.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, first_host: str, ended: Callable[[Failure], None]):
        self.store, self.rank, self.size, self.first_host, self.ended = store, rank, size, first_host, ended
        self.guard: HangDetector | None = None
        self._over = threading.Event()
        self._went_on = 0.0  # when this process was last stopped, and went on
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        self.store.add(f"alive/{self.rank}", 1)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def first_failure(self) -> Failure | None:
        return Failure(**json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def fail(self, cause: str, of_another: bool) -> Failure:
        """Tells all that this rank has failed, unless another had before. ``of_another``: for it may have lost one.

        Returns what the job fails of.
        """
        if of_another:
            deadline = time.monotonic() + 2 * _MISSED_S
            while not (failure := self.first_failure()) and time.monotonic() < deadline:
                if lost := self._silent():
                    failure = self._tell(Failure(lost[0], self._host(lost[0]), _LOST))
            if failure:
                return failure
        return self._tell(Failure(self.rank, self._host(self.rank), cause))

    def _tell(self, failure: Failure) -> Failure:
        """The first to tell is right: what others meet comes of it."""
        self.store.compare_set("failure", "", json.dumps(asdict(failure)))
        return self.first_failure()

    def _silent(self) -> list[int]:
        """The ranks that give no sign of life for a while."""
        before = [self._beats(rank) for rank in range(self.size)]
        self._over.wait(_MISSED_S)
        return [rank for rank in range(self.size) if self._beats(rank) == before[rank]]

    def _host(self, rank: int) -> str:
        return self.store.get(f"host/{rank}").decode() if self.store.check([f"host/{rank}"]) else "an unknown host"

    def _beats(self, rank: int) -> int:
        return self.store.add(f"alive/{rank}", 0)

    def _watch(self) -> None:
        next_rank = (self.rank + 1) % self.size
        beats, changed = 0, time.monotonic()
        looked = changed
        try:
            while not self._over.wait(_BEAT_S):
                self.store.add(f"alive/{self.rank}", 1)
                if failure := self.first_failure():
                    break
                now, seen = time.monotonic(), self._beats(next_rank)
                if now - looked > _STOPPED_S:
                    changed = self._went_on = now
                looked = now
                if seen != beats:
                    beats, changed = seen, now
                elif now - changed > _SILENT_S:
                    failure = self._tell(Failure(next_rank, self._host(next_rank), _LOST))
                    break
                if failure := self._hang():
                    break
            else:
                return
            if failure.waiting and self.guard:
                failure.hang = self._explained(failure)
        except RuntimeError:
            failure = self.store_lost()
        if not self._over.is_set():
            self.ended(failure)

    def store_lost(self) -> Failure:
        """What it means that the store does not answer."""
        return Failure(0, self.first_host, _LOST)

    def _hang(self) -> Failure | None:
        guard = self.guard
        waiting = guard and guard.waiting(guard.timeout_s, self._went_on)
        if not waiting:
            return None
        cause = f"{waiting['name']} was not over after {guard.timeout_s:g} s (parallel.timeout_s)"
        return self._tell(Failure(self.rank, self._host(self.rank), cause, waiting))

    def _explained(self, failure: Failure) -> str:
        """Writes down what this rank is about. The rank that noticed finds out who kept it waiting, and tells all."""
        directory = self.guard.directory
        record = self.guard.record()
        text = f"rank {self.rank} on {self._host(self.rank)}, begun on each axis {record['begun']}, waits for "
        text += f"{record['waiting']}\n\n{record.pop('stack')}"
        with suppress(OSError):  # a disk that is full or gone must not keep the job from ending
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"rank_{self.rank:05d}.txt").write_text(text)
        self.store.set(f"record/{self.rank}", json.dumps(record))
        if failure.rank == self.rank:
            missing = "; ".join(self._missing(failure.waiting)) or "all ranks of the axis have begun it"
            waiting = failure.waiting
            layer = f" of {waiting['layer']}" if waiting["layer"] else ""
            self.store.set(
                "hang",
                f"hang: rank {failure.rank} on {failure.host} waited {waiting['s']:.0f} s (parallel.timeout_s) for "
                f"{waiting['name']}{layer}: {missing}. What each rank was about: {directory}",
            )
        return self.store.get("hang").decode() if self._there("hang", 2 * _RECORDS_S) else str(failure)

    def _missing(self, waiting: dict) -> Iterator[str]:
        """Who of the ranks of the axis has not come to the collective, and where it is instead."""
        for rank in waiting["members"]:
            who = f"rank {rank} on {self._host(rank)}"
            if not self._there(f"record/{rank}", _RECORDS_S):
                yield f"{who} does not answer"
                continue
            record = json.loads(self.store.get(f"record/{rank}"))
            if record["begun"][waiting["axis"]] < waiting["number"]:
                yield f"{who} has not begun it, it is in {record['where']}"

    def _there(self, key: str, patience_s: float) -> bool:
        """Whether a key is in the store, soon."""
        deadline = time.monotonic() + patience_s
        while not (there := self.store.check([key])) and time.monotonic() < deadline and not self._over.wait(0.1):
            pass
        return there
