"""Ranks are signaled, killed, fail or hang: all ranks end, checkpoints survive, and the cause is reported."""

import errno
import functools
import os
import pathlib
import re
import signal
import time

import pytest

from gpt4d.runtime import activity
from gpt4d.runtime.errors import NodeError
from tests.support.faults import Fault, at_step, block, fail, kill, losses, shorten_timeouts, signal_itself
from tests.support.grids import full, train_in_rank
from tests.support.jobs import LaunchedJob, ended_job

GRID = ["parallel.gz=2", "checkpoint.every=3", "checkpoint.keep=2", "train.steps=8"]
HANGS = ["parallel.gz=2", "parallel.timeout_s=1"]
KILL = functools.partial(kill, signal.SIGKILL)
WRITE, STARTUP = ("gpt4d.checkpoint.storage", "write_shards"), ("gpt4d.runtime.hangs", "STARTUP_S")
DOG = r"error: rank {} on \S+ failed: ValueError: the dog ate it\n$"


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """Return the losses of an uninterrupted run, once a test has needed them."""
    return []


@pytest.fixture
def assert_resumes(ranks, tiny, tmp_path, expected):
    """Return a function that resumes a run and asserts that its losses are those of an uninterrupted run."""

    def resume(config) -> LaunchedJob:
        job = ended_job(ranks.context, config, [0, 0])
        if not expected:
            straight = tiny(*GRID, f"run.dir={tmp_path / 'straight'}")
            ranks.run(2, train_in_rank, straight)
            expected.extend(losses(straight))
        assert losses(config) == expected
        return job

    return resume


@pytest.mark.parametrize(("number", "target"), [(signal.SIGUSR1, 0), full(signal.SIGTERM, 1)])
def test_a_signal_to_one_rank_saves_the_run_and_it_resumes_exactly(ranks, tiny, assert_resumes, number, target):
    config = tiny(*GRID)
    job = ended_job(ranks.context, config, [75, 75], functools.partial(signal_itself, number, 4, target))
    (stopped,) = job.events("signal")
    assert 4 <= stopped["step"] <= 6 and stopped["step"] == max(line["step"] for line in job.metric_lines())
    (resumed,) = assert_resumes(config).events("resume")
    assert resumed["step"] == stopped["step"]


def hang_after_a_signal(rank):
    """Signal this process, then block: the step never ends."""
    at_step(4, lambda _: (kill(signal.SIGTERM), block()))


def test_a_second_signal_ends_at_once_and_checkpoints_stay_intact(ranks, tiny, assert_resumes):
    config = tiny(*GRID)
    with LaunchedJob(ranks.context, config, 2, hang_after_a_signal) as job:
        job.wait_for_step(3)
        while any(process.is_alive() for process in job.processes):
            job.signal(signal.SIGTERM)
            job.processes[0].join(0.05)
        assert job.exit_codes() == [75, 75]
    assert_resumes(config)


def kill_in_the_backward(profile):
    for parameter in profile.stage.module.parameters():
        parameter.register_post_accumulate_grad_hook(KILL)


# By phase: function in which a rank ends, and the step.
KILLS = {
    "start": (KILL, ("gpt4d.checkpoint.run", "RunCheckpoints.resume"), None),
    "forward": (KILL, ("gpt4d.model.text", "TextModelSpec.compute"), 5),
    "backward": (kill_in_the_backward, None, 5),
    "optimizer": (KILL, ("gpt4d.optim.optimizer", "Optimizer.step"), 5),
    "save": (KILL, WRITE, None),
}


@pytest.mark.parametrize(
    ("phase", "target"),
    [("forward", 0), ("save", 1), full("start", 1), full("backward", 1), full("optimizer", 1), full("save", 0)],
)
def test_a_killed_rank_ends_the_job_and_is_named_and_the_run_resumes(ranks, tiny, assert_resumes, phase, target):
    config, codes = tiny(*GRID), [1, 1]
    codes[target] = -signal.SIGKILL
    output = "".join(ended_job(ranks.context, config, codes, Fault(target, *KILLS[phase])).outputs())
    assert re.search(rf"error: rank {target} on \S+ failed: no sign of life", output)
    assert output.count("error:") == 1 and "GLHF" not in output  # gloo's own message about the lost connection
    assert_resumes(config)


