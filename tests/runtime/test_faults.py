"""Ranks are signaled, killed, fail or hang: all ranks end, checkpoints survive, and the cause is reported."""

import errno
import functools
import os
import pathlib
import re
import signal
import threading
import time

import pytest

from gpt4d import activity
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.jobs import LaunchedJob

GRID = ["parallel.gz=2", "checkpoint.every=3", "checkpoint.keep=2", "train.steps=8"]


def at_step(step, act):
    """Call ``act(trainer)`` at the start of ``step``."""
    from gpt4d.trainer import Trainer

    original = Trainer._step

    def act_and_step(self, stop):
        if self.progress.step + 1 == step:
            act(self)
        return original(self, stop)

    Trainer._step = act_and_step


def shorten_timeouts():
    """Make the watchdog faster."""
    from gpt4d.runtime import activity_watch, rendezvous, watchdog

    watchdog.HEARTBEAT_S, watchdog.SILENT_AFTER_ERROR_S, rendezvous.NOTICE_S = 0.1, 0.6, 1.0
    watchdog.MIN_SILENT_S, activity_watch.MIN_LIMIT_S = 5.0, 6.0


def losses(config) -> list[float]:
    """Return the loss of each step; of a step repeated after a restart, the last."""
    return list({line["step"]: line["loss"] for line in metric_lines(config.run.dir) if "event" not in line}.values())


_uninterrupted_losses = []


@pytest.fixture
def uninterrupted(ranks, tiny, tmp_path):
    if not _uninterrupted_losses:
        config = tiny(*GRID, f"run.dir={tmp_path / 'straight'}")
        ranks.run(2, train_in_rank, config)
        _uninterrupted_losses.extend(losses(config))
    return _uninterrupted_losses


def signal_itself(number, step, target, rank):
    if rank == target:
        at_step(step, lambda _: os.kill(os.getpid(), number))


@pytest.mark.parametrize(("number", "target"), [(signal.SIGUSR1, 0), full(signal.SIGTERM, 1)])
def test_a_signal_to_one_rank_saves_the_run_and_it_resumes_exactly(ranks, tiny, uninterrupted, number, target):
    config = tiny(*GRID, "parallel.gz=2")
    with LaunchedJob(ranks.context, config, 2, functools.partial(signal_itself, number, 4, target)) as job:
        assert job.exit_codes() == [75, 75], job.outputs()
        (stopped,) = [line for line in job.metric_lines() if line.get("event") == "signal"]
        assert 4 <= stopped["step"] <= 6 and stopped["step"] == max(line["step"] for line in job.metric_lines())
    with LaunchedJob(ranks.context, config, 2) as job:
        assert job.exit_codes() == [0, 0], job.outputs()
        (resumed,) = [line for line in job.metric_lines() if line.get("event") == "resume"]
        assert resumed["step"] == stopped["step"]
    assert losses(config) == uninterrupted


def hang_after_a_signal(rank):
    """Signal this process, then block: the step never ends."""

    def act(_):
        os.kill(os.getpid(), signal.SIGTERM)
        print("waiting", flush=True)
        threading.Event().wait()

    at_step(4, act)


def test_a_second_signal_ends_at_once_and_checkpoints_stay_intact(ranks, tiny, uninterrupted):
    config = tiny(*GRID)
    with LaunchedJob(ranks.context, config, 2, hang_after_a_signal) as job:
        job.wait_for_step(3)
        while any(process.is_alive() for process in job.processes):
            job.signal(signal.SIGTERM)
            job.processes[0].join(0.05)
        assert job.exit_codes() == [75, 75]
    with LaunchedJob(ranks.context, config, 2) as job:
        assert job.exit_codes() == [0, 0], job.outputs()
    assert losses(config) == uninterrupted


