"""The batch size as a function of the samples that a run has read (train.batch_ramp)."""

import pytest
import torch

from gpt4d.config import ConfigError, GridSizes, TrainConfig, batch_size_at
from gpt4d.config.length import samples_of, steps_for
from gpt4d.planner.workload import micro_batch_sizes
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.grids import build_model, full, hf_model, metric_lines, train_in_rank
from tests.support.settings import configured
from tests.support.training import losses_and_norms, mean_loss, plain_torch_run

RAMP = [[0, 4], [18, 8], [60, 16]]  # 5 steps of 4 samples, 5 steps of 8 samples, then 16 samples
SIZES = 5 * [4] + 5 * [8] + 10 * [16]
STAGES = "parallel.pipeline.stages=2"


def sizes_of(train, steps):
    """Return the batch sizes of the first steps, by the definition of a ramp."""
    samples, found = 0, []
    for _ in range(steps):
        found.append(max(size for first, size in train.batch_ramp if first <= samples))
        samples += found[-1]
    return found


@pytest.mark.parametrize("ramp", [RAMP, [[0, 4], [1, 6], [2, 8]], [[0, 3], [7, 5], [8, 6], [100, 8]], [[0, 8]]])
def test_a_size_begins_with_the_first_step_at_or_after_its_first_sample(ramp):
    train = TrainConfig(batch_size=ramp[-1][1], batch_ramp=ramp)
    sizes = sizes_of(train, 40)
    positions = [sum(sizes[:step]) for step in range(41)]
    assert [batch_size_at(train, position) for position in positions[:40]] == sizes
    assert [samples_of(train, step) for step in range(41)] == positions
    for samples in range(1, positions[40] + 1):
        steps = steps_for(train, samples)
        assert positions[steps - 1] < samples <= positions[steps]
    assert sizes_of(TrainConfig(batch_ramp=RAMP), 20) == SIZES


MISTAKES = [  # the ramp and other settings, and the message after the key
    ("64", "64: not a list of first samples and batch sizes; use [[0,64],[1000000,128]], for"),
    ("[[0,4],[8]]", "[[0,4],[8]]: not a list of first samples and batch sizes; use"),
    ("[[0,2.5],[8,8]]", "[[0,2.5],[8,8]]: not a list of first samples and batch sizes; use"),
    ("[]", "[]: not a list of first samples and batch sizes; use"),
    ("[[4,4],[8,8]]", "[[4,4],[8,8]]: the first batch begins with sample 4; begin with [0,4]"),
    ("[[0,4],[8,2],[9,8]]", "[[0,4],[8,2],[9,8]]: [8,2] follows [0,4]; use increasing samples"),
    ("[[0,4],[0,8]]", "[[0,4],[0,8]]: [0,8] follows [0,4]; use increasing samples and"),
    ("[[0,4],[9,6]]", "[[0,4],[9,6]]: ends with 6 samples, and train.batch_size=8; set train.b"),
    ("[[0,3],[9,8]] parallel.gdata=2",
     "[[0,3],[9,8]]: its batch of 3 is not possible: train.batch_size=3: cannot be split over parallel.gdata·gz"),
    ("[[0,2],[9,8],[99,12]] train.batch_size=12 train.micro_batch_size=3",
     "[[0,2],[9,8],[99,12]]: its batch of 8 is not possible: train.micro_batch_size=3: does not divide a device"),
    ("[[0,2],[9,8]] parallel.chunks=2 parallel.gdata=2",
     "[[0,2],[9,8]]: its batch of 2 is not possible: parallel.chunks=2: does not divide a device's microbatch"),
    ("[[0,3],[9,8]] parallel.pipeline.stages=2 parallel.chunks=2",
     "[[0,3],[9,8]]: its batch of 3 cannot be cut into microbatches: each stage splits one over its gdata·gz"),
]  # fmt: skip


def test_a_mistake_in_a_ramp_is_one_line():
    cases = [(f"train.batch_ramp={words}", f"^train.batch_ramp={message}") for words, message in MISTAKES]
    assert not wrong_messages(cases, lambda words: validate(configured(["train.batch_size=8", *words.split()]), 2))


def configured_ramp(ramp, batch_size, *overrides):
    return configured([f"train.batch_size={batch_size}", f"train.batch_ramp={ramp}", *overrides])


