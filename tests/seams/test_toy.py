"""A family and a task that gpt4d has never seen: trained, planned, saved on one grid and resumed on another."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import Config, ConfigError, GridSizes
from gpt4d.model import registry
from gpt4d.optim.schedule import learning_rate
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import StageRuntime
from gpt4d.planner import search, tables
from gpt4d.planner.device import Links
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.step import StepWalk
from gpt4d.planner.workload import training_state
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.seams import toy, toy_torch
from tests.support.grids import bytes_planned, bytes_sent, global_tensor, metric_lines, on_grid, train_in_rank
from tests.support.settings import configured

STEPS, SAVED = 12, 6
GRID, OTHER_GRID = GridSizes(2, 2, 2, 1), GridSizes(1, 2, 1, 2)
RECOMPUTED = ("train.activation_checkpointing=full", "train.micro_batch_size=2", "parallel.cache_layers=1")


def configure(run_dir: object, *overrides: str) -> Config:
    return configured(
        [
            "model=toy",
            "train.seq_len=3",
            "train.batch_size=8",
            f"train.steps={STEPS}",
            "train.validate_every=0",
            "optim.warmup_steps=3",
            "optim.algorithm=adamw",
            "optim.lr=0.02",
            f"checkpoint.every={SAVED}",
            "checkpoint.keep=9",
            "logging.every=1",
            f"run.dir={run_dir}",
            *overrides,
        ]
    )


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metric_lines(run_dir)]


def events(run_dir: Path, name: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == name]


class PlainToy(nn.Module):
    """The toy model in plain torch."""

    def __init__(self, config: toy.ToyConfig, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.input = self._linear(weights["input.weight"])
        self.output = self._linear(weights["output.weight"])
        self.gates, self.ups, self.downs = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for index in range(config.blocks):
            gate, up = weights[f"blocks.{index}.up.weight"].unbind(1)
            self.gates.append(self._linear(gate))
            self.ups.append(self._linear(up))
            self.downs.append(self._linear(weights[f"blocks.{index}.down.weight"]))

    @staticmethod
    def _linear(weight: torch.Tensor) -> nn.Linear:
        linear = nn.Linear(*weight.shape, bias=False, dtype=weight.dtype)
        linear.weight.data.copy_(weight.T)
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for gate, up, down in zip(self.gates, self.ups, self.downs, strict=True):
            x = x + down(F.silu(gate(x)) * up(x))
        return self.output(x)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients under the names and in the shapes of the toy's parameters."""
        result = {f"{name}.weight": self.get_submodule(name).weight.grad.T for name in ("input", "output")}
        for index, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            result[f"blocks.{index}.up.weight"] = torch.stack((gate.weight.grad.T, up.weight.grad.T), 1)
            result[f"blocks.{index}.down.weight"] = down.weight.grad.T
        return result


def plain_toy(config: Config, dtype: torch.dtype) -> PlainToy:
    """Return the plain model with the initial weights of a run of ``config``."""
    module = build_stage(config, Grid.single_device(), torch.device("cpu"), dtype).module
    return PlainToy(config.model, {name: p.detach() for name, p in module.named_parameters()})


def squared_error(model: PlainToy, config: Config, sample_ids, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    inputs, targets = toy_torch.samples(config, sample_ids)
    return (model(inputs.to(dtype)) - targets).square().sum() / (len(sample_ids) * config.train.seq_len)


def plain_run(config: Config) -> tuple[list[float], float, torch.Tensor]:
    """Losses, validation loss and averaged weight of the run, in plain torch."""
    model, size = plain_toy(config, torch.float32), config.train.batch_size
    settings = config.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay
    )
    result, average = [], torch.zeros_like(model.output.weight.T)
    for step in range(config.train.steps):
        sample_ids = [i % toy_torch.SAMPLES for i in range(step * size, (step + 1) * size)]
        loss = squared_error(model, config, sample_ids)
        loss.backward()
        result.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.param_groups[0]["lr"] = learning_rate(step, settings, config.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        average = toy_torch.DECAY * average + (1 - toy_torch.DECAY) * model.output.weight.detach().T
    held_out = range(toy_torch.SAMPLES, toy_torch.SAMPLES + toy_torch.HELD_OUT)
    return result, squared_error(model, config, held_out).item(), average


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory) -> Config:
    """Return the configuration of a finished run on GRID, with recomputation, a cache and two microbatches per step."""
    config = configure(tmp_path_factory.mktemp("straight"), *on_grid(GRID), *RECOMPUTED)
    ranks.run(GRID.devices, train_in_rank, config)
    return config


