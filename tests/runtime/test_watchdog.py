"""Ranks notice who is silent; that they were stopped themselves, with all others, is no silence."""

import pytest
import torch.distributed as dist

from gpt4d.runtime import watchdog
from gpt4d.runtime.watchdog import Watchdog


class Clock:
    """Time that passes only while a watch waits for its next look."""

    def __init__(self, looks: list[float], beat):
        self.now, self.looks, self.beat = 1000.0, iter(looks), beat

    def monotonic(self) -> float:
        return self.now

    def wait(self, _) -> bool:
        pause = next(self.looks, None)
        if pause is None:
            return True
        self.now += pause
        self.beat(self.now)
        return False

    def is_set(self) -> bool:
        return False


def failures(monkeypatch, looks: list[float], beats_until: float) -> list[str]:
    """What rank 0 of two says, that looks after pauses of ``looks`` seconds; rank 1 lives until ``beats_until``."""
    store, said = dist.HashStore(), []

    def beat(now: float) -> None:
        if now < 1000 + beats_until:
            store.add("alive/1", 1)

    watching = Watchdog(store, 0, 2, "nid1", lambda failure: said.append(str(failure)))
    clock = Clock(looks, beat)
    watching._over = clock
    monkeypatch.setattr(watchdog, "time", clock)
    watching._watch()
    return said


def test_a_silent_rank_is_named(monkeypatch):
    (said,) = failures(monkeypatch, [1.0] * 60, beats_until=5)
    assert "rank 1" in said and "no sign of life" in said


@pytest.mark.parametrize("stopped_s", [45.0, 4000.0])
def test_a_job_that_was_stopped_goes_on(monkeypatch, stopped_s):
    assert failures(monkeypatch, [*[1.0] * 5, stopped_s, *[1.0] * 10], beats_until=5 + stopped_s + 60) == []
    # Not even if the next rank takes a while to wake up.
    assert failures(monkeypatch, [*[1.0] * 5, stopped_s, *[1.0] * 10], beats_until=5) == []


def test_a_rank_that_does_not_wake_up_is_named(monkeypatch):
    (said,) = failures(monkeypatch, [*[1.0] * 5, 4000.0, *[1.0] * 60], beats_until=5)
    assert "rank 1" in said
