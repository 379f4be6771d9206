"""A run killed at any instant of a save resumes exactly from its newest committed checkpoint."""

import itertools
import json
import os
import random
import signal
from pathlib import Path

import pytest

from gpt4d.checkpoint import checkpoint_dir, storage
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import GridSizes
from tests.support.checkpoint_kills import RANKS, run_until_killed
from tests.support.checkpoints import names, save_state, save_with
from tests.support.grids import full, metric_lines, train_in_rank


@pytest.mark.parametrize(
    ("async_save", "kills"),
    [("true", 2), full("true", 10), full("false", 5)],  # background saves have more ways to fail
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
        # The second and then every fourth kill falls between two saves, however slow the disk is.
        delay, hold = draw.uniform(0, longest), number % 4 == 1
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
    assert names(run_dir) == [f"step_{step:08d}" for step in (steps + 1, steps + 2)]
    assert sorted(path.name for path in run_dir.iterdir()) == [
        *("checkpoints", "config.yaml", "configs", "lock", "loss.png", "metrics.jsonl", "starts.jsonl", "verified.json")
    ]


def save_until_killed(run_dir, operation):
    """Save three checkpoints in a process that is killed before or after file operation number ``operation``."""
    import torch.distributed as dist

    calls = itertools.count(1)

    def kill_if_reached():
        if next(calls) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def count_calls(function):
        def call(*args, **kwargs):
            kill_if_reached()
            result = function(*args, **kwargs)
            kill_if_reached()
            return result

        return call

    os.fsync, os.rename, os.unlink, os.rmdir = map(count_calls, (os.fsync, os.rename, os.unlink, os.rmdir))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_state(GridSizes(), False, run_dir, (1, 2, 3), keep=1, async_save=operation % 2 == 0)


@pytest.mark.parametrize("step", [17, full(7)])
def test_save_killed_at_any_operation_keeps_the_newest_committed(ranks, tmp_path, step):
    seen = set()
    for operation in itertools.count(step, step):
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
        ranks.run(1, save_with, run_dir, (4,), {"keep": 1})
        assert names(run_dir) == ["step_00000004"], "files leak"
    assert seen == {0, 1, 2, 3} and operation > 70