def kill_itself(phase, target, rank, step=5):
    shorten_timeouts()
    if rank != target:
        return
    from gpt4d.checkpoint import writer
    from gpt4d.checkpoint.run import RunCheckpoints
    from gpt4d.model.module import Model
    from gpt4d.optim.optimizer import Optimizer
    from gpt4d.parallel.gradient_reducer import GradientReducer

    owner, name = {
        "start": (RunCheckpoints, "resume"),
        "forward": (Model, "compute"),
        "backward": (GradientReducer, "_on_gradient"),
        "optimizer": (Optimizer, "step"),
        "save": (writer.Writer, "write_data"),
    }[phase]

    def arm(_=None):
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    arm() if phase in ("start", "save") else at_step(step, arm)


@pytest.mark.parametrize(
    ("phase", "target"),
    [("forward", 0), ("save", 1), full("start", 1), full("backward", 1), full("optimizer", 1), full("save", 0)],
)
def test_a_killed_rank_ends_the_job_and_is_named_and_the_run_resumes(ranks, tiny, uninterrupted, phase, target):
    config = tiny(*GRID)
    with LaunchedJob(ranks.context, config, 2, functools.partial(kill_itself, phase, target)) as job:
        codes = job.exit_codes()
        assert codes[target] == -signal.SIGKILL and codes[1 - target] == 1, job.outputs()
        output = "".join(job.outputs())
        assert re.search(rf"error: rank {target} on \S+ failed: no sign of life", output)
        assert output.count("error:") == 1 and "GLHF" not in output  # gloo's own message about the lost connection
    with LaunchedJob(ranks.context, config, 2) as job:
        assert job.exit_codes() == [0, 0], job.outputs()
    assert losses(config) == uninterrupted


def fail(rank):
    if rank == 2:

        def act(_):
            raise ValueError("the dog ate it")

        at_step(3, act)


def test_an_exception_on_one_rank_ends_all_and_rank_0_prints_it(ranks, tiny):
    with LaunchedJob(ranks.context, tiny("parallel.gx=2", "parallel.gy=2"), 4, fail) as job:
        assert job.exit_codes() == [1, 1, 1, 1]
        outputs = job.outputs()
        assert [line["problem"] in outputs[0] for line in job.metric_lines() if line.get("event") == "failed"] == [True]
    assert re.search(r"error: rank 2 on \S+ failed: ValueError: the dog ate it\n$", outputs[0])
    assert "Traceback" in outputs[2] and not any("Traceback" in outputs[rank] for rank in (0, 1, 3))


def fail_during_a_save(ends, run_dir, rank):
    """Rank 1 fails in step 4 while rank 0 saves step 3, until the error is recorded or, unless it ``ends``, forever."""
    from gpt4d.checkpoint.writer import Writer
    from gpt4d.runtime import rendezvous

    shorten_timeouts()
    rendezvous.SAVE_S = 30.0 if ends else 1.0
    write, log = Writer.write_data, pathlib.Path(run_dir, "metrics.jsonl")

    def write_slowly(self, plan, planner):
        while not (ends and '"failed"' in log.read_text()):
            time.sleep(0.02)
            activity.progress()
        return write(self, plan, planner)

    def act(_):
        raise ValueError("the dog ate it")

    if rank == 0:
        Writer.write_data = write_slowly
    else:
        at_step(4, act)


@pytest.mark.parametrize("ends", [True, full(False)])
def test_an_error_during_a_slow_save_is_reported_first_and_then_the_save_may_end(ranks, tiny, ends):
    config = tiny(*GRID, "parallel.timeout_s=2")
    with LaunchedJob(ranks.context, config, 2, functools.partial(fail_during_a_save, ends, config.run.dir)) as job:
        assert job.exit_codes() == [1, 1], job.outputs()
        outputs = job.outputs()
    assert re.search(r"error: rank 1 on \S+ failed: ValueError: the dog ate it\n$", outputs[0])
    assert "Traceback" in outputs[1] and "".join(outputs).count("error:") == 1
    saved = [path.name for path in pathlib.Path(config.run.dir, "checkpoints").iterdir()]
    assert saved == ["step_00000003" if ends else "step_00000003.partial"]


