"""The watchdog: heartbeats of all ranks, the first failure of the job, and a report of what each rank waits for.

It uses the rendezvous store on a thread of its own, because a rank that is blocked in a collective with a rank that
has exited would otherwise never learn of it.
"""

import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

_HEARTBEAT_S = 1.0  # between two heartbeats
_SILENT_S = 40.0  # a rank without a heartbeat for this long is lost
_SUSPENDED_S = 10.0  # a longer pause means that the process was suspended (Ctrl-Z, laptop lid), as were the others
_SILENT_AFTER_ERROR_S = 6.0  # replaces _SILENT_S once a collective has failed, probably because of a lost rank
_RECORD_S = 10.0  # timeout for a rank to write its record
_STARTUP_S = 300.0  # for what happens once: connections, lazy initialization, compilation
PACKAGE_ROOT = str(Path(__file__).parents[1])
_LOST = "no sign of life: killed, out of memory, or its node is gone"


@dataclass
class Failure:
    """The failure that ends a job: the first rank that failed, as far as the ranks can tell."""

    rank: int
    host: str
    cause: str
    waiting: dict | None = None  # for a hang: what that rank waited for, see HangDetector.waiting
    hang: str = ""  # for a hang: the whole message, with the ranks that were missing

    def __str__(self) -> str:
        return self.hang or f"rank {self.rank} on {self.host} failed: {self.cause}"


class WatchedCollective(Protocol):
    """One collective of an axis."""

    @property
    def name(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def time(self) -> float: ...
    @property
    def parameter(self) -> object: ...


class WatchedTraffic(Protocol):
    """Collectives of one axis: how many have started, and the oldest that this rank or its GPU has not finished."""

    num_started: int

    def oldest_unfinished(self) -> WatchedCollective | None: ...


class WatchedAxis(Protocol):
    """The attributes of a mesh axis that the hang detector reads."""

    name: str
    group: dist.ProcessGroup | None

    @property
    def traffic(self) -> WatchedTraffic: ...


class HangDetector:
    """Detects collectives that take longer than a timeout.

    On a CPU the host waits for a collective. On a GPU it does not: the oldest that has not ended there counts.

    Args:
        axes: mesh axes by name.
        timeout_s: time after which a collective is a hang, once ``end_startup`` was called. Before, lazy initialization
            slows collectives, and five minutes are added.
        directory: where each rank writes what it waits for and its stack.
    """

    def __init__(self, axes: Mapping[str, WatchedAxis], timeout_s: float, directory: Path):
        self.axes, self.timeout_s, self.directory = axes, timeout_s, directory
        self.places: Mapping[int, str] = {}  # of the job's ranks, for reports: "stage 1"
        self.startup_s = _STARTUP_S
        self.main_thread = cast(int, threading.main_thread().ident)  # None only before a thread starts
        self._layers: dict[int, str] = {}
        self._oldest: dict[str, tuple[int, float]] = {}  # by axis, number of its oldest collective and since when it is

    def name_layers(self, model: nn.Module) -> None:
        """Name the layers of ``model`` in reports."""
        self._layers = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}

    def end_startup(self) -> None:
        """Apply ``timeout_s`` from now on."""
        self.startup_s = 0.0

    @property
    def limit(self) -> tuple[float, str]:
        """Seconds after which a collective is a hang, and the setting that they come from."""
        setting = "parallel.timeout_s" + (f" + {self.startup_s:.0f} s for the first steps" if self.startup_s else "")
        return self.timeout_s + self.startup_s, setting

    def waiting(self, since: float = 0.0) -> dict | None:
        """Return the collective that this rank waits for, or None: on several axes of a GPU, the one started first.

        The others may only be queued behind it. The result has its ``axis``, ``name``, ``number`` on that axis, seconds
        waited (``s``), ``layer`` and ``members`` (ranks). Seconds count from the first call that found it, and from
        ``since`` (``time.monotonic``).
        """
        now, found = time.monotonic(), list[tuple[WatchedCollective, WatchedAxis, float]]()
        for axis in self.axes.values():
            if not (collective := axis.traffic.oldest_unfinished()):
                self._oldest.pop(axis.name, None)
                continue
            number, first_seen = self._oldest.get(axis.name, (0, now))
            if number != collective.number:
                first_seen = now
            self._oldest[axis.name] = collective.number, first_seen
            found.append((collective, axis, first_seen))
        if not found:
            return None
        collective, axis, first_seen = min(found, key=lambda entry: entry[0].time)
        return {
            "axis": axis.name,
            "name": collective.name,
            "number": collective.number,
            "s": now - max(first_seen, since),
            "layer": self._layers.get(id(collective.parameter)),
            "members": dist.get_process_group_ranks(axis.group),
        }

    def record(self) -> dict:
        """Return this rank's state: collectives started on each axis, the one it waits for, code line and stack."""
        begun = {name: axis.traffic.num_started for name, axis in self.axes.items()}
        frames, python_threads = sys._current_frames(), {thread.ident for thread in threading.enumerate()}
        # Autograd runs a GPU's backward on a thread of its own, which Python has not started.
        threads = [*(ident for ident in frames if ident not in python_threads), self.main_thread]
        stacks = [traceback.extract_stack(frames[ident]) for ident in threads]
        ours = [
            f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
            for stack in stacks
            for frame in reversed(stack)
            if frame.filename.startswith(PACKAGE_ROOT)
        ]
        where = ours[0] if ours else str(stacks[-1][-1])
        text = "\n".join("".join(stack.format()) for stack in stacks)
        return {"begun": begun, "waiting": self.waiting(), "where": where, "stack": text}


