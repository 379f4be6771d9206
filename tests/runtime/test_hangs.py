"""A rank that hangs outside the collectives of an axis is found and named, and one that works slowly is not ended."""

import functools
import importlib
import itertools
import re
import threading
import time

import pytest

from gpt4d.runtime import activity, hangs
from gpt4d.runtime.activity import Track
from gpt4d.runtime.hangs import ActivityWatch
from tests.support.faults import PHASES, Fault, block, replace_function, shorten_timeouts
from tests.support.grids import full
from tests.support.jobs import ended_job

STORAGE = "gpt4d.checkpoint.storage"


def save_forever(*_):
    for _ in itertools.repeat(None):
        time.sleep(0.05)
        activity.progress()


def save_forever_elsewhere(target: int, rank: int) -> None:
    """Hang in the update of rank ``target`` while the other rank saves."""
    Fault(1 - target, save_forever, (STORAGE, "write_shards"))(rank)
    Fault(target, block, PHASES["pending save"][:2], 5)(rank)


_QUICK = [("update", 1), ("save", 0)]
_OTHERS = set(itertools.product(PHASES, (0, 1))) - {*_QUICK, ("begin", 1)}


@pytest.mark.parametrize(("phase", "target"), [*_QUICK, *itertools.starmap(full, sorted(_OTHERS))])
def test_a_hang_outside_the_collectives_names_the_rank_and_what_the_others_wait_for(ranks, tiny, phase, target):
    module, function, caller, name = PHASES[phase]
    limit = {("gpt4d.runtime.hangs", "MIN_LIMIT_S"): 1.5}
    fault = Fault(target, block, (module, function), 5 if phase == "update" else None, limit)
    if phase == "pending save":
        fault = functools.partial(save_forever_elsewhere, target)
    config = tiny("parallel.gz=2", "parallel.timeout_s=1", f"checkpoint.every={0 if phase == 'update' else 3}")
    if phase == "load":
        ended_job(ranks.context, tiny("parallel.gz=2", "checkpoint.every=3", "train.steps=3"), [0, 0])
    output = "".join(ended_job(ranks.context, config, [1, 1], fault).outputs())
    problem = rf"(waited|made no progress for) \d+ s .*(for|in) {name}: rank {target} on \S+ is in {caller}:\d+ "
    assert re.search(rf"error: hang: rank \d on \S+ {problem}", output), output
    assert output.count("error:") == 1 and "Traceback" not in output


def work_slowly(module: str, function: str, rank: int) -> None:
    shorten_timeouts()
    original = getattr(importlib.import_module(module), function)

    def slow(*arguments, **options):
        for _ in range(100):
            time.sleep(0.07)
            activity.progress()
        return original(*arguments, **options)

    if rank == 0:
        replace_function(module, function, slow)


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "function"), [(STORAGE, "write_shards"), ("gpt4d.checkpoint.tensor_files", "complete_directory")]
)
def test_a_slow_save_that_makes_progress_is_not_a_hang(ranks, tiny, module, function):
    config = tiny("parallel.gz=2", "parallel.timeout_s=2", "train.steps=3")
    ended_job(ranks.context, config, [0, 0], functools.partial(work_slowly, module, function))


@pytest.fixture
def watched():
    """Return a track, its watch, and a function that waits until a heartbeat finds the expected state."""
    track = Track("main")
    watch = ActivityWatch(track)

    def expect(progressed: bool) -> None:
        deadline = time.monotonic() + 30
        while watch.progressed() is not progressed:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return track, watch, expect


def test_work_progresses_if_it_computes_or_says_so_and_a_wait_does_not(watched):
    track, watch, expect = watched
    computes, waits, said, ends = (threading.Event() for _ in range(4))

    def work() -> None:
        with track.begin("some work") as own:
            computes.wait()
            while not waits.is_set():
                sum(range(1000))
            with own.waiting():
                said.wait()
            activity.progress()
            ends.wait()

    assert watch.progressed() is None
    thread = threading.Thread(target=work)
    thread.start()
    for event, progressed in ((None, False), (computes, True), (waits, False), (said, True), (None, False)):
        if event:
            event.set()
        expect(progressed)
    ends.set()
    thread.join()
    assert watch.progressed() is None


def test_unlimited_work_always_progresses(watched):
    track, watch, expect = watched
    with track.begin("training a tokenizer"):
        with activity.unlimited():
            expect(True)
            assert watch.progressed()
        assert not track.current.unlimited


def test_time_counts_from_the_last_progress_of_any_rank(watched, monkeypatch):
    track, watch, _ = watched
    now = 1000.0
    monkeypatch.setattr(hangs.time, "monotonic", lambda: now)
    with track.begin("a wait") as own, own.waiting():
        now += 50
        assert watch.waiting(0.0)["s"] == 50 and watch.waiting(since=1040.0)["s"] == 10
        watch.note(1)
        now += 7
        watch.note(1)
        assert watch.waiting(0.0)["s"] == 7 and watch.waiting(0.0)["name"] == "a wait"
    assert watch.waiting(0.0) is None
