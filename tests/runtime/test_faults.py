"""Ranks that are signalled, killed, fail or hang: no rank is left behind, nothing saved is lost, the cause is told."""

import functools
import os
import re
import signal
import threading

import pytest

from tests.grids import metric_lines, train_in_rank
from tests.jobs import Job

GRID = ["parallel.gz=2", "checkpoint.every=3", "checkpoint.keep=2", "train.steps=8"]


def at_step(step, act):
    """``act(trainer)`` at the beginning of that step."""
    from gpt4d.trainer import Trainer

    take = Trainer._step

    def acting(self):
        if self.progress.step + 1 == step:
            act(self)
        return take(self)

    Trainer._step = acting


def quickly():
    """The watch as it is, in a shorter time."""
    from gpt4d.runtime import job, watchdog

    watchdog._BEAT_S, watchdog._MISSED_S, job._TELLING_S = 0.1, 0.6, 1.0


def losses(config) -> list[float]:
    """By step: of those done again after a restart, the last."""
    return list({line["step"]: line["loss"] for line in metric_lines(config.run.dir) if "event" not in line}.values())


_straight = []


@pytest.fixture
def uninterrupted(ranks, tiny, tmp_path):
    if not _straight:
        config = tiny(*GRID, f"run.dir={tmp_path / 'straight'}")
        ranks.run(2, train_in_rank, config)
        _straight.extend(losses(config))
    return _straight


def signal_itself(number, step, which, rank):
    if rank == which:
        at_step(step, lambda _: os.kill(os.getpid(), number))


@pytest.mark.parametrize(("number", "which"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 1)])
def test_a_signal_to_one_rank_saves_ends_all_with_75_and_the_run_goes_on_as_if_nothing_were(
    ranks, tiny, uninterrupted, number, which
):
    config = tiny(*GRID, "parallel.gz=2")
    with Job(ranks.context, config, 2, functools.partial(signal_itself, number, 4, which)) as job:
        assert job.ends() == [75, 75], job.said()
        (told,) = [line for line in job.lines() if line.get("event") == "signal"]
        assert 4 <= told["step"] <= 6 and told["step"] == max(line["step"] for line in job.lines())
    with Job(ranks.context, config, 2) as job:
        assert job.ends() == [0, 0], job.said()
        (resumed,) = [line for line in job.lines() if line.get("event") == "resume"]
        assert resumed["step"] == told["step"]
    assert losses(config) == uninterrupted


def hang_after_a_signal(rank):
    """The first is heard, and never followed: the step does not end."""

    def act(_):
        os.kill(os.getpid(), signal.SIGTERM)
        print("waiting", flush=True)
        threading.Event().wait()

    at_step(4, act)


def test_a_second_signal_ends_at_once_and_what_was_saved_is_whole(ranks, tiny, uninterrupted):
    config = tiny(*GRID)
    with Job(ranks.context, config, 2, hang_after_a_signal) as job:
        job.comes_to(3)
        while any(process.is_alive() for process in job.processes):
            job.signal(signal.SIGTERM)
            job.processes[0].join(0.05)
        assert job.ends() == [75, 75]
    with Job(ranks.context, config, 2) as job:
        assert job.ends() == [0, 0], job.said()
    assert losses(config) == uninterrupted


