"""Ranks detect a silent rank, but not while all ranks are suspended, and a collective that hangs on a GPU."""

import json
import re
import socket
import threading
import types

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.comm.stats import StartedCollective
from gpt4d.runtime import hangs, watchdog
from gpt4d.runtime.hangs import HangDetector, HangReport
from gpt4d.runtime.rendezvous import DeadlineStore, StoreLost
from gpt4d.runtime.watchdog import Watchdog


class Clock:
    """A clock that advances only while the watchdog waits for its next check: the event that stops the watchdog."""

    def __init__(self, pauses: list[float] = (), beat=lambda now: None):
        self.now, self.pauses, self.beat = 1000.0, iter(pauses), beat

    def monotonic(self) -> float:
        return self.now

    def wait(self, _) -> bool:
        pause = next(self.pauses, None)
        if pause is None:
            return True
        self.now += pause
        self.beat(self.now)
        return False

    def is_set(self) -> bool:
        return False

    def set(self) -> None:
        """Do nothing: the watchdog ends after the last pause."""


@pytest.fixture
def watched(monkeypatch):
    """Return a function that runs the watchdog of a rank of two until ``clock`` ends, and returns its failures."""

    def watch(clock: Clock, rank: int = 0, store=None, detector=None) -> list[str]:
        messages: list[str] = []
        monkeypatch.setattr(watchdog, "time", clock)
        events = types.SimpleNamespace(Event=lambda: clock, Thread=threading.Thread, Lock=threading.Lock)
        monkeypatch.setattr(watchdog, "threading", events)
        one = Watchdog(store or dist.HashStore(), rank, 2, "nid1", lambda failure: messages.append(str(failure)))
        one.hang_detector = detector
        one.start()
        one.stop()
        return messages

    return watch


@pytest.fixture
def failures(watched):
    """Return a function from the seconds before each check of rank 0 to the failures that it reports.

    Rank 1 sends heartbeats in the first ``beats_until`` seconds.
    """

    def watch(pauses: list[float], beats_until: float) -> list[str]:
        store = dist.HashStore()
        return watched(Clock(pauses, lambda now: now < 1000 + beats_until and store.add("alive/1", 1)), store=store)

    return watch


def test_a_silent_rank_is_named(failures):
    (message,) = failures([1.0] * 60, beats_until=5)
    assert "rank 1" in message and "no sign of life" in message


@pytest.mark.parametrize("suspended_s", [45.0, 4000.0])
def test_a_suspended_job_continues(failures, suspended_s):
    pauses = [*[1.0] * 5, suspended_s, *[1.0] * 10]
    assert failures(pauses, beats_until=5 + suspended_s + 60) == []
    assert failures(pauses, beats_until=5) == [], "even if the next rank resumes a little later"


def test_a_rank_that_does_not_resume_is_named(failures):
    (message,) = failures([*[1.0] * 5, 4000.0, *[1.0] * 60], beats_until=5)
    assert "rank 1" in message


class EndingStore(dist.HashStore):
    """A store whose server ends at a time of the clock."""

    clock = Clock()

    def add(self, key, amount):
        if self.clock.now > 1010:
            raise RuntimeError("closed")
        return super().add(key, amount)


def test_a_rank_that_was_suspended_itself_says_so(failures, watched):
    suspended = rf"on {socket.gethostname()} was suspended for 25 s, .*; after this"
    (message,) = failures([*[1.0] * 5, 25.0, *[1.0] * 60], beats_until=5)
    assert re.fullmatch(rf"rank 0 {suspended} rank 1 on an unknown host gives no sign of life", message)
    store = EndingStore()
    store.clock = Clock([*[1.0] * 5, 25.0, 1.0], lambda now: now < 1010 and dist.HashStore.add(store, "alive/0", 1))
    (message,) = watched(store.clock, 1, store)
    assert re.fullmatch(rf"rank 1 {suspended} rank 0 on nid1 has ended", message)


