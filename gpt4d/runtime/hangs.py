"""Detection of hangs, waits that exceed a timeout, and a report of the ranks that cause them."""

import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch.distributed as dist
from torch import nn

from gpt4d.runtime.activity import MAIN, SAVE, Activity, Track
from gpt4d.runtime.rendezvous import DeadlineStore

STARTUP_S = 300.0  # additional time for connections, lazy initialization and compilation
MIN_LIMIT_S = 10.0  # replaces parallel.timeout_s if that is shorter: file systems may be slow for some seconds
_BUSY = 0.001  # minimum CPU share of a working thread; a thread that uses a slow disk exceeds it
PACKAGE_ROOT = str(Path(__file__).parents[1])
_INFRASTRUCTURE = tuple(str(Path(PACKAGE_ROOT, name)) for name in ("runtime/activity.py", "runtime/consensus.py"))
_RECORD_S = 10.0  # timeout for a rank to write its record
_MIN_SILENCE_S = 1.0  # a rank without a record and without a heartbeat for this long does not answer
_MOST_NAMED = 4  # maximum number of ranks in a message


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
    """Collectives of one axis: the number started, and the oldest one that this rank or its GPU has not finished."""

    num_started: int

    def oldest_unfinished(self) -> WatchedCollective | None: ...


class WatchedAxis(Protocol):
    """The attributes of a mesh axis that the hang detector reads."""

    name: str
    group: dist.ProcessGroup | None

    @property
    def traffic(self) -> WatchedTraffic: ...


class ActivityWatch:
    """Watches one track. The watchdog calls it with every heartbeat.

    A working rank has no time limit while it makes progress: its thread computes, or it calls ``activity.progress``.
    The ranks add up their progress in the store, because one rank's progress extends the wait of all ranks.
    """

    def __init__(self, track: Track):
        self.track = track
        self._activity: Activity | None = None
        self._progress, self._cpu_s, self._sampled_at = 0, 0.0, 0.0  # the activity's state at the last heartbeat
        self._count, self._changed_at = -1, 0.0  # progress of all ranks, and when it last increased

    def progressed(self) -> bool | None:
        """Return whether this rank's activity has progressed since the last call; None if it is new or absent."""
        activity, before = self.track.current, self._activity
        self._activity = activity
        if activity is None:
            return None
        now, cpu_s = time.monotonic(), _cpu_seconds(activity.thread)
        computes = cpu_s - self._cpu_s > _BUSY * (now - self._sampled_at)
        progressed = activity.unlimited or activity.progress != self._progress or (computes and not activity.waits)
        self._progress, self._cpu_s, self._sampled_at = activity.progress, cpu_s, now
        return progressed if activity is before else None

    def note(self, count: int) -> None:
        """Record ``count``, the total progress of all ranks of the job."""
        if count != self._count:
            self._count, self._changed_at = count, time.monotonic()

    def waiting(self, since: float) -> dict | None:
        """Return this rank's activity and the seconds since any rank made progress; None between activities.

        The keys are the keys of HangDetector.waiting and ``works``, whether this rank works itself. Seconds count from
        ``since`` (``time.monotonic``) or later.
        """
        activity = self.track.current
        if activity is None:
            return None
        return {
            "axis": self.track.name,
            "name": activity.name,
            "number": activity.number,
            "s": time.monotonic() - max(activity.started, self._changed_at, since),
            "layer": None,
            "works": not activity.waits,
        }

    def where(self) -> str | None:
        """Return the code line that this rank's activity is in; None between activities."""
        return code_line([stack(activity.thread)]) if (activity := self.track.current) else None


def stack(thread: int) -> traceback.StackSummary:
    """Return the current stack of the thread with this identifier."""
    return traceback.extract_stack(sys._current_frames().get(thread))


def code_line(stacks: list[traceback.StackSummary]) -> str:
    """Return the innermost line of gpt4d's code in the first stack that has one: ``optim.py:40 (update)``."""
    ours = [
        f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"
        for frames in stacks
        for frame in reversed(frames)
        if frame.filename.startswith(PACKAGE_ROOT) and frame.filename not in _INFRASTRUCTURE
    ]
    return ours[0] if ours else str(stacks[-1][-1])


def _cpu_seconds(thread: int) -> float:
    """Return the CPU time of a thread, or of the process if the system does not report threads."""
    if not hasattr(time, "pthread_getcpuclockid"):  # macOS
        return time.process_time()
    if thread not in {running.ident for running in threading.enumerate()}:  # an ended thread has no clock
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


