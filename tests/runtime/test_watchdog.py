"""Ranks detect a silent rank, but not while the whole job was suspended."""

import pytest
import torch.distributed as dist

from gpt4d.runtime import watchdog
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
