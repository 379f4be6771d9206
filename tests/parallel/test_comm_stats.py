"""Times of communication on a GPU, on simulated streams: hidden, exposed and unfinished collectives."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.comm.stats import CommStats, InFlightCollective

GPU = torch.device("cuda")


class Stream:
    def __init__(self, device):
        self.busy_until = 0.0


class Event:
    clock: SimpleNamespace  # the stream that is current, and the time that the GPU has reached

    def __init__(self, enable_timing=False):
        self.enable_timing, self.time = enable_timing, float("inf")

    def record(self):
        self.time = self.clock.stream.busy_until

    def query(self) -> bool:
        return self.time <= self.clock.now

    def synchronize(self): ...

    def elapsed_time(self, other) -> float:
        assert self.enable_timing and other.enable_timing
        return (other.time - self.time) * 1e3


class Work(dist.Work):
    """A collective that ends at a given time."""

    def __init__(self, clock, end):
        super().__init__()
        self.clock, self.end = clock, end

    def wait(self):
        self.clock.stream.busy_until = max(self.clock.stream.busy_until, self.end)


@pytest.fixture
def gpu(monkeypatch):
    clock = Event.clock = SimpleNamespace(stream=Stream(GPU), now=0.0)

    @contextmanager
    def use(stream):
        previous, clock.stream = clock.stream, stream
        yield
        clock.stream = previous

    for name, value in (("Event", Event), ("Stream", Stream), ("stream", use)):
        monkeypatch.setattr(torch.cuda, name, value)
    return clock


def start(traffic, gpu, end, name="all_gather z", overlaps=True) -> InFlightCollective:
    with traffic.track_wait(traffic.start(name)):
        return InFlightCollective(traffic, Work(gpu, end), GPU, 8.0, overlaps)


def test_a_collective_is_hidden_beside_computation_and_exposed_after_it(gpu):
    traffic = CommStats()
    collective = start(traffic, gpu, end=3.0)
    gpu.stream.busy_until = 2.0  # the computation that overlaps with it
    collective.wait()
    assert traffic.read() == {"bytes": 8.0, "exposed_s": 1.0, "hidden_s": 2.0}


def test_a_long_collective_of_one_axis_does_not_lengthen_a_short_one_of_another(gpu):
    long, short = CommStats(), CommStats()
    waits = [start(long, gpu, end=10.0), start(short, gpu, end=1.0)]
    gpu.stream.busy_until = 10.0
    for collective in waits:
        collective.wait()
    assert short.read()["hidden_s"] == 1.0 and long.read()["hidden_s"] == 10.0


@pytest.mark.parametrize(("timed", "overlaps"), [(True, False), (False, False), (False, True)])
def test_a_collective_that_does_not_overlap_is_exposed_and_one_that_is_not_timed_has_no_time(
    gpu, monkeypatch, timed, overlaps
):
    traffic = CommStats(timed=timed)
    if not overlaps:
        monkeypatch.setattr(torch.cuda, "Stream", None)  # no further stream is needed
    start(traffic, gpu, end=3.0, overlaps=overlaps).wait()
    assert traffic.oldest_unfinished().number == 1
    (_, end) = traffic.unfinished[0]
    assert end.enable_timing == timed and timed == bool(traffic.run_intervals + traffic.wait_intervals)
    gpu.now = 3.0
    assert traffic.oldest_unfinished() is None
    assert traffic.read() == {"bytes": 8.0, "exposed_s": 3.0 * timed, "hidden_s": 0.0}


def test_a_wait_in_a_timed_step_for_a_collective_started_before_is_exposed(gpu):
    traffic = CommStats(timed=False)
    collective = start(traffic, gpu, end=3.0)
    traffic.timed = True
    collective.wait()
    assert traffic.read()["exposed_s"] == 3.0


def test_a_collective_of_the_timed_step_that_a_later_step_waits_for_is_not_hidden(gpu):
    traffic = CommStats()
    collective = start(traffic, gpu, end=3.0)
    assert traffic.read()["hidden_s"] == 0.0  # nothing has overlapped with it yet
    traffic.timed = False
    collective.wait()
    assert not traffic.run_intervals


def test_the_oldest_collective_that_has_not_ended_on_the_gpu_is_known(gpu):
    traffic = CommStats()
    for end in (1.0, 2.0, 3.0):
        start(traffic, gpu, end).wait()  # returns at once: only the GPU waits
    assert traffic.oldest_unfinished().number == 1
    gpu.now = 2.5
    assert traffic.oldest_unfinished().number == 3
    gpu.now = 5.0
    assert traffic.oldest_unfinished() is None
    start(traffic, gpu, end=6.0)
    assert [collective.number for collective, _ in traffic.unfinished] == [4]  # ended ones are dropped