class Watchdog:
    """One rank's watchdog thread. Each rank watches the next one in a ring, so the store's load grows linearly.

    Args:
        store: the job's store. No other thread may block on it.
        rank, size: this rank and the number of ranks.
        rank0_host: the host of rank 0, which is named when the store does not answer.
        on_failure: called on the watchdog's thread with the failure that ends the job.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, rank0_host: str, on_failure: Callable[[Failure], None]):
        self.store, self.rank, self.size, self.rank0_host, self.on_failure = store, rank, size, rank0_host, on_failure
        self.hang_detector: HangDetector | None = None  # set from the first collective to the end of a run
        self.record_failure: Callable[[str], None] | None = None  # writes to the run's files why the job ends
        self._limited: tuple[str, float] | None = None  # what the main thread does and its deadline
        self._stopped = threading.Event()
        self._resumed_at = 0.0  # when this process last resumed after it was suspended
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self.store.add(f"alive/{self.rank}", 1)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @contextmanager
    def limit(self, activity: str) -> Iterator[None]:
        """End the job if the body, named ``activity`` in the report, takes longer than five minutes on any rank."""
        self._limited = activity, time.monotonic() + _STARTUP_S
        try:
            yield
        finally:
            self._limited = None

    def first_failure(self) -> Failure | None:
        return Failure(**json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def fail(self, cause: str, may_be_secondary: bool) -> Failure:
        """Report that this rank has failed and return the failure that ends the job.

        Args:
            cause: the error, for the message.
            may_be_secondary: the error may only be the consequence of a lost rank. Wait until that rank is found or
                has reported its own failure; report this rank's error if neither happens.
        """
        if may_be_secondary:
            deadline = time.monotonic() + 2 * _SILENT_AFTER_ERROR_S
            while not (failure := self.first_failure()) and time.monotonic() < deadline:
                if lost := self._silent_ranks():
                    failure = self._report(Failure(lost[0], self._host(lost[0]), _LOST))
            if failure:
                return failure
        return self._report(Failure(self.rank, self._host(self.rank), cause))

    def _report(self, failure: Failure) -> Failure:
        """Store ``failure`` unless there is one already, since later ones follow from it. Return the stored one."""
        self.store.compare_set("failure", "", json.dumps(asdict(failure)))
        return cast(Failure, self.first_failure())

    def _silent_ranks(self) -> list[int]:
        """Return the ranks without a heartbeat during the next ``_SILENT_AFTER_ERROR_S`` seconds."""
        before = [self._heartbeats(rank) for rank in range(self.size)]
        self._stopped.wait(_SILENT_AFTER_ERROR_S)
        return [rank for rank in range(self.size) if rank != self.rank and self._heartbeats(rank) == before[rank]]

    def _name(self, rank: int) -> str:
        """Return a rank's number, place and host: "rank 3 (stage 1) on nid002"."""
        place = self.hang_detector and self.hang_detector.places.get(rank)
        return f"rank {rank}{f' ({place})' if place else ''} on {self._host(rank)}"

    def _host(self, rank: int) -> str:
        return self.store.get(f"host/{rank}").decode() if self.store.check([f"host/{rank}"]) else "an unknown host"

    def _heartbeats(self, rank: int) -> int:
        return self.store.add(f"alive/{rank}", 0)

    def _watch(self) -> None:
        next_rank = (self.rank + 1) % self.size
        last_count, last_change = 0, time.monotonic()
        last_check = last_change
        try:
            while not self._stopped.wait(_HEARTBEAT_S):
                self.store.add(f"alive/{self.rank}", 1)
                if failure := self.first_failure():
                    break
                now, count = time.monotonic(), self._heartbeats(next_rank)
                if now - last_check > _SUSPENDED_S:
                    last_change = self._resumed_at = now
                last_check = now
                if count != last_count:
                    last_count, last_change = count, now
                elif now - last_change > _SILENT_S:
                    failure = self._report(Failure(next_rank, self._host(next_rank), _LOST))
                    break
                if failure := self._check_for_hang():
                    break
            else:
                return
            if failure.waiting and self.hang_detector:
                failure.hang = self._describe_hang(failure, failure.waiting, self.hang_detector)
        except torch.AcceleratorError as error:  # the GPU has failed, and every question to it does
            failure = self._report(Failure(self.rank, self._host(self.rank), f"{type(error).__name__}: {error}"))
        except RuntimeError:
            failure = self.store_lost()
        if not self._stopped.is_set():
            self.on_failure(failure)

    def store_lost(self) -> Failure:
        """Return the failure of rank 0, whose process holds the store, for when the store does not answer."""
        return Failure(0, self.rank0_host, _LOST)

    def _check_for_hang(self) -> Failure | None:
        if (limited := self._limited) and time.monotonic() > max(limited[1], self._resumed_at + _STARTUP_S):
            cause = f"{limited[0]} took longer than {_STARTUP_S:.0f} s; check the network between the nodes"
            return self._report(Failure(self.rank, self._host(self.rank), cause))
        detector = self.hang_detector
        if not detector or not (waiting := detector.waiting(self._resumed_at)):
            return None
        limit_s, setting = detector.limit
        if waiting["s"] < limit_s:
            return None
        cause = f"{waiting['name']} did not finish within {limit_s:g} s ({setting})"
        return self._report(Failure(self.rank, self._host(self.rank), cause, waiting))

    def _describe_hang(self, failure: Failure, waiting: dict, detector: HangDetector) -> str:
        """Write this rank's state to its file and return the message about the hang.

        The rank that detected the hang finds out which ranks are missing and shares the message through the store.
        """
        directory, record = detector.directory, detector.record()
        text = f"{self._name(self.rank)}\ncollectives started on each axis: {record['begun']}\n"
        text += f"waiting for: {record['waiting']}\n\n{record.pop('stack')}"
        with suppress(OSError):  # a disk that is full or gone must not keep the job from ending
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"rank_{self.rank:05d}.txt").write_text(text)
        self.store.set(f"record/{self.rank}", json.dumps(record))
        if failure.rank == self.rank:
            missing = "; ".join(self._missing_ranks(waiting)) or "all ranks of the axis have started it"
            layer = f" of {waiting['layer']}" if waiting["layer"] else ""
            self.store.set(
                "hang",
                f"hang: {self._name(failure.rank)} waited {waiting['s']:.0f} s ({detector.limit[1]}) for "
                f"{waiting['name']}{layer}: {missing}; see {directory} for the stack of each rank",
            )
        return self.store.get("hang").decode() if self._wait_for_key("hang", 2 * _RECORD_S) else str(failure)

    def _missing_ranks(self, waiting: dict) -> Iterator[str]:
        """Yield a phrase for each rank of the axis that has not started the collective, with where it is instead.

        If such a rank waits itself, on another axis, it is the fault of a rank that this one waits for; so is it if all
        ranks of the axis have started the collective.
        """
        unexplained, explained, missing = deque([waiting]), set[tuple](), False
        late = list[str]()  # ranks that have not started something because they wait themselves
        while unexplained and not missing:
            waiting = unexplained.popleft()
            key = waiting["axis"], waiting["number"], *waiting["members"]
            if key in explained:
                continue
            explained.add(key)
            it = "it" if len(explained) == 1 else waiting["name"]
            for rank in waiting["members"]:
                name = self._name(rank)
                if not self._wait_for_key(f"record/{rank}", _RECORD_S):
                    missing = True
                    yield f"{name} does not answer"
                    continue
                record = json.loads(self.store.get(f"record/{rank}"))
                phrase = f"{name} has not started {it} and is in {record['where']}"
                started = record["begun"][waiting["axis"]] >= waiting["number"]
                if record["waiting"]:
                    unexplained.append(record["waiting"])
                    late += [] if started else [phrase]
                elif not started:
                    missing = True
                    yield phrase
        if not missing:
            yield from late

    def _wait_for_key(self, key: str, timeout_s: float) -> bool:
        """Return whether ``key`` is in the store within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while not (exists := self.store.check([key])) and time.monotonic() < deadline and not self._stopped.wait(0.1):
            pass
        return exists
