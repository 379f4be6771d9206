"""Ranks detect a silent rank, but not while all ranks are suspended, and a collective that hangs on a GPU."""

import json
import threading
import types

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.comm.stats import StartedCollective
from gpt4d.runtime import hangs, watchdog
from gpt4d.runtime.deadline_store import StoreLost
from gpt4d.runtime.hangs import HangDetector, HangReport
from gpt4d.runtime.watchdog import Watchdog


class Clock:
    """A clock that advances only while the watchdog waits for its next check."""

    def __init__(self, pauses: list[float], beat):
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


def failures(monkeypatch, pauses: list[float], beats_until: float) -> list[str]:
    """Return the failures that rank 0 of two reports.

    Args:
        monkeypatch: replaces the clock.
        pauses: seconds before each of its checks.
        beats_until: time in seconds until which rank 1 sends heartbeats.
    """
    store, messages = dist.HashStore(), []

    def beat(now: float) -> None:
        if now < 1000 + beats_until:
            store.add("alive/1", 1)

    one = Watchdog(store, 0, 2, "nid1", lambda failure: messages.append(str(failure)))
    clock = Clock(pauses, beat)
    one._stopped = clock
    monkeypatch.setattr(watchdog, "time", clock)
    one._watch()
    return messages


def test_a_silent_rank_is_named(monkeypatch):
    (message,) = failures(monkeypatch, [1.0] * 60, beats_until=5)
    assert "rank 1" in message and "no sign of life" in message


@pytest.mark.parametrize("suspended_s", [45.0, 4000.0])
def test_a_suspended_job_continues(monkeypatch, suspended_s):
    assert failures(monkeypatch, [*[1.0] * 5, suspended_s, *[1.0] * 10], beats_until=5 + suspended_s + 60) == []
    # Even if the next rank resumes a little later.
    assert failures(monkeypatch, [*[1.0] * 5, suspended_s, *[1.0] * 10], beats_until=5) == []


def test_a_rank_that_does_not_resume_is_named(monkeypatch):
    (message,) = failures(monkeypatch, [*[1.0] * 5, 4000.0, *[1.0] * 60], beats_until=5)
    assert "rank 1" in message


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
    clock = Clock([], None)
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


def test_the_first_steps_have_five_minutes_more(detect, tmp_path):
    detector = HangDetector({}, 120.0, tmp_path)
    collective, activity = {"axis": "z"}, {"axis": "main"}
    assert detector.limit(collective) == (420.0, "parallel.timeout_s + 300 s for the first steps")
    assert detector.limit(activity) == (120.0, "parallel.timeout_s")
    detector.begin_steps()
    assert detector.limit(activity) == detector.limit(collective)
    detector.end_startup()
    assert detector.limit(collective) == detector.limit(activity) == (120.0, "parallel.timeout_s")


def watchdog_of(rank: int, size: int, messages: list[str]) -> Watchdog:
    return Watchdog(dist.HashStore(), rank, size, "nid1", lambda failure: messages.append(str(failure)))


def test_an_error_of_the_gpu_is_not_taken_for_a_lost_rank(detect, monkeypatch):
    messages: list[str] = []
    one, axis = watchdog_of(1, 2, messages), GpuAxis("z")
    one.hang_detector, clock = detect(axis)
    clock.pauses, clock.beat = iter([1.0] * 3), lambda now: None
    one._stopped = clock
    axis.error = torch.AcceleratorError("an illegal memory access was encountered")
    one._watch()
    (message,) = messages
    assert message.startswith("rank 1 on") and "AcceleratorError: an illegal memory access" in message


def test_a_rank_does_not_count_itself_as_silent():
    one = watchdog_of(0, 2, [])
    assert one._silent_ranks([0, 0]) == [1]


def test_an_error_that_follows_from_a_hang_is_reported_as_the_hang(detect, tmp_path):
    """Rank 0 has reported a hang; a collective of rank 1 fails while the ranks find out who is missing."""
    one = watchdog_of(1, 3, [])
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
    one = watchdog_of(1, 2, [])
    one.store.deadline_s = 0.1
    monkeypatch.setattr(one.store, "_store", types.SimpleNamespace(add=lambda *_: threading.Event().wait()))
    with pytest.raises(StoreLost):
        one.store.add("alive/1", 1)
    assert str(one.fail("PeerLost: reset", may_be_secondary=True)).startswith(f"{named} does not answer")
    assert str(one.fail("ValueError: no", may_be_secondary=False)).endswith("failed: ValueError: no")


def missing_ranks(one: Watchdog, waiting: dict) -> list[str]:
    return list(HangReport(one.store, one.rank, one._name, 0.01).missing_ranks(waiting, set()))


def waits(axis: str, number: int, *members: int) -> dict:
    return {"axis": axis, "name": f"all_reduce {axis}", "number": number, "members": members}


def state(waiting: dict | None, where: str) -> dict:
    """Return the part of a record that describes both threads; the thread that saves is idle."""
    return {"waiting": dict.fromkeys(("main", "save"), waiting), "where": dict.fromkeys(("main", "save"), where)}


def test_the_missing_rank_is_found_across_axes():
    """Rank 0 waits for 1, which waits for 3 on another axis. Rank 2 also waits for 3, which sleeps."""
    one = watchdog_of(0, 4, [])
    records = [
        {"begun": {"x": 5, "z": 2}, **state(waits("x", 5, 0, 1), "traffic.py")},
        {"begun": {"x": 5, "z": 3}, **state(waits("z", 3, 1, 3), "traffic.py")},
        {"begun": {"x": 5, "z": 2}, **state(waits("x", 5, 2, 3), "traffic.py")},
        {"begun": {"x": 4, "z": 2}, **state(None, "loader.py:52 (step)")},
    ]
    for rank, record in enumerate(records):
        one.store.set(f"record/{rank}", json.dumps(record))
        one.store.set(f"host/{rank}", f"nid{rank}")
    assert missing_ranks(one, waits("x", 5, 0, 1)) == [
        "rank 3 on nid3 has not started all_reduce z and is in loader.py:52 (step)"
    ]
    records[3] = {"begun": {"x": 5, "z": 3}, **state(waits("z", 3, 1, 3), "traffic.py")}  # all have started everything
    one.store.set("record/3", json.dumps(records[3]))
    assert missing_ranks(one, waits("x", 5, 0, 1)) == []


def test_a_rank_that_is_late_because_it_waits_is_named_only_if_no_other_is():
    """Rank 0 waits for 1, which has not started that because it waits for 2. Rank 2 sleeps."""
    one = watchdog_of(0, 3, [])
    records = [
        {"begun": {"0 to 1": 5}, **state(waits("0 to 1", 5, 0, 1), "traffic.py")},
        {"begun": {"0 to 1": 4, "1 to 2": 7}, **state(waits("1 to 2", 7, 1, 2), "traffic.py")},
        {"begun": {"1 to 2": 6}, **state(None, "loader.py:52 (step)")},
    ]

    def missing() -> list[str]:
        for rank, record in enumerate(records):
            one.store.set(f"record/{rank}", json.dumps(record))
        return [
            phrase.replace(" on an unknown host", "") for phrase in missing_ranks(one, records[0]["waiting"]["main"])
        ]

    assert missing() == ["rank 2 has not started all_reduce 1 to 2 and is in loader.py:52 (step)"]
    records[2] = {
        "begun": {"1 to 2": 7},
        **state(waits("1 to 2", 7, 1, 2), "traffic.py"),
    }  # the ranks wait for each other
    assert missing() == ["rank 1 has not started it and is in traffic.py"]
