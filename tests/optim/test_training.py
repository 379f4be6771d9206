"""Training with Muon: equal losses after a resume, also on another plan; tests/exactness compares plans."""

import pytest

from tests.support.grids import metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure
from tests.support.training import serial_fixture

STEPS = 10
MUON = (
    "optim.algorithm=muon", "optim.lr=0.01", "model.layers=3", "train.batch_size=8", "checkpoint.every=5",
    f"train.steps={STEPS}", f"optim.schedule_steps={STEPS}",
)  # fmt: skip
STAGES = "parallel.pipeline.stages="


def losses(config):
    return [line["loss"] for line in metric_lines(config.run.dir)]


serial = serial_fixture(MUON, train_in_rank, losses)


def test_a_run_continues_on_other_grids_and_stages(ranks, tiny, serial):
    parts = (
        (4, 4, ("parallel.gx=2", "parallel.gz=2")),
        (7, 3, (STAGES + "3", "optim.shard_states=true")),
    )
    for steps, world_size, settings in (*parts, (STEPS, 1, ())):
        config = tiny(*MUON, f"train.steps={steps}", "checkpoint.every=2", *settings)
        ranks.run(world_size, train_in_rank, config)
    assert losses(config) == pytest.approx(serial, rel=1e-5)


def test_a_checkpoint_with_the_states_of_another_optimizer_is_one_line(ranks, tiny):
    ranks.run(1, train_in_rank, tiny("optim.algorithm=muon", "train.steps=2"))
    with pytest.raises(RankFailure, match=r"exp_avg is missing.* another optimizer: set the old optim\.algorithm, or"):
        ranks.run(1, train_in_rank, tiny("train.steps=4", "checkpoint.allow_changes=[optim]"))


def test_a_resumed_run_has_equal_bits(ranks, tiny, serial):
    for steps in (5, STEPS):
        config = tiny(*MUON, f"train.steps={steps}")
        ranks.run(1, train_in_rank, config)
    assert losses(config) == serial
