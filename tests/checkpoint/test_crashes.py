"""Killed at any instant of saving, a run goes on from its newest committed checkpoint as if nothing had been."""

import json
import os
import random
import signal
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from gpt4d.checkpoint import checkpoint_dir, verifying
from gpt4d.config import GridSizes
from tests.checkpoint import saved_by
from tests.grids import metric_lines, train_in_rank

KILLS = {"true": 10, "false": 5}  # in the background there is more that may go wrong
RANKS = 2


def life(config, rank, store, begun):
    """A rank of a run that tells when a save begins, and ends when it is killed or done."""
    import torch.distributed as dist

    begin = checkpoint_dir.begin

    def telling(*args):
        begun.send_bytes(b"begun")
        return begin(*args)

    checkpoint_dir.begin = telling
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    train_in_rank(config)
    dist.destroy_process_group()
    begun.send_bytes(b"done")


def live(context, config, store, delay):
    """One life: killed so many seconds after a save began (None: not at all). Whether it came to its end."""
    ours, theirs = context.Pipe()
    processes = [context.Process(target=life, args=(config, rank, store, theirs), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    theirs.close()
    ended = 0
    try:
        while ended < RANKS:
            assert ours.poll(60), "no save begins"
            said = ours.recv_bytes()
            ended += said == b"done"
            if said == b"begun" and delay is not None:
                wait([process.sentinel for process in processes], timeout=delay)
                return False
    finally:
        for process in processes:
            if ended < RANKS:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        ours.close()
    return True


@pytest.mark.parametrize("async_save", ["true", "false"])
def test_killed_while_it_saves_a_run_goes_on_from_the_newest_committed(ranks, tiny, tmp_path, async_save):
    options = (f"checkpoint.async_save={async_save}", "optim.schedule_steps=1000", "model.dropout=0.1")
    straight = tiny(*options, "train.steps=3", "checkpoint.every=1", "run.dir=" + tiny().run.dir + "-straight")
    ranks.run(RANKS, train_in_rank, straight)
    lines = (Path(straight.run.dir) / "metrics.jsonl").read_text().splitlines()
    longest = 2 * max(json.loads(line)["seconds"] for line in lines if '"event": "checkpoint"' in line)
    draw, config = random.Random(async_save), tiny(*options, "train.steps=1000", "checkpoint.every=1")
    run_dir = Path(config.run.dir)
    midway = 0
    for number in range(KILLS[async_save]):
        live(ranks.context, config, str(tmp_path / f"store{number}"), draw.uniform(0, longest))
        midway += any(path.suffix for path in (run_dir / "checkpoints").iterdir())
        for directory in checkpoint_dir.committed(run_dir):
            verifying.verify(directory)
    assert checkpoint_dir.committed(run_dir) and 0 < midway < KILLS[async_save], (
        "kills must fall into saves and beside them"
    )
    steps = checkpoint_dir.Meta.read(checkpoint_dir.committed(run_dir)[-1]).progress.step
    end = tiny(*options, f"train.steps={steps + 2}", "checkpoint.every=1")
    assert live(ranks.context, end, str(tmp_path / "last"), None)

    straight = tiny(*options, f"train.steps={steps + 2}", "run.dir=" + straight.run.dir)
    ranks.run(RANKS, train_in_rank, straight)
    expected = {line["step"]: (line["loss"], line["grad_norm"]) for line in metric_lines(straight.run.dir)}
    lines = [(line["step"], (line["loss"], line["grad_norm"])) for line in metric_lines(run_dir)]
    assert {step for step, _ in lines} == set(expected)
    assert [line for line in lines if line[1] != expected[line[0]]] == []
    kept = {f"step_{step:08d}" for step in (steps + 1, steps + 2)}
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == kept
    assert {path.name for path in run_dir.iterdir()} == {"checkpoints", "config.yaml", "loss.png", "metrics.jsonl"}


def dying(run_dir, operation):
    """A process that saves three checkpoints and is killed before or after it syncs, renames or removes something."""
    import torch.distributed as dist

    count = 0

    def counted(function):
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

    os.fsync, os.rename, os.unlink, os.rmdir = map(counted, (os.fsync, os.rename, os.unlink, os.rmdir))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saved_by(GridSizes(), False, run_dir, (1, 2, 3), keep=1, async_save=operation % 2 == 0)


def test_killed_at_any_operation_of_a_save_it_leaves_the_newest_committed(ranks, tmp_path):
    operation, seen, step = 0, set(), 7
    while True:
        operation += step
        run_dir = tmp_path / str(operation)
        process = ranks.context.Process(target=dying, args=(run_dir, operation), daemon=True)
        process.start()
        process.join()
        committed = checkpoint_dir.committed(run_dir)
        for directory in committed:
            verifying.verify(directory)
        newest = int(committed[-1].name[-1]) if committed else 0
        assert newest >= max(seen, default=0), "what was committed is lost"
        seen.add(newest)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert saved_again(ranks, run_dir) == ["step_00000004"], "something leaks"
    assert seen == {0, 1, 2, 3} and operation > 10 * step


def saved_again(ranks, run_dir):
    ranks.run(1, save_once_more, run_dir)
    return [path.name for path in (run_dir / "checkpoints").iterdir()]


def save_once_more(run_dir):
    saved_by(GridSizes(), False, run_dir, (4,), keep=1)