def test_stages_have_microbatches_of_one_size_in_all_batches():
    def plan(*overrides):
        return validate(configured_ramp("[[0,4],[9,8]]", 8, STAGES, *overrides), 2)

    assert [plan().microbatches_of(size) for size in (4, 8)] == [4, 8]
    assert plan("parallel.pipeline.microbatches=2").microbatches_of(4) == 1
    expected = r"pipeline\.microbatches=1: .* every batch of train\.batch_ramp; use one of 2, 4"
    with pytest.raises(ConfigError, match=expected):
        plan("parallel.pipeline.microbatches=1")


@pytest.mark.parametrize(("mode", "devices"), [("auto", 8), ("atp", 4), full("atp", 8)])
def test_the_planner_chooses_a_grid_and_a_microbatch_that_divide_every_batch(mode, devices):
    plan = validate(configured_ramp("[[0,2],[100,12]]", 12, "cluster=local", f"parallel.mode={mode}"), devices)
    shards = plan.sizes.sample_shards(plan.config.parallel.context)
    micro_batch = plan.micro_batch_size(plan.stages[0])
    assert 2 % shards == 0 and micro_batch * shards * plan.microbatches == 12
    assert plan.microbatches_of(2) == max(1, 2 // micro_batch // shards)


def test_the_planner_tries_microbatches_that_divide_every_larger_share():
    config = configured_ramp("[[0,4],[50,16],[100,24]]", 24, "train.micro_batch_size=null")
    assert micro_batch_sizes(config, GridSizes(data=2)) == [12, 4, 2, 1]


def test_the_length_in_tokens_counts_the_smaller_batches():
    train = configured_ramp("[[0,4],[18,8],[6e1,16]]", 16, "train.seq_len=8", "train.tokens=1760").train
    assert (train.steps, train.batch_ramp) == (20, RAMP)


def on_ramp(tiny, *overrides):
    return tiny(f"train.batch_ramp={RAMP}".replace(" ", ""), "optim.schedule_steps=20", *overrides)


@pytest.fixture(scope="module")
def plain():
    """Return a function to the losses and norms of plain torch on the batches of the ramp, which trains once."""
    made = []

    def run(tiny):
        if not made:
            config = on_ramp(tiny)
            start = build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed)
            made.extend(plain_torch_run(config, hf_model(start), mean_loss(config, SIZES)))
        return made

    return run


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        full(1, ()),
        (4, ("parallel.gx=2", "train.micro_batch_size=4", "data.workers=2")),
        (2, (STAGES, "parallel.pipeline.microbatches=4")),
        full(4, (STAGES, "parallel.pipeline.stage_grids=[1x1x1x2,2x1x1x1]", "train.activation_checkpointing=full")),
        full(8, ("parallel.gz=2", "parallel.gy=2", "parallel.cache_layers=all", "parallel.cache_scope=step")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_run_on_a_ramp_equals_plain_torch_on_the_same_batches(ranks, plain, tiny, world, overrides):
    config = on_ramp(tiny, *overrides)
    ranks.run(world, train_in_rank, config)
    losses, norms = losses_and_norms(config)
    expected_losses, expected_norms = plain(tiny)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    tokens = [line["tokens"] for line in metric_lines(config.run.dir)]
    assert tokens == [16 * sum(SIZES[: step + 1]) for step in range(20)]


def test_a_run_resumes_within_a_ramp_bit_equal_and_on_stages_with_equal_losses(ranks, tiny, tmp_path):
    straight = on_ramp(tiny, f"run.dir={tmp_path / 'straight'}", "train.steps=12", "logging.every=12", "data.workers=2")
    ranks.run(1, train_in_rank, straight)
    (last,) = metric_lines(straight.run.dir)
    assert last["tokens_per_s"] * last["step_time_s"] * 12 == pytest.approx(last["tokens"])
    first = on_ramp(tiny, "train.steps=7", f"run.dir={tmp_path / 'first'}")
    ranks.run(1, train_in_rank, first)
    for name, world, overrides in (("same", 1, ()), ("stages", 2, (STAGES, "parallel.pipeline.microbatches=8"))):
        resume = f"checkpoint.resume={tmp_path / 'first/checkpoints/step_00000007'}"
        config = on_ramp(tiny, resume, "train.steps=12", f"run.dir={tmp_path / name}", *overrides)
        ranks.run(world, train_in_rank, config)
        resumed = metric_lines(config.run.dir)[-1]
        assert (resumed["step"], resumed["tokens"]) == (12, last["tokens"])
        if name == "same":
            assert (resumed["loss"], resumed["grad_norm"]) == (last["loss"], last["grad_norm"])
        assert resumed["loss"] == pytest.approx(last["loss"], rel=1e-5)