class GpuAxis:
    """An axis of which a GPU has not finished the collectives from ``oldest`` on. None: it has finished all."""

    group = None

    def __init__(self, name: str):
        self.name, self.traffic, self.num_started = name, self, 9
        self.oldest: int | None = None
        self.time, self.parameter, self.error = 0.0, None, None

    def oldest_unfinished(self):
        if self.error:
            raise self.error
        return self.oldest and StartedCollective(f"all_gather {self.name}", self.oldest, self.time, self.parameter)


@pytest.fixture
def detect(monkeypatch, tmp_path):
    """Return a function from axes to their detector after startup, and the clock that it uses."""
    clock = Clock()
    monkeypatch.setattr(hangs, "time", clock)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])

    def build(*axes: GpuAxis) -> tuple[HangDetector, Clock]:
        detector = HangDetector({axis.name: axis for axis in axes}, 120.0, tmp_path)
        detector.end_startup()
        return detector, clock

    return build


def test_a_collective_that_stays_the_oldest_on_a_gpu_has_waited(detect):
    axis = GpuAxis("z")
    detector, clock = detect(axis)
    assert detector.waiting() is None
    axis.oldest = 3
    assert detector.waiting()["s"] == 0
    clock.now += 100
    axis.oldest = 4  # it ended, and the next one has only begun
    assert detector.waiting()["s"] == 0
    clock.now += 130
    waiting = detector.waiting()
    assert waiting["s"] == 130 > detector.limit(waiting)[0]
    assert waiting["number"] == 4 and waiting["name"] == "all_gather z"
    assert detector.waiting(since=clock.now - 5)["s"] == 5  # the process was suspended before
    axis.oldest = None
    assert detector.waiting() is None


def test_of_two_axes_the_one_whose_collective_started_first_is_reported(detect):
    x, z = GpuAxis("x"), GpuAxis("z")
    detector, clock = detect(x, z)
    z.oldest, z.time = 7, 1000.0
    x.oldest, x.time = 2, 1000.1  # queued behind z's collective before the first check
    detector.waiting()
    clock.now += 120
    assert detector.waiting()["axis"] == "z" and detector.waiting()["s"] == 120


def test_the_layer_of_a_hanging_collective_is_named(detect):
    axis, model = GpuAxis("z"), torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2)})
    detector, _ = detect(axis)
    detector.name_layers(model)
    axis.oldest, axis.parameter = 1, model["mlp"].weight
    assert detector.waiting()["layer"] == "mlp"


def test_the_first_steps_have_five_minutes_more(tmp_path):
    detector = HangDetector({}, 120.0, tmp_path)
    collective, activity = {"axis": "z"}, {"axis": "main"}
    assert detector.limit(collective) == (420.0, "parallel.timeout_s + 300 s for the first steps")
    assert detector.limit(activity) == (120.0, "parallel.timeout_s")
    detector.begin_steps()
    assert detector.limit(activity) == detector.limit(collective)
    detector.end_startup()
    assert detector.limit(collective) == detector.limit(activity) == (120.0, "parallel.timeout_s")


def test_an_error_of_the_gpu_is_not_taken_for_a_lost_rank(watched, detect):
    axis = GpuAxis("z")
    axis.error = torch.AcceleratorError("an illegal memory access was encountered")
    (message,) = watched(Clock([1.0] * 3), rank=1, detector=detect(axis)[0])
    assert message.startswith("rank 1 on") and "AcceleratorError: an illegal memory access" in message


def watchdog_of(rank: int, size: int, store=None) -> Watchdog:
    return Watchdog(store or dist.HashStore(), rank, size, "nid1", lambda failure: None)


def test_a_rank_does_not_count_itself_as_silent(monkeypatch):
    monkeypatch.setattr(watchdog, "SILENT_AFTER_ERROR_S", 0.0)
    failure = watchdog_of(0, 2).fail("PeerLost: reset", may_be_secondary=True)
    assert failure.rank == 1 and failure.lost == [1]