class HangDetector:
    """Detects collectives that take longer than a timeout, and activities that make no progress for as long.

    On a CPU the host waits for a collective. On a GPU the host does not wait: the oldest unfinished collective counts.

    Args:
        axes: mesh axes by name.
        timeout_s: time after which a collective is a hang, once ``end_startup`` was called. Before, lazy initialization
            slows collectives, and five minutes are added.
        directory: the directory to which each rank writes its current wait and its stack.
        places: location of each rank in reports, such as "stage 1".
    """

    def __init__(
        self,
        axes: Mapping[str, WatchedAxis],
        timeout_s: float,
        directory: Path,
        places: Mapping[int, str] | None = None,
    ):
        self.axes, self.timeout_s, self.directory, self.places = axes, timeout_s, directory, places or {}
        self.ranks = list(range(dist.get_world_size() if dist.is_initialized() else 1))
        self.activities = {track.name: ActivityWatch(track) for track in (MAIN, SAVE)}
        self._in_first_steps = False
        self.peer_lost = False  # a collective of this rank has failed, and it looks for the responsible rank
        self.startup_s = STARTUP_S
        self.main_thread = cast(int, threading.main_thread().ident)  # None only before a thread starts
        self._layers: dict[int, str] = {}
        self._oldest: dict[str, tuple[int, float]] = {}  # oldest collective per axis: number, first seen

    def name_layers(self, model: nn.Module) -> None:
        """Name the layers of ``model`` in reports."""
        self._layers = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}

    def begin_steps(self) -> None:
        """Allow more time for the first steps, in which ranks wait for each other's compilation."""
        self._in_first_steps = True

    def end_startup(self) -> None:
        """Apply ``timeout_s`` from now on."""
        self.startup_s, self._in_first_steps = 0.0, False

    def limit(self, waiting: Mapping) -> tuple[float, str]:
        """Return the seconds after which a wait (``waiting``) is a hang, and the setting that determines them."""
        startup_s, seconds, setting = self.startup_s, self.timeout_s, "parallel.timeout_s"
        if waiting["axis"] in self.activities:
            startup_s = self.startup_s if self._in_first_steps else 0.0
            if seconds < MIN_LIMIT_S:
                seconds, setting = MIN_LIMIT_S, "the shortest limit"
        return seconds + startup_s, setting + (f" + {startup_s:.0f} s for the first steps" if startup_s else "")

    def overdue(self, since: float) -> dict | None:
        """Return a wait of this rank that is a hang, or an activity in which no rank progresses; otherwise None.

        ``since``: as for ``waiting``.
        """
        found = [self.waiting(since), *(self._activity(name, since) for name in self.activities)]
        return next((waiting for waiting in found if waiting and waiting["s"] >= self.limit(waiting)[0]), None)

    def waiting(self, since: float = 0.0) -> dict | None:
        """Return the collective that this rank waits for, or None.

        If a GPU has unfinished collectives on several axes, the one started first is returned, since later ones may be
        queued behind it. The result has its ``axis``, ``name``, ``number`` on that axis, seconds waited (``s``),
        ``layer`` and ``members`` (ranks). Seconds count from the first call that found it, or from ``since``
        (``time.monotonic``) if that is later.
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

    def _activity(self, name: str, since: float = 0.0) -> dict | None:
        if waiting := self.activities[name].waiting(since):
            waiting["members"] = self.ranks
        return waiting

    def record(self) -> dict:
        """Return this rank's state, for the report.

        ``begun`` is the number of collectives started on each axis, and of activities on each track whose work is done.
        ``waiting`` and ``where`` contain the wait and the code line of each track's thread, by the track's name. If the
        save thread is idle, they contain the main thread's values. ``stack`` contains the stacks of both threads.
        """
        begun = {name: axis.traffic.num_started for name, axis in self.axes.items()}
        begun |= {name: watch.track.finished for name, watch in self.activities.items()}
        activities = {name: self._activity(name) for name in self.activities}
        waits = {name: activity and (None if activity["works"] else activity) for name, activity in activities.items()}
        frames, python_threads = sys._current_frames(), {thread.ident for thread in threading.enumerate()}
        # Autograd runs a GPU's backward on a separate thread, which Python has not started.
        threads = [*(ident for ident in frames if ident not in python_threads), self.main_thread]
        stacks = [traceback.extract_stack(frames[ident]) for ident in threads]
        main, line = self.waiting() or waits[MAIN.name], code_line(stacks)
        if self.peer_lost:
            main = {"axis": MAIN.name, "name": "the lost rank", "number": 0, "members": self.ranks, "works": False}
        saving = SAVE.current
        if saving:
            stacks.append(stack(saving.thread))
        return {
            "begun": begun,
            "waiting": {MAIN.name: main, SAVE.name: waits[SAVE.name] if saving else main},
            "where": {MAIN.name: line, SAVE.name: self.activities[SAVE.name].where() or line},
            "stack": "\n".join("".join(frames.format()) for frames in stacks),
        }


class HangDescription(NamedTuple):
    """The message about a hang, and the ranks that do not answer."""

    message: str
    lost: list[int]


@dataclass
class HangReport:
    """One rank's part in the report about a hang, which the ranks exchange through the store."""

    store: DeadlineStore  # the watchdog's store
    rank: int  # this rank
    name: Callable[[int], str]  # returns a rank's number, location and host
    heartbeat_s: float  # time between two heartbeats of a rank

    def describe(self, rank: int, waiting: dict, detector: HangDetector) -> HangDescription | None:
        """Write this rank's state to its file and return the description of the hang; None if it arrives too late.

        The rank that detected the hang, ``rank``, finds out which ranks are missing and shares the description.
        """
        directory, record = detector.directory, detector.record()
        text = f"{self.name(self.rank)}\ncollectives started on each axis: {record['begun']}\n"
        text += "".join(f"{thread} thread, waiting for: {waits}\n" for thread, waits in record["waiting"].items())
        text += f"\n{record.pop('stack')}"
        with suppress(OSError):  # a full or lost disk must not keep the job from ending
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"rank_{self.rank:05d}.txt").write_text(text)
        self.store.set(f"record/{self.rank}", json.dumps(record))
        if rank == self.rank:
            lost = set[int]()
            missing = list(self.missing_ranks(waiting, lost)) or ["all of its ranks have started it"]
            if len(missing) > _MOST_NAMED:
                missing[_MOST_NAMED:] = [f"and {len(missing) - _MOST_NAMED} more"]
            layer = f" of {waiting['layer']}" if waiting["layer"] else ""
            waited, on = ("made no progress for", "in") if waiting.get("works") else ("waited", "for")
            message = (
                f"hang: {self.name(rank)} {waited} {waiting['s']:.0f} s ({detector.limit(waiting)[1]}) {on} "
                f"{waiting['name']}{layer}: {'; '.join(missing)}; see {directory} for the stack of each rank"
            )
            self.store.set("hang", json.dumps(HangDescription(message, sorted(lost))))
        deadline = time.monotonic() + 2 * _RECORD_S
        while not (text := self.store.get("hang") or "") and time.monotonic() < deadline:
            time.sleep(0.1)
        return HangDescription(*json.loads(text)) if text else None

    def missing_ranks(self, waiting: dict, lost: set[int]) -> Iterator[str]:
        """Yield a phrase for each rank of the axis that has not started the collective, with its current location.

        A rank that itself waits on another axis is not the cause. The search then continues with the ranks for which it
        waits. It also continues if all ranks of the axis have started the collective. Ranks that do not answer are
        added to ``lost``.
        """
        unexplained, explained, missing = deque([waiting]), set[tuple](), False
        late = list[str]()  # late ranks that wait themselves
        while unexplained and not missing:
            waiting = unexplained.popleft()
            key = waiting["axis"], waiting["number"], *waiting["members"]
            if key in explained:
                continue
            explained.add(key)
            axis, it = waiting["axis"], "it" if len(explained) == 1 else waiting["name"]
            thread = axis if axis in (MAIN.name, SAVE.name) else MAIN.name  # the thread that may be late
            for rank in waiting["members"]:
                name = self.name(rank)
                if not (text := self._record(rank)):
                    missing = True
                    lost.add(rank)
                    yield f"{name} does not answer"
                    continue
                record = json.loads(text)
                late_for = "" if "works" in waiting else f"has not started {it} and "
                phrase = f"{name} {late_for}is in {record['where'][thread]}"
                started = record["begun"][axis] >= waiting["number"]
                if record["waiting"][thread]:
                    unexplained.append(record["waiting"][thread])
                    late += [] if started else [phrase]
                elif not started:
                    missing = True
                    yield phrase
        if not missing:
            yield from late

    def _record(self, rank: int) -> str | None:
        """Wait for a rank's record and return it; None if the rank does not answer or exceeds the timeout."""
        heartbeats, silence_s = -1, max(_MIN_SILENCE_S, 3 * self.heartbeat_s)
        now = last_heartbeat = time.monotonic()
        deadline = now + _RECORD_S
        while not (record := self.store.get(f"record/{rank}")):
            now, count = time.monotonic(), self.store.add(f"alive/{rank}", 0)
            if count != heartbeats:
                heartbeats, last_heartbeat = count, now
            if now > deadline or now - last_heartbeat > silence_s:
                break
            time.sleep(0.1)
        return record
