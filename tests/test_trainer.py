"""Invariants 1 and 2 over complete runs: against plain torch, on several grids, uninterrupted and resumed."""

from pathlib import Path

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.data.corpus import corpus as prepared
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.support.grids import (
    BINARY_GRIDS,
    build_model,
    bytes_planned,
    bytes_sent,
    full,
    hf_model,
    metric_lines,
    on_grid,
    train_in_rank,
)
from tests.support.rank_pool import RankFailure
from tests.support.run_files import events
from tests.support.training import losses_and_norms, mean_loss, plain_torch_run

OF_THE_MACHINE = "slow", "straggler"  # events that depend on what else it does


@pytest.fixture(scope="module")
def serial_run(ranks, corpus, tmp_path_factory):
    """Return a function from ``tiny`` with overrides to the losses and norms on one device, which trains once."""
    made = {}

    def trained(tiny, *overrides):
        if overrides not in made:
            config = tiny(*overrides, f"run.dir={tmp_path_factory.mktemp('serial')}")
            ranks.run(1, train_in_rank, config)
            made[overrides] = losses_and_norms(config)
        return made[overrides]

    return trained


def assert_equal_steps(found, expected, rel=1e-5):
    """Compare losses, to 1e-5, and gradient norms, to ``rel``."""
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=rel)


def reference(config, loss_of=None):
    start = build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed)
    return plain_torch_run(config, hf_model(start), loss_of)


def test_a_run_equals_plain_torch_with_transformers_model(serial_run, tiny):
    losses, norms = serial_run(tiny)
    assert_equal_steps((losses, norms), reference(tiny()), rel=1e-4)
    assert losses[-1] < 0.6 * losses[0], "nothing was learnt"


def loss_with_z_loss(config):
    """Return the function of ``plain_torch_run`` whose gradients include the z-loss, but whose value does not."""
    parts = []

    def keep_logits(module, arguments, result):
        parts.append(result.logits)

    def loss_of(model, step):
        hook = model.register_forward_hook(keep_logits)
        loss = mean_loss(config)(model, step)
        hook.remove()
        term = config.train.z_loss * parts.pop().logsumexp(-1).square().mean()
        return loss + term - term.detach()

    return loss_of


def test_a_run_with_z_loss_equals_plain_torch(serial_run, tiny):
    config = tiny("train.z_loss=0.02", "train.loss_chunks=2")
    expected, without = reference(config, loss_with_z_loss(config)), reference(config)
    assert_equal_steps(serial_run(tiny, "train.z_loss=0.02", "train.loss_chunks=2"), expected, rel=1e-4)
    assert max(abs(a - b) for a, b in zip(expected[0], without[0], strict=True)) > 1e-3


ATP = "parallel.mode=atp", "parallel.chunks=2", "parallel.sequence_parallel=true"
QWEN3 = "model=llama_tiny", "model.key_value_heads=2", "model.head_size=16", "model.inner=40", "model.qk_norm=true"
STEP_CACHE = "parallel.cache_layers=all", "parallel.cache_scope=step"
NO_OVERLAP, ONE_SAMPLE = "parallel.overlap.data=false", "train.micro_batch_size=1"
RECOMPUTED, SHARDED = "train.activation_checkpointing=full", "optim.shard_states=true"
RUNS = [  # grid, settings of both runs, and settings that change no loss
    ((2, 1, 2), (), (RECOMPUTED, "train.micro_batch_size=2", "data.workers=0")),
    ((2, 2, 1, 2), (), ("parallel.chunks=2", "parallel.sequence_parallel=true", SHARDED)),
    ((2, 2), (), (*ATP, "parallel.d1=2", "parallel.d2=2", "parallel.rank_order=yx")),
    full((2, 4), (), (*ATP, "parallel.d1=2", "parallel.d2=4", "parallel.rank_order=yx")),
    full((2, 4), (), (*ATP, "parallel.d1=2", "parallel.d2=4", "parallel.rank_order=xy")),
    full((2, 1, 2, 2), (), (ONE_SAMPLE, "data.workers=3", "train.deterministic=true", SHARDED, NO_OVERLAP)),
    full((2, 1, 2, 2), (), ("parallel.replicated_layers=1", *STEP_CACHE, ONE_SAMPLE)),
    full((4, 1, 2), QWEN3, ()),  # more ranks of x than heads of keys and values
    *(full(tuple(grid), (), ()) for grid in BINARY_GRIDS[1:]),
]