def test_an_error_that_follows_from_a_hang_is_reported_as_the_hang(detect):
    """Rank 0 has reported a hang; a collective of rank 1 fails while the ranks find out who is missing."""
    one = watchdog_of(1, 3)
    one.hang_detector, _ = detect()
    one.store.set("failure", json.dumps({"rank": 0, "host": "a", "cause": "slow", "waiting": waits("x", 1, 0, 2)}))
    one.store.set("hang", json.dumps(["hang: rank 0 on a waited 2 s for it: rank 2 on b does not answer", [2]]))
    failure = one.fail("PeerLost: connection reset by peer", may_be_secondary=True)
    assert str(failure).endswith("rank 2 on b does not answer") and failure.lost == [2]


@pytest.mark.parametrize(
    ("launcher", "named"), [("False", "rank 0 on nid1"), ("True", r"the launcher (torchrun) on nid1")]
)
def test_whoever_holds_a_lost_store_is_named_and_an_own_error_is_not_lost(monkeypatch, launcher, named):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    one = watchdog_of(1, 2)
    one.store = DeadlineStore(types.SimpleNamespace(add=lambda *_: threading.Event().wait()), 0.1)
    with pytest.raises(StoreLost):
        one.store.add("alive/1", 1)
    assert str(one.fail("PeerLost: reset", may_be_secondary=True)).startswith(f"{named} does not answer")
    assert str(one.fail("ValueError: no", may_be_secondary=False)).endswith("failed: ValueError: no")


def missing_ranks(records: list[dict], waiting: dict) -> list[str]:
    """Return the ranks that rank 0 names, given the record of each rank."""
    store = DeadlineStore(dist.HashStore(), 10.0)
    for rank, record in enumerate(records):
        store.set(f"record/{rank}", json.dumps(record))
    return list(HangReport(store, 0, lambda rank: f"rank {rank}", 0.01).missing_ranks(waiting, set()))


def waits(axis: str, number: int, *members: int) -> dict:
    return {"axis": axis, "name": f"all_reduce {axis}", "number": number, "members": members}


def record(waiting: dict | None, **begun: int) -> dict:
    """Return the record of a rank; the thread that saves is idle. A rank that waits for nothing loads data."""
    where = "traffic.py" if waiting else "loader.py:52 (step)"
    threads = ("main", "save")
    return {"begun": begun, "waiting": dict.fromkeys(threads, waiting), "where": dict.fromkeys(threads, where)}


def test_the_missing_rank_is_found_across_axes():
    """Rank 0 waits for 1, which waits for 3 on another axis. Rank 2 also waits for 3, which sleeps."""
    first, other = waits("x", 5, 0, 1), waits("z", 3, 1, 3)
    records = [record(first, x=5, z=2), record(other, x=5, z=3), record(waits("x", 5, 2, 3), x=5, z=2)]
    sleeps = record(None, x=4, z=2)
    assert missing_ranks([*records, sleeps], first) == [
        "rank 3 has not started all_reduce z and is in loader.py:52 (step)"
    ]
    assert missing_ranks([*records, record(other, x=5, z=3)], first) == [], "all have started everything"


def test_a_rank_that_is_late_because_it_waits_is_named_only_if_no_other_is():
    """Rank 0 waits for 1, which has not started that because it waits for 2. Rank 2 sleeps."""
    first, other = waits("0 to 1", 5, 0, 1), waits("1 to 2", 7, 1, 2)
    records = [record(first, **{"0 to 1": 5}), record(other, **{"0 to 1": 4, "1 to 2": 7})]
    sleeps, waits_too = record(None, **{"1 to 2": 6}), record(other, **{"1 to 2": 7})
    assert missing_ranks([*records, sleeps], first) == [
        "rank 2 has not started all_reduce 1 to 2 and is in loader.py:52 (step)"
    ]
    # The ranks wait for each other.
    assert missing_ranks([*records, waits_too], first) == ["rank 1 has not started it and is in traffic.py"]