def kill_itself(phase, which, rank, step=5):
    quickly()
    if rank != which:
        return
    from gpt4d import optim
    from gpt4d.checkpoint import storage
    from gpt4d.model.gpt import GPT
    from gpt4d.parallel.gradients import GradientReducer
    from gpt4d.trainer import Trainer

    room, name = {
        "start": (Trainer, "_resume"),
        "forward": (GPT, "loss_sum"),
        "backward": (GradientReducer, "_on_gradient"),
        "optimizer": (optim, "update"),
        "save": (storage.Writer, "write_data"),
    }[phase]

    def arm(_=None):
        setattr(room, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    arm() if phase in ("start", "save") else at_step(step, arm)


@pytest.mark.parametrize(
    ("phase", "which"), [("start", 1), ("forward", 0), ("backward", 1), ("optimizer", 1), ("save", 0), ("save", 1)]
)
def test_a_killed_rank_ends_the_job_is_named_and_nothing_saved_is_lost(ranks, tiny, uninterrupted, phase, which):
    config = tiny(*GRID)
    with Job(ranks.context, config, 2, functools.partial(kill_itself, phase, which)) as job:
        codes = job.ends()
        assert codes[which] == -signal.SIGKILL and codes[1 - which] == 1, job.said()
        assert re.search(rf"error: rank {which} on \S+ failed: no sign of life", "".join(job.said()))
    with Job(ranks.context, config, 2) as job:
        assert job.ends() == [0, 0], job.said()
    assert losses(config) == uninterrupted


def fail(rank):
    if rank == 2:

        def act(_):
            raise ValueError("the dog ate it")

        at_step(3, act)


def test_what_one_rank_raises_ends_all_and_is_told_by_the_first(ranks, tiny):
    with Job(ranks.context, tiny("parallel.gx=2", "parallel.gy=2"), 4, fail) as job:
        assert job.ends() == [1, 1, 1, 1]
        said = job.said()
    assert re.search(r"error: rank 2 on \S+ failed: ValueError: the dog ate it\n$", said[0])
    assert "Traceback" in said[2] and not any("Traceback" in said[rank] for rank in (0, 1, 3))


def sleep(rank):
    if rank == 1:
        at_step(5, lambda _: threading.Event().wait())


def test_a_hang_is_told_with_its_collective_axis_layer_and_who_is_missing(ranks, tiny, tmp_path):
    config = tiny("parallel.gz=2", "parallel.timeout_s=2")
    with Job(ranks.context, config, 2, sleep) as job:
        assert job.ends() == [1, 1]
        said = job.said()[0]
    told = r"hang: rank 0 on \S+ waited \d+ s .* for all_gather z of tokens.weight: rank 1 on \S+ has not begun it"
    assert re.search(rf"error: {told}, it is in trainer.py:\d+ \(_loop\)", said), said
    records = sorted((tmp_path / "run" / "hang").iterdir())
    assert [path.name for path in records] == ["rank_00000.txt", "rank_00001.txt"]
    assert "waits for {'axis': 'z', 'name': 'all_gather z'" in records[0].read_text()
    assert "waits for None" in records[1].read_text() and "_step" in records[1].read_text()


def test_a_hang_ends_the_job_where_nothing_can_be_written_down_too(ranks, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hang").write_text("in the way")
    with Job(ranks.context, tiny("parallel.gz=2", "parallel.timeout_s=2"), 2, sleep) as job:
        assert job.ends() == [1, 1]
        assert "error: hang: rank 0 on" in job.said()[0]


def lack_a_gpu(rank):
    from gpt4d.config import NodeError
    from gpt4d.runtime import job

    def device_of(_):
        raise NodeError("node b has 2 GPU(s) and 4 tasks")

    quickly()
    if rank == 1:
        job.device_of = device_of


def test_a_node_with_too_few_gpus_keeps_nobody_waiting(ranks, tiny):
    with Job(ranks.context, tiny(), 2, lack_a_gpu) as job:
        assert job.ends() == [1, 1], job.said()
        assert re.search(r"error: rank 1 on \S+ failed: node b has 2 GPU", job.said()[0])


def stay_away(rank):
    from gpt4d.runtime import job

    job._MEETING_S = 1.0
    quickly()
    if rank:
        os._exit(3)


def test_a_rank_that_does_not_come_is_named(ranks, tiny):
    with Job(ranks.context, tiny(), 2, stay_away) as job:
        assert job.ends() == [1, 3], job.said()
        assert "error: 1 of 2 ranks did not come within 1 s, the first of them rank 1" in job.said()[0]