@pytest.mark.parametrize(
    ("sizes", "options"),
    [(GridSizes(), ()), (GRID, ()), (GRID, ("parallel.chunks=2", "parallel.sequence_parallel=true"))],
    ids=str,
)
def test_toy_trains_like_plain_torch_and_sends_the_planned_bytes(ranks, tmp_path, sizes, options):
    config = configure(tmp_path, *on_grid(sizes), *options)
    ranks.run(sizes.devices, train_in_rank, config)
    expected_losses, expected_validation, _ = plain_run(config)
    assert losses(tmp_path) == pytest.approx(expected_losses, rel=1e-5)
    assert losses(tmp_path)[-1] < 0.8 * losses(tmp_path)[0]
    (validation,) = events(tmp_path, "validation")
    assert validation["loss"] == pytest.approx(expected_validation, rel=1e-5)
    assert metric_lines(tmp_path)[-1]["rows"] == STEPS * 8 * 3
    assert bytes_sent(tmp_path) == bytes_planned(config, sizes)


def test_toy_with_recomputation_trains_alike_and_sends_the_planned_bytes(straight):
    run_dir = Path(straight.run.dir)
    assert losses(run_dir) == pytest.approx(plain_run(straight)[0], rel=1e-5)
    assert bytes_sent(run_dir) == bytes_planned(straight, GRID)
    (sample,) = events(run_dir, "sample")
    assert sample["squared_error"] > 0 and sample["rows"] == STEPS * 8 * 3


def extra_state(checkpoint: Path) -> torch.Tensor:
    return Checkpoint(checkpoint).files.global_tensor("extra.output_average")