def fail_in_commit(rank):
    from gpt4d.checkpoint import lifecycle

    def commit(partial):
        raise ValueError("the dog ate it")

    shorten_timeouts()
    lifecycle.commit = commit


def test_an_exception_in_the_commit_of_a_checkpoint_names_rank_0(ranks, tiny):
    with LaunchedJob(ranks.context, tiny(*GRID), 2, fail_in_commit) as job:
        assert job.exit_codes() == [1, 1], job.outputs()
        outputs = job.outputs()
    assert re.search(r"error: rank 0 on \S+ failed: ValueError: the dog ate it\n$", outputs[0]), outputs
    assert "in commit\n" in outputs[0] and "Traceback" not in outputs[1]


def sleep(rank):
    if rank == 1:
        at_step(5, lambda _: threading.Event().wait())


def test_a_hang_is_reported_with_collective_axis_layer_and_missing_rank(ranks, tiny, tmp_path):
    config = tiny("parallel.gz=2", "parallel.timeout_s=2")
    with LaunchedJob(ranks.context, config, 2, sleep) as job:
        assert job.exit_codes() == [1, 1]
        output = job.outputs()[0]
    message = r"hang: rank 0 on \S+ waited \d+ s .* for all_gather z of tokens: rank 1 on \S+ has not started it"
    assert re.search(rf"error: {message} and is in trainer.py:\d+ \(_loop\)", output), output
    records = sorted((tmp_path / "run" / "hang").iterdir())
    assert [path.name for path in records] == ["rank_00000.txt", "rank_00001.txt"]
    assert "waiting for: {'axis': 'z', 'name': 'all_gather z'" in records[0].read_text()
    assert "waiting for: None" in records[1].read_text() and "_step" in records[1].read_text()


def hang_beside_a_rank_that_ends_late(rank):
    """Rank 1 hangs. Rank 0, which reports that, ends a second after rank 1."""
    from gpt4d.runtime.rendezvous import Rendezvous

    leave = Rendezvous._keep_store_alive

    def leave_late(self, lost=()):
        leave(self, lost)
        time.sleep(1.0)

    shorten_timeouts()
    if rank == 0:
        Rendezvous._keep_store_alive = leave_late
    sleep(rank)


def test_connections_that_break_after_the_report_of_a_hang_print_no_traceback(ranks, tiny):
    config = tiny("parallel.gz=2", "parallel.timeout_s=2")
    with LaunchedJob(ranks.context, config, 2, hang_beside_a_rank_that_ends_late) as job:
        assert job.exit_codes() == [1, 1]
        output = "".join(job.outputs())
    assert output.count("error:") == 1 and "Traceback" not in output and "GLHF" not in output, output


