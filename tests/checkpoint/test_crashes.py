"""A run killed at any instant of a save resumes exactly from its newest committed checkpoint."""

import json
import os
import random
import signal
import threading
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from gpt4d.checkpoint import checkpoint_dir, lifecycle, storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import GridSizes
from tests.checkpoint import save_state
from tests.support.grids import metric_lines, train_in_rank

RANKS = 2


def run_rank(config, rank, store, messages, hold):
    """Train as one rank of a run. Sends a message when a save begins, and when the run is done.

    With ``hold`` the message comes when a save is committed, and nothing happens after it.
    """
    import torch.distributed as dist

    begin, retain = lifecycle.begin, lifecycle.retain

    def begin_and_report(*args):
        if not hold:
            messages.send_bytes(b"begun")
        return begin(*args)

    def retain_and_hold(*args):
        retain(*args)
        if hold:
            messages.send_bytes(b"begun")
            threading.Event().wait()

    lifecycle.begin, lifecycle.retain = begin_and_report, retain_and_hold
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    train_in_rank(config)
    dist.destroy_process_group()
    messages.send_bytes(b"done")


def run_until_killed(context, config, store, delay, hold=False):
    """Run, and kill all ranks ``delay`` seconds after a save began, or never if None. Returns whether it finished.

    With ``hold`` they are killed between a save and the next.
    """
    receiver, sender = context.Pipe()
    processes = [
        context.Process(target=run_rank, args=(config, rank, store, sender, hold), daemon=True) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    sender.close()
    ended = 0
    try:
        while ended < RANKS:
            assert receiver.poll(60), "no save begins"
            message = receiver.recv_bytes()
            ended += message == b"done"
            if message == b"begun" and delay is not None:
                wait([process.sentinel for process in processes], timeout=delay)
                return False
    finally:
        for process in processes:
            if ended < RANKS:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        receiver.close()
    return True


@pytest.mark.parametrize(
    ("async_save", "kills"),
    [
        ("true", 4),
        pytest.param("true", 10, marks=pytest.mark.full),  # background saves have more ways to fail
        pytest.param("false", 5, marks=pytest.mark.full),
    ],
)
def test_run_killed_during_saves_resumes_from_newest_committed(ranks, tiny, tmp_path, async_save, kills):
    options = (f"checkpoint.async_save={async_save}", "optim.schedule_steps=1000", "model.dropout=0.1")
    straight = tiny(*options, "train.steps=3", "checkpoint.every=1", "run.dir=" + tiny().run.dir + "-straight")
    ranks.run(RANKS, train_in_rank, straight)
    lines = (Path(straight.run.dir) / "metrics.jsonl").read_text().splitlines()
    longest = 2 * max(json.loads(line)["seconds"] for line in lines if '"event": "checkpoint"' in line)
    draw, config = random.Random(async_save), tiny(*options, "train.steps=1000", "checkpoint.every=1")
    run_dir = Path(config.run.dir)
    midway = 0
    for number in range(4 * kills):
        if number >= kills and (midway or kills < 5):
            break  # on a busy machine, saves take longer or shorter than before: some more kills are needed
        # Every fourth kill falls between two saves, however slow the disk is.
        delay, hold = draw.uniform(0, longest), number % 4 == 3
        run_until_killed(ranks.context, config, str(tmp_path / f"store{number}"), delay, hold)
        midway += any(path.suffix for path in (run_dir / "checkpoints").iterdir())
        for directory in checkpoint_dir.committed(run_dir):
            storage.verify(Checkpoint(directory))
    assert checkpoint_dir.committed(run_dir) and midway < number, "a kill must fall between two saves"
    assert midway or kills < 5, "a kill must fall inside a save"
    steps = Checkpoint.open(run_dir).meta.progress.step
    end = tiny(*options, f"train.steps={steps + 2}", "checkpoint.every=1")
    assert run_until_killed(ranks.context, end, str(tmp_path / "last"), None)

    straight = tiny(*options, f"train.steps={steps + 2}", "run.dir=" + straight.run.dir)
    ranks.run(RANKS, train_in_rank, straight)
    expected = {line["step"]: (line["loss"], line["grad_norm"]) for line in metric_lines(straight.run.dir)}
    lines = [(line["step"], (line["loss"], line["grad_norm"])) for line in metric_lines(run_dir)]
    assert {step for step, _ in lines} == set(expected)
    assert [line for line in lines if line[1] != expected[line[0]]] == []
    kept = {f"step_{step:08d}" for step in (steps + 1, steps + 2)}
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == kept
    files = {
        "checkpoints",
        "config.yaml",
        "configs",
        "lock",
        "loss.png",
        "metrics.jsonl",
        "starts.jsonl",
        "verified.json",
    }
    assert {path.name for path in run_dir.iterdir()} == files


def save_until_killed(run_dir, operation):
    """Save three checkpoints in a process that is killed before or after file operation number ``operation``."""
    import torch.distributed as dist

    count = 0

    def count_calls(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            count += 1
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.fsync, os.rename, os.unlink, os.rmdir = map(count_calls, (os.fsync, os.rename, os.unlink, os.rmdir))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_state(GridSizes(), False, run_dir, (1, 2, 3), keep=1, async_save=operation % 2 == 0)


@pytest.mark.parametrize("step", [17, pytest.param(7, marks=pytest.mark.full)])
def test_save_killed_at_any_operation_keeps_the_newest_committed(ranks, tmp_path, step):
    operation, seen = 0, set()
    while True:
        operation += step
        run_dir = tmp_path / str(operation)
        process = ranks.context.Process(target=save_until_killed, args=(run_dir, operation), daemon=True)
        process.start()
        process.join()
        committed = checkpoint_dir.committed(run_dir)
        for directory in committed:
            storage.verify(Checkpoint(directory))
        newest = int(committed[-1].name[-1]) if committed else 0
        assert newest >= max(seen, default=0), "a committed checkpoint is lost"
        seen.add(newest)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert save_again(ranks, run_dir) == ["step_00000004"], "files leak"
    assert seen == {0, 1, 2, 3} and operation > 70


def save_again(ranks, run_dir):
    ranks.run(1, save_once_more, run_dir)
    return [path.name for path in (run_dir / "checkpoints").iterdir()]


def save_once_more(run_dir):
    save_state(GridSizes(), False, run_dir, (4,), keep=1)