@pytest.mark.parametrize(("sizes", "shared", "own"), RUNS, ids=lambda value: "+".join(map(str, value)) or "default")
def test_20_steps_equal_the_serial_run_and_send_the_planned_bytes(ranks, serial_run, tiny, sizes, shared, own):
    sizes = GridSizes(*sizes)
    config = tiny(*shared, *own, *(() if "parallel.mode=atp" in own else on_grid(sizes)))
    ranks.run(sizes.devices, train_in_rank, config)
    assert_equal_steps(losses_and_norms(config), serial_run(tiny, *shared))
    assert bytes_sent(config.run.dir) == bytes_planned(config, sizes)


@pytest.mark.parametrize(
    "overrides",
    [
        full((RECOMPUTED, "parallel.cache_layers=1", ONE_SAMPLE)),
        full(("parallel.cache_layers=all", "parallel.replicated_layers=1", SHARDED, "train.precision=bf16")),
        full(("model.hidden=36", "model.heads=6", "model.dropout=0.1", "parallel.overlap.all_gather=false")),
        full((*STEP_CACHE, "parallel.replicated_layers=1", ONE_SAMPLE, RECOMPUTED, "model.dropout=0.1")),
        (*STEP_CACHE, "parallel.chunks=2", RECOMPUTED, "train.precision=bf16", "model.dropout=0.1", SHARDED),
        full(("parallel.chunks=2", "parallel.scatter_heads=false", *STEP_CACHE)),
    ],
    ids="+".join,
)
def test_bytes_are_as_planned_with_caches_recomputation_and_bf16(ranks, tiny, overrides):
    config = tiny("parallel.gy=2", "parallel.gz=2", "train.steps=2", *overrides)
    ranks.run(8, train_in_rank, config)
    assert bytes_sent(config.run.dir) == bytes_planned(config, GridSizes(1, 2, 2, 2))


DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1", "train.deterministic=true", "optim.schedule_steps=20")


@pytest.mark.parametrize(("world", "overrides"), [(2, ()), full(4, (SHARDED, "train.precision=bf16"))])
def test_a_run_resumed_on_its_grid_gives_the_same_bits(ranks, tiny, world, overrides):
    words = (*DROPOUT, *overrides, "parallel.gy=2")
    uninterrupted = tiny(*words, "train.steps=12", "run.dir=" + tiny().run.dir + "-uninterrupted")
    halves = [tiny(*words, f"train.steps={steps}") for steps in (6, 12)]
    for config in (uninterrupted, *halves):
        ranks.run(world, train_in_rank, config)
    assert losses_and_norms(halves[1]) == losses_and_norms(uninterrupted)


GRIDS = [(GridSizes(1, 3, 1, 1), GridSizes(2, 1, 1, 1)), full(GridSizes(2, 2, 1, 1), GridSizes(1, 1, 2, 2))]
GRIDS.append(full(GridSizes(1, 1, 4, 2), GridSizes(4, 1, 1, 1)))


@pytest.mark.parametrize(("first", "second"), GRIDS, ids=str)
def test_a_run_resumed_on_another_grid_has_the_uninterrupted_losses(ranks, serial_run, tiny, first, second):
    after = tiny(*DROPOUT, *on_grid(second))
    ranks.run(first.devices, train_in_rank, tiny(*DROPOUT, *on_grid(first), "train.steps=10"))
    ranks.run(second.devices, train_in_rank, after)
    assert_equal_steps(losses_and_norms(after), serial_run(tiny, *DROPOUT))


def test_a_run_resumes_with_other_states_sharded_and_other_weights_whole(ranks, serial_run, tiny):
    for steps, world, overrides in (
        (7, 2, [SHARDED]),
        (14, 2, ["parallel.gx=2"]),
        (20, 4, ["parallel.gz=2", "parallel.replicated_layers=1", SHARDED]),
    ):
        # Without a validation, nothing comes between the last update and the checkpoint.
        run = tiny(*overrides, f"train.steps={steps}", "optim.schedule_steps=20", "train.validation_batches=0")
        ranks.run(world, train_in_rank, run)
    assert_equal_steps(losses_and_norms(run), serial_run(tiny))