def test_an_exception_on_one_rank_ends_all_and_rank_0_prints_it(ranks, tiny):
    fault = Fault(2, fail, step=3, shorten=False)
    job = ended_job(ranks.context, tiny("parallel.gx=2", "parallel.gy=2"), [1, 1, 1, 1], fault)
    outputs = job.outputs()
    assert [line["problem"] in outputs[0] for line in job.events("failed")] == [True]
    assert re.search(DOG.format(2), outputs[0])
    assert "Traceback" in outputs[2] and not any("Traceback" in outputs[rank] for rank in (0, 1, 3))


def fail_during_a_save(ends, run_dir, rank):
    """Rank 1 fails in step 4 while rank 0 saves step 3, until the error is recorded or, unless it ``ends``, forever."""
    from gpt4d.checkpoint import storage
    from gpt4d.runtime import job

    shorten_timeouts()
    job.SAVE_S = 30.0 if ends else 1.0
    write, log = storage.write_shards, pathlib.Path(run_dir, "metrics.jsonl")

    def write_slowly(*arguments):
        while not (ends and '"failed"' in log.read_text()):
            time.sleep(0.02)
            activity.progress()
        return write(*arguments)

    if rank == 0:
        storage.write_shards = write_slowly
    else:
        at_step(4, fail)


@pytest.mark.parametrize("ends", [True, full(False)])
def test_an_error_during_a_slow_save_is_reported_first_and_then_the_save_may_end(ranks, tiny, ends):
    config = tiny(*GRID, "parallel.timeout_s=2")
    prepare = functools.partial(fail_during_a_save, ends, config.run.dir)
    outputs = ended_job(ranks.context, config, [1, 1], prepare).outputs()
    assert re.search(DOG.format(1), outputs[0])
    assert "Traceback" in outputs[1] and "".join(outputs).count("error:") == 1
    saved = [path.name for path in pathlib.Path(config.run.dir, "checkpoints").iterdir()]
    assert saved == ["step_00000003" if ends else "step_00000003.partial"]


def test_an_exception_in_the_commit_of_a_checkpoint_names_rank_0(ranks, tiny):
    fault = Fault(None, fail, ("gpt4d.checkpoint.lifecycle", "commit"))
    outputs = ended_job(ranks.context, tiny(*GRID), [1, 1], fault).outputs()
    assert re.search(DOG.format(0), outputs[0]), outputs
    assert "in fail\n" in outputs[0] and "Traceback" not in outputs[1]


def hang_beside_a_rank_that_ends_late(rank):
    """Rank 1 hangs. Rank 0, which reports that, ends a second after rank 1."""
    shorten_timeouts()
    end = os._exit
    if rank == 0:
        os._exit = lambda code: (time.sleep(1.0), end(code))
    if rank == 1:
        at_step(5, block)


def test_a_hang_is_reported_with_collective_axis_layer_and_missing_rank(ranks, tiny, tmp_path):
    outputs = ended_job(ranks.context, tiny(*HANGS), [1, 1], hang_beside_a_rank_that_ends_late).outputs()
    message = r"hang: rank 0 on \S+ waited \d+ s .* for all_gather z of tokens: rank 1 on \S+ has not started it"
    assert re.search(rf"error: {message} and is in trainer.py:\d+ \(_loop\)", outputs[0]), outputs[0]
    output = "".join(outputs)
    assert output.count("error:") == 1 and "Traceback" not in output and "GLHF" not in output, output
    records = sorted((tmp_path / "run" / "hang").iterdir())
    assert [path.name for path in records] == ["rank_00000.txt", "rank_00001.txt"]
    assert "waiting for: {'axis': 'z', 'name': 'all_gather z'" in records[0].read_text()
    assert "waiting for: None" in records[1].read_text() and "act_and_step" in records[1].read_text()


