"""A family and a task that gpt4d has never seen: trained, planned, saved on one grid and resumed on another."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import Config, ConfigError, GridSizes
from gpt4d.model import registry
from gpt4d.optim.schedule import learning_rate
from gpt4d.parallel.grid import Grid
from gpt4d.plan import one_stage
from gpt4d.planner import search, tables
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.workload import training_state
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.seams import toy_torch
from tests.seams.plain_toy import RECOMPUTED, PlainToy, configure
from tests.support.grids import bytes_planned, bytes_sent, full, metric_lines, on_grid, train_in_rank
from tests.support.run_files import events

STEPS, SAVED, SAMPLES = 12, 6, 8
GRID, OTHER_GRID = GridSizes(2, 2, 2, 1), GridSizes(1, 2, 1, 2)
TRAINING = (
    f"train.batch_size={SAMPLES}", f"train.steps={STEPS}", "train.validate_every=0", "optim.warmup_steps=3",
    "optim.lr=0.02", f"checkpoint.every={SAVED}", "checkpoint.keep=9", "logging.every=1",
)  # fmt: skip


def trained(ranks, run_dir: Path, sizes: GridSizes, *overrides: str) -> Config:
    """Return the configuration of a finished run on a grid."""
    config = configure(*TRAINING, *on_grid(sizes), f"run.dir={run_dir}", *overrides)
    ranks.run(sizes.devices, train_in_rank, config)
    return config


def losses(config: Config) -> list[float]:
    return [line["loss"] for line in metric_lines(config.run.dir)]


def plain_run(config: Config) -> tuple[list[float], float, torch.Tensor]:
    """Losses, validation loss and averaged weight of the run, in plain torch."""
    model, settings, decay = PlainToy(config, torch.float32), config.optim, toy_torch.DECAY
    weights = list(model.weights.values())
    optimizer = torch.optim.AdamW(weights, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay)
    result, average = [], torch.zeros_like(model.weights["output.weight"])
    for step in range(config.train.steps):
        loss = model.squared_error([i % toy_torch.SAMPLES for i in range(step * SAMPLES, (step + 1) * SAMPLES)])
        loss.backward()
        result.append(loss.item())
        nn.utils.clip_grad_norm_(weights, settings.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings, config.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        average = decay * average + (1 - decay) * model.weights["output.weight"].detach()
    held_out = range(toy_torch.SAMPLES, toy_torch.SAMPLES + toy_torch.HELD_OUT)
    return result, model.squared_error(held_out).item(), average


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory) -> Config:
    """Return the configuration of a finished run on GRID, with recomputation, a cache and two microbatches per step."""
    return trained(ranks, tmp_path_factory.mktemp("straight"), GRID, *RECOMPUTED)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [(GridSizes(), ()), (GridSizes(x=2), ("parallel.chunks=2", "parallel.sequence_parallel=true")), full(GRID, ())],
    ids=str,
)
def test_toy_trains_like_plain_torch_and_sends_the_planned_bytes(ranks, tmp_path, sizes, options):
    config = trained(ranks, tmp_path, sizes, *options)
    expected_losses, expected_validation, _ = plain_run(config)
    assert losses(config) == pytest.approx(expected_losses, rel=1e-5)
    assert losses(config)[-1] < 0.8 * losses(config)[0]
    (validation,) = events(tmp_path, "validation")
    assert validation["loss"] == pytest.approx(expected_validation, rel=1e-5)
    assert metric_lines(tmp_path)[-1]["rows"] == STEPS * SAMPLES * 3
    assert bytes_sent(tmp_path) == bytes_planned(config, sizes)


def test_toy_with_recomputation_trains_alike_and_sends_the_planned_bytes(straight):
    assert losses(straight) == pytest.approx(plain_run(straight)[0], rel=1e-5)
    assert bytes_sent(straight.run.dir) == bytes_planned(straight, GRID)
    (sample,) = events(straight.run.dir, "sample")
    assert sample["squared_error"] > 0 and sample["rows"] == STEPS * SAMPLES * 3


def extra_state(checkpoint: Path) -> torch.Tensor:
    return Checkpoint(checkpoint).files.global_tensor("extra.output_average")


def test_toy_saved_on_one_grid_resumes_on_another(ranks, tmp_path, straight):
    """The second grid also shards the optimizer, so that the task reads a weight while its rows are gathered."""
    saved, finished = checkpoint_dir.committed(Path(straight.run.dir))
    config = trained(ranks, tmp_path, OTHER_GRID, "optim.shard_states=true", f"checkpoint.resume={saved}")
    assert losses(config) == pytest.approx(losses(straight)[SAVED:], rel=1e-5)
    assert bytes_sent(tmp_path) == bytes_planned(config, OTHER_GRID)
    resumed, expected = extra_state(checkpoint_dir.committed(tmp_path)[-1]), plain_run(config)[2]
    for average in (resumed, extra_state(finished)):
        assert torch.allclose(average, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(extra_state(saved), expected, rtol=1e-2)


def test_a_checkpoint_of_another_toy_or_of_gpt2_is_rejected(straight):
    saved = Checkpoint(checkpoint_dir.committed(Path(straight.run.dir))[0])
    with pytest.raises(ConfigError, match=r"model\.wide=64: the checkpoint .* has 32"):
        saved.check_fits(replace(straight.model, wide=64))
    with pytest.raises(ConfigError, match=r"model=gpt2: the checkpoint .* is of family toy"):
        saved.check_fits(configure("model=gpt_tiny").model)
    with pytest.raises(ConfigError, match=r"task=language_modeling: .* was trained for regression"):
        saved.check_task("language_modeling", {})


def test_parameters_of_the_toy_are_as_described():
    config = configure()
    module = build_stage(one_stage(config), Grid.single_device(), torch.device("cpu")).module
    built = {name: (p.spec.shape, p.spec.layout) for name, p in module.named_parameters()}
    described = registry.describe(config.model).parameters
    assert list(built.items()) == [(name, (spec.shape, spec.layout)) for name, spec in described.items()]


@pytest.mark.parametrize(
    ("model", "checkpointing"), [("toy", "none"), ("gpt_tiny", "full"), full("toy", "full"), full("gpt_tiny", "none")]
)
def test_a_planned_step_ends_with_only_gradients_held(model, checkpointing):
    config = configure(f"model={model}", "train.seq_len=4", f"train.activation_checkpointing={checkpointing}")
    description = registry.describe(config.model)
    step = Estimate(config, GRID, description).walk(4, description.blocks)
    assert step.run(2).held == training_state(description, GRID, config.optim)["gradients"]


def test_without_input_gradient_a_backward_plans_no_gather_and_no_sum():
    """Data has no gradient, so the first layer's backward plans none; the last layer's does."""
    config = configure()
    description = registry.describe(config.model)
    first, *_, last = description.units
    weights = description.probe.weights(first), description.probe.weights(last)
    used = (("input.weight",), ()), (("output.weight",), ("output.weight",))  # in forward and backward
    assert tuple((each.forward, each.backward) for each in weights) == used
    alone = (replace(description, parts=((unit,),)) for unit in (first, last))
    walks = (Estimate(config, GRID, each).walk(4, each.blocks).run(1) for each in alone)
    of_first, of_last = (walk.bytes for walk in walks)
    rows = 4 * 3
    # An all-reduce of two ranks sends its bytes once.
    assert of_first["x"] == rows * 24 // GRID.y * 4 and of_first["y"] == 0
    assert of_last["y"] == rows * 4 // GRID.x * 4 and of_last["x"] == rows * 24 // GRID.y * 4 + 4  # and the loss
    # A gather and a scatter: a use right after the forward's gathers nothing.
    assert of_first["z"] == 2 * (12 * 24 // GRID.devices * 4) and of_last["z"] == 2 * (24 * 4 // GRID.devices * 4)


def test_toy_appears_in_the_planner_table_without_forbidden_grids():
    config = configure("model.wide=12")
    ranking = search.rank(config, 8)
    assert ranking.plans and all(12 % (plan.sizes.x * plan.sizes.z) == 0 for plan in ranking.plans)
    text = tables.table(config, 8, ranking)
    assert "toy on 8 device(s)" in text and "2x2x2x1" in text and "1x8x1x1" in text
    # 24 hidden features on y and z, but neither features, nor wide, nor outputs can be split over 8 ranks of x.
    assert not any(line.strip().startswith(("8x1x1x1", "1x1x8x1")) for line in text.splitlines())
    problem = "parallel.gx·gz=8: does not divide model.features=12; use one of 1, 2, 3, 4, 6, 12"
    assert f"grid(s) are not possible; the first: {problem}" in text
    with pytest.raises(ConfigError, match=r"parallel\.gx·gz=8: does not divide model\.features=12"):
        validate(configure("parallel.gz=8"), 8)


def test_equal_toy_blocks_are_grouped_and_extrapolated():
    """Nine blocks that alternate between two kinds, in eight microbatches, are not walked. The bytes stay exact."""
    config = configure("model.blocks=9", "train.micro_batch_size=1")
    estimate = Estimate(config, GRID)
    first, second, *others = [block.kind for block in estimate.description.blocks]
    assert first != second and others == [first, second, first, second, first, second, first]
    walked = estimate.walk(1, estimate.description.blocks).run(8)
    for axis, used in estimate.step(1).comm.items():
        assert used["bytes"] == pytest.approx(walked.bytes[axis]), axis
