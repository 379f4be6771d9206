"""Training with Muon: equal losses on every plan, and after a resume on another plan."""

import pytest

from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure

MUON = (
    "optim.algorithm=muon",
    "optim.lr=0.01",
    "model.layers=3",
    "train.batch_size=8",
    "checkpoint.every=10",
    "train.steps=20",
)
PIPELINE = "parallel.pipeline."


def losses(config):
    return [line["loss"] for line in metric_lines(config.run.dir)]


@pytest.fixture(scope="module")
def made():
    return []


@pytest.fixture
def serial(ranks, tiny, made, tmp_path):
    """Return the losses of a run on one device, which trains once."""
    if not made:
        config = tiny(*MUON, f"run.dir={tmp_path}/serial")
        ranks.run(1, train_in_rank, config)
        made.append(losses(config))
    return made[0]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (4, ("parallel.gx=2", "parallel.gdata=2", "optim.shard_states=true")),
        (3, (PIPELINE + "stages=2", PIPELINE + "stage_grids=[2x1x1x1,1x1x1x1]")),
        full(4, ("parallel.mode=atp", "parallel.d1=2", "parallel.d2=2", "parallel.chunks=2")),
        full(4, ("parallel.gz=2", "parallel.gy=2", "train.activation_checkpointing=full")),
    ],
    ids=str,
)
def test_the_plan_changes_no_loss(ranks, tiny, serial, world_size, settings):
    config = tiny(*MUON, *settings)
    ranks.run(world_size, train_in_rank, config)
    assert len(losses(config)) == 20 and losses(config) == pytest.approx(serial, rel=1e-5)


def test_a_run_continues_on_other_grids_and_stages(ranks, tiny, serial):
    parts = [
        (8, 8, ("parallel.gx=2", "parallel.gy=2", "parallel.gz=2")),
        (14, 3, (PIPELINE + "stages=3", "optim.shard_states=true")),
        (20, 1, ()),
    ]
    for steps, world_size, settings in parts:
        config = tiny(*MUON, f"train.steps={steps}", "optim.schedule_steps=20", "checkpoint.every=4", *settings)
        ranks.run(world_size, train_in_rank, config)
    assert losses(config) == pytest.approx(serial, rel=1e-5)


def test_a_checkpoint_with_the_states_of_another_optimizer_is_one_line(ranks, tiny):
    config = tiny("optim.algorithm=muon", "train.steps=2")
    ranks.run(1, train_in_rank, config)
    with pytest.raises(RankFailure, match=r"exp_avg is missing.* another optimizer: set the old optim\.algorithm, or"):
        ranks.run(1, train_in_rank, tiny("train.steps=4", "checkpoint.allow_changes=[optim]"))


def test_a_resumed_run_has_equal_bits(ranks, tiny, serial, tmp_path):
    config = tiny(*MUON, "train.steps=10", "optim.schedule_steps=20", f"run.dir={tmp_path}/short")
    ranks.run(1, train_in_rank, config)
    again = tiny(*MUON, "optim.schedule_steps=20", f"run.dir={tmp_path}/short")
    ranks.run(1, train_in_rank, again)
    assert losses(again) == serial