def test_toy_saved_on_one_grid_resumes_on_another(ranks, tmp_path, straight):
    """The second grid also shards the optimizer, so that the task reads a weight while its rows are gathered."""
    saved, finished = checkpoint_dir.committed(Path(straight.run.dir))
    config = configure(tmp_path, *on_grid(OTHER_GRID), "optim.shard_states=true", f"checkpoint.resume={saved}")
    ranks.run(OTHER_GRID.devices, train_in_rank, config)
    assert losses(tmp_path) == pytest.approx(losses(Path(straight.run.dir))[SAVED:], rel=1e-5)
    assert bytes_sent(tmp_path) == bytes_planned(config, OTHER_GRID)
    resumed = extra_state(checkpoint_dir.committed(tmp_path)[-1])
    expected = plain_run(config)[2]
    for average in (resumed, extra_state(finished)):
        assert torch.allclose(average, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(extra_state(saved), expected, rtol=1e-2)


def test_a_checkpoint_of_another_toy_or_of_gpt2_is_rejected(tmp_path, straight):
    saved, _ = checkpoint_dir.committed(Path(straight.run.dir))
    with pytest.raises(ConfigError, match=r"model\.wide=64: the checkpoint .* has 32"):
        Checkpoint(saved).check_fits(replace(straight.model, wide=64))
    with pytest.raises(ConfigError, match=r"model=gpt2: the checkpoint .* is of family toy"):
        Checkpoint(saved).check_fits(configured(["model=gpt_tiny"]).model)
    with pytest.raises(ConfigError, match=r"task=language_modeling: .* was trained for regression"):
        Checkpoint(saved).check_task("language_modeling", {})


def gradients_on_grid(config: Config, sizes: GridSizes) -> dict[str, torch.Tensor]:
    """On a rank: the global gradients of one step in float64."""
    grid = Grid(sizes)
    stage = build_stage(config, grid, torch.device("cpu"), torch.float64)
    task, plan = toy_torch.Regression(config), validate(config, sizes.devices)
    task.connect(stage, plan.micro_batch_size(plan.stages[0]))
    reducer = GradientReducer(stage.weights, dict(stage.module.named_parameters()))
    runtime = StageRuntime(stage, reducer, task.compute)
    runtime.forward_backward(task.batches(0), plan.microbatches, config.train.batch_size * config.train.seq_len)
    return {name: global_tensor(p.grad, p.spec, grid) for name, p in stage.module.named_parameters()}


@pytest.mark.parametrize("options", [(), RECOMPUTED], ids=["plain", "recomputed"])
def test_toy_gradients_in_float64_equal_those_of_plain_torch(ranks, tmp_path, options):
    config = configure(tmp_path, *on_grid(GRID), *options)
    model = plain_toy(config, torch.float64)
    squared_error(model, config, range(8), torch.float64).backward()
    expected = model.gradients()
    for gradients in ranks.run(GRID.devices, gradients_on_grid, config, GRID):
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_parameters_of_the_toy_are_as_described(tmp_path):
    config = configure(tmp_path)
    module = build_stage(config, Grid.single_device(), torch.device("cpu")).module
    built = {name: (p.spec.shape, p.spec.layout) for name, p in module.named_parameters()}
    described = registry.describe(config.model).parameters
    assert list(built.items()) == [(name, (spec.shape, spec.layout)) for name, spec in described.items()]


@pytest.mark.parametrize("model", ["toy", "gpt_tiny"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_planned_step_ends_with_only_gradients_held(model, checkpointing):
    overrides = f"model={model}", "optim=adamw", "train.seq_len=4", f"train.activation_checkpointing={checkpointing}"
    config = configured(list(overrides))
    description = registry.describe(config.model)
    step = StepWalk(config, description, GRID, Links(config.cluster, GRID), 4)
    assert step.run(2).held == training_state(description, GRID, config.optim)["gradients"]


def test_without_input_gradient_a_backward_plans_no_gather_and_no_sum(tmp_path):
    """Data has no gradient, so the first layer's backward plans none; the last layer's does."""
    config = configure(tmp_path)
    description = registry.describe(config.model)
    first, *_, last = description.units
    weights = description.probe.weights(first), description.probe.weights(last)
    assert [(used.forward, used.backward) for used in weights] == [
        (("input.weight",), ()),
        (("output.weight",), ("output.weight",)),
    ]
    walks = (
        StepWalk(config, replace(description, parts=((unit,),)), GRID, Links(config.cluster, GRID), 4).run(1)
        for unit in (first, last)
    )
    of_first, of_last = (walk.bytes for walk in walks)
    rows = 4 * 3
    # An all-reduce of two ranks sends its bytes once.
    assert of_first["x"] == rows * 24 // GRID.y * 4 and of_first["y"] == 0
    assert of_last["y"] == rows * 4 // GRID.x * 4 and of_last["x"] == rows * 24 // GRID.y * 4 + 4  # and the loss
    # A gather and a scatter: a use right after the forward's gathers nothing.
    assert of_first["z"] == 2 * (12 * 24 // GRID.devices * 4) and of_last["z"] == 2 * (24 * 4 // GRID.devices * 4)


def test_toy_appears_in_the_planner_table_without_forbidden_grids(tmp_path):
    config = configure(tmp_path, "model.wide=12", "train.batch_size=16")
    ranking = search.rank(config, 8)
    assert ranking.plans and all(12 % (plan.sizes.x * plan.sizes.z) == 0 for plan in ranking.plans)
    text = tables.table(config, 8, ranking)
    assert "toy on 8 device(s)" in text and "2x2x2x1" in text and "1x8x1x1" in text
    # 24 hidden features on y and z, but neither features, nor wide, nor outputs can be split over 8 ranks of x.
    assert not any(line.strip().startswith(("8x1x1x1", "1x1x8x1")) for line in text.splitlines())
    problem = "parallel.gx·gz=8: does not divide model.features=12; use one of 1, 2, 3, 4, 6, 12"
    assert f"grid(s) are not possible; the first: {problem}" in text
    with pytest.raises(ConfigError, match=r"parallel\.gx·gz=8: does not divide model\.features=12"):
        validate(configure(tmp_path, "parallel.gz=8"), 8)


def test_equal_toy_blocks_are_grouped_and_extrapolated(tmp_path):
    """Nine blocks that alternate between two kinds, in eight microbatches, are not walked. The bytes stay exact."""
    config = configure(tmp_path, "model.blocks=9", "train.batch_size=16", "train.micro_batch_size=1")
    estimate = Estimate(config, GRID)
    first, second, *others = [block.kind for block in estimate.description.blocks]
    assert first != second and others == [first, second, first, second, first, second, first]
    walked = estimate.walk(1, estimate.description.blocks).run(8)
    for axis, used in estimate.plan(1).comm.items():
        assert used["bytes"] == pytest.approx(walked.bytes[axis]), axis