FILES = "config.yaml configs starts.jsonl metrics.jsonl checkpoints loss.png lock verified.json"
KEYS_OF_A_STEP = (
    "step loss grad_norm lr skipped tokens epoch step_time_s busy_s data_wait_s tokens_per_s tflops_per_device mfu "
    "memory_gib memory comm time elapsed_s"
)


def test_the_run_directory_records_steps_and_events(ranks, tiny):
    config = tiny(
        "parallel.gx=2", "parallel.gy=2", "train.steps=4", "train.validate_every=2", "checkpoint.every=2",
        "checkpoint.keep=1", "logging.sample_tokens=5",
    )  # fmt: skip
    ranks.run(4, train_in_rank, config)
    run_dir = Path(config.run.dir)
    assert {p.name for p in run_dir.iterdir()} == {*FILES.split()}
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_00000004"]
    steps = metric_lines(run_dir)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert set(steps[-1]) == {*KEYS_OF_A_STEP.split()}
    assert steps[-1]["tokens"] == 4 * 16 * 16
    trained_on = len(prepared(config.data).first.tokens("train"))
    assert steps[-1]["epoch"] == 4 * 16 / ((trained_on - 1) // 16)
    assert set(steps[-1]["comm"]) == {"x", "y", "world"}
    assert set(steps[-1]["memory"]) == {"after_step", "weights", "gradients", "optimizer"}
    found = [(line["event"], line["step"]) for line in events(run_dir) if line["event"] not in OF_THE_MACHINE]
    # A save is reported when it has ended, which may be after the next validation.
    assert found[0] == ("start", 0)
    assert sorted(found[1:-2]) == [("checkpoint", 2), ("checkpoint", 4), ("validation", 2), ("validation", 4)]
    assert found[-2:] == [("sample", 4), ("done", 4)]


def linear_bytes(m, k, n, sizes, itemsize=4):
    """Bytes that one rank sends for a normal layer in a step (Eq. 1-3, Algorithm 1), m rows per (data, z) shard."""
    weight = k * n // (sizes.x * sizes.y)
    return {
        "y": 2 * (sizes.y - 1) / sizes.y * m * n // sizes.x * itemsize,
        "x": 2 * (sizes.x - 1) / sizes.x * m * k // sizes.y * itemsize,
        "z": (2 + 1) * (sizes.z - 1) / sizes.z * weight * itemsize,  # gathered twice, scattered once
    }


def multiply_once(sizes, m, k, n):
    weights = ShardedWeights(Context(Grid(sizes), torch.float32))
    layer = Layer(LinearSpec(k, n), weights)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    inputs = torch.zeros(m, k // sizes.y, requires_grad=True)
    run_alone(layer(inputs)).sum().backward()
    weights.schedule.finish()  # a rank must not end before its peers have its reduce-scatter
    return {axis.name: axis.traffic.read()["bytes"] for axis in weights.context.grid}


def test_bytes_of_a_layer_follow_the_papers_equations(ranks):
    sizes = GridSizes(2, 2, 2, 1)
    for counted in ranks.run(8, multiply_once, sizes, 6, 8, 12):
        expected = linear_bytes(6, 8, 12, sizes)
        assert {axis: counted[axis] for axis in expected} == expected


def test_a_checkpoint_of_another_tokenizer_is_rejected(ranks, tiny, tmp_path):
    ranks.run(1, train_in_rank, tiny("train.steps=1"))
    (tmp_path / "other.txt").write_text("other words " * 300)
    with pytest.raises(RankFailure, match="was trained with another tokenizer"):
        other = f"data.path={tmp_path / 'other.txt'}"
        ranks.run(2, train_in_rank, tiny("train.steps=2", other, "data.validation_fraction=0"))


def deterministic_settings(config) -> tuple[bool, bool]:
    Trainer(validate(config, 1), torch.device("cpu"))
    return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


def test_a_deterministic_run_does_not_fill_every_temporary_tensor(ranks, tiny):
    assert ranks.run(1, deterministic_settings, tiny("train.deterministic=true")) == [(True, False)]