def test_a_hang_ends_the_job_even_if_its_report_cannot_be_written(ranks, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hang").write_text("in the way")
    with LaunchedJob(ranks.context, tiny("parallel.gz=2", "parallel.timeout_s=2"), 2, sleep) as job:
        assert job.exit_codes() == [1, 1]
        assert "error: hang: rank 0 on" in job.outputs()[0]


def hang_in_the_log(rank):
    from gpt4d.writing import LineLog

    def write_nothing(self):
        threading.Event().wait()

    shorten_timeouts()
    if rank == 0:
        at_step(3, lambda _: setattr(LineLog, "_write", write_nothing))


def test_a_file_system_that_does_not_answer_ends_the_job(ranks, tiny):
    with LaunchedJob(ranks.context, tiny("parallel.gz=2", "parallel.timeout_s=2"), 2, hang_in_the_log) as job:
        assert job.exit_codes() == [1, 1]
        assert re.search(r"error: hang: .*rank 0 on \S+ .*is in writing.py", "".join(job.outputs()))


def hang_in_the_first_step(rank):
    from gpt4d.runtime import hangs

    hangs.STARTUP_S = 1.0
    if rank == 1:
        at_step(1, lambda _: threading.Event().wait())


def test_a_hang_in_the_first_step_is_reported(ranks, tiny):
    with LaunchedJob(ranks.context, tiny("parallel.gz=2", "parallel.timeout_s=1"), 2, hang_in_the_first_step) as job:
        assert job.exit_codes() == [1, 1]
        output = job.outputs()[0]
    message = r"waited \d+ s \(parallel.timeout_s \+ 1 s for the first steps\) for all_gather z of tokens: rank 1"
    assert re.search(message, output), output


def hang_in(function, rank):
    import torch.distributed as dist

    from gpt4d.runtime import hangs

    hangs.STARTUP_S = 1.0
    shorten_timeouts()
    if rank == 1:
        setattr(dist, function, lambda *args, **kwargs: threading.Event().wait())


@pytest.mark.parametrize(
    ("function", "activity"),
    [("init_process_group", "connecting all ranks"), full("new_group", "connecting the ranks of the grid's axes")],
)
def test_ranks_that_cannot_connect_are_reported(ranks, tiny, function, activity):
    with LaunchedJob(ranks.context, tiny("parallel.gx=2"), 2, functools.partial(hang_in, function)) as job:
        assert job.exit_codes() == [1, 1]
        assert f"{activity} took longer than 1 s; check the network between the nodes" in job.outputs()[0]


def truncate_the_tokens(rank):
    """Truncate the token files after they are mapped, as an interrupted copy onto them does."""

    def act(trainer):
        for path in trainer.task._files.directory.glob("train_*.tokens"):
            os.truncate(path, 0)

    at_step(2, act)


def test_a_token_file_that_is_truncated_during_a_run_is_named(ranks, tiny, tmp_path):
    config = tiny("data.workers=0", f"data.cache_dir={tmp_path / 'cache'}")
    with LaunchedJob(ranks.context, config, 1, truncate_the_tokens) as job:
        # Printing the stacks of other threads, which still run, may end the process first.
        assert job.exit_codes()[0] in (-signal.SIGBUS, -signal.SIGSEGV)
        assert re.search(r'Fatal Python error: Bus error\n(.|\n)*File ".*/data/tokens.py"', job.outputs()[0])
    with LaunchedJob(ranks.context, config, 1) as job:
        assert job.exit_codes() == [1]
        assert re.search(r"error: \S+/train_00000.tokens: .*", job.outputs()[0])


def lack_a_gpu(rank):
    from gpt4d.config import NodeError
    from gpt4d.runtime import job

    def select_device(_):
        raise NodeError("node b has 2 GPU(s) for 4 tasks")

    shorten_timeouts()
    if rank == 1:
        job.select_device = select_device


def test_a_node_with_too_few_gpus_ends_the_job_at_once(ranks, tiny):
    with LaunchedJob(ranks.context, tiny(), 2, lack_a_gpu) as job:
        assert job.exit_codes() == [1, 1], job.outputs()
        assert re.search(r"error: rank 1 on \S+ failed: node b has 2 GPU", job.outputs()[0])


def stay_away(rank):
    from gpt4d.runtime import rendezvous

    rendezvous.CONNECT_S = 1.0
    shorten_timeouts()
    if rank:
        os._exit(3)


def test_a_rank_that_does_not_connect_is_named(ranks, tiny):
    with LaunchedJob(ranks.context, tiny(), 2, stay_away) as job:
        assert job.exit_codes() == [1, 3], job.outputs()
        assert "error: 1 of 2 ranks did not connect within 1 s, the first of them rank 1" in job.outputs()[0]


def fill_disk(rank):
    from gpt4d.checkpoint.writer import Writer
    from gpt4d.runtime import errors

    def full(self, plan, planner):
        raise OSError(errno.ENOSPC, "No space left on device")

    errors.PRINT_GRACE_S = 1000.0  # for errors that rank 0 may not have found yet
    if rank == 1:
        Writer.write_data = full


def test_no_rank_lingers_after_an_error_that_all_ranks_have_raised(ranks, tiny):
    with LaunchedJob(ranks.context, tiny(*GRID), 2, fill_disk) as job:
        assert job.exit_codes() == [1, 1], job.outputs()
        assert sum("could not be saved (rank 1" in output for output in job.outputs()) == 1