def test_a_hang_in_the_first_step_is_reported_even_if_its_report_cannot_be_written(ranks, tiny, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hang").write_text("in the way")
    fault = Fault(1, block, step=1, constants={STARTUP: 1.0})
    output = ended_job(ranks.context, tiny(*HANGS), [1, 1], fault).outputs()[0]
    limit = r"waited \d+ s \(parallel.timeout_s \+ 1 s for the first steps\)"
    assert re.search(rf"error: hang: rank 0 on \S+ {limit} for all_gather z of tokens: rank 1", output), output


def test_a_file_system_that_does_not_answer_ends_the_job(ranks, tiny):
    fault = Fault(0, block, ("os", "write"), step=3, constants={("gpt4d.runtime.hangs", "MIN_LIMIT_S"): 1.5})
    output = "".join(ended_job(ranks.context, tiny(*HANGS), [1, 1], fault).outputs())
    assert re.search(r"error: hang: .*rank 0 on \S+ .*is in files.py", output), output


@pytest.mark.parametrize(
    ("function", "activity"),
    [("init_process_group", "connecting all ranks"), full("new_group", "connecting the ranks of the grid's axes")],
)
def test_ranks_that_cannot_connect_are_reported(ranks, tiny, function, activity):
    fault = Fault(1, block, ("torch.distributed", function), constants={STARTUP: 1.0})
    job = ended_job(ranks.context, tiny("parallel.gx=2"), [1, 1], fault)
    assert f"{activity} took longer than 1 s; check the network between the nodes" in job.outputs()[0]


def truncate_the_tokens(cache, rank):
    """Truncate the token files after they are mapped, as an interrupted copy onto them does."""
    at_step(2, lambda _: [os.truncate(path, 0) for path in cache.rglob("train_*.tokens")])


def test_a_token_file_that_is_truncated_during_a_run_is_named(ranks, tiny, tmp_path):
    cache = tmp_path / "cache"
    config = tiny("data.workers=0", f"data.cache_dir={cache}")
    with LaunchedJob(ranks.context, config, 1, functools.partial(truncate_the_tokens, cache)) as job:
        # Printing the stacks of other threads, which still run, may end the process first.
        assert job.exit_codes()[0] in (-signal.SIGBUS, -signal.SIGSEGV)
        assert re.search(r'Fatal Python error: Bus error\n(.|\n)*File ".*/data/tokens.py"', job.outputs()[0])
    (output,) = ended_job(ranks.context, config, [1]).outputs()
    assert re.search(r"error: \S+/train_00000.tokens: .*", output)


def lack_a_gpu(*_):
    raise NodeError("node b has 2 GPU(s) for 4 tasks")


def test_a_node_with_too_few_gpus_ends_the_job_at_once(ranks, tiny):
    fault = Fault(1, lack_a_gpu, ("gpt4d.runtime.job", "select_device"))
    output = ended_job(ranks.context, tiny(), [1, 1], fault).outputs()[0]
    assert re.search(r"error: rank 1 on \S+ failed: node b has 2 GPU", output)


def test_a_rank_that_does_not_connect_is_named(ranks, tiny):
    fault = Fault(1, functools.partial(os._exit, 3), constants={("gpt4d.runtime.job", "CONNECT_S"): 1.0})
    output = ended_job(ranks.context, tiny(), [1, 3], fault).outputs()[0]
    assert "error: 1 of 2 ranks did not connect within 1 s, the first of them rank 1" in output


def fill_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_rank_lingers_after_an_error_that_all_ranks_have_raised(ranks, tiny):
    grace = {("gpt4d.config.commands", "PRINT_GRACE_S"): 1000.0}  # for errors that rank 0 may not have found yet
    outputs = ended_job(ranks.context, tiny(*GRID), [1, 1], Fault(1, fill_disk, WRITE, constants=grace)).outputs()
    assert sum("could not be saved (rank 1" in output for output in outputs) == 1
