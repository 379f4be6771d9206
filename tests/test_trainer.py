"""Invariants 1 and 2 over complete runs: against plain torch, on several grids, uninterrupted and resumed."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import GridSizes
from gpt4d.data import sampler
from gpt4d.data.prepare import corpus as prepared
from gpt4d.optim.schedule import learning_rate
from gpt4d.parallel.context import Context
from tests.data import batch
from tests.support.grids import (
    BINARY_GRIDS,
    PAIRWISE_GRIDS,
    build_model,
    bytes_planned,
    bytes_sent,
    full,
    hf_model,
    metric_lines,
    on_grid,
    sampled,
    train_in_rank,
)
from tests.support.rank_pool import RankFailure

OF_THE_MACHINE = "slow", "straggler"  # events that depend on what else it does


def losses_and_norms(lines):
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


@pytest.fixture(scope="module")
def serial_run(ranks, corpus, tmp_path_factory):
    """Return a function from ``tiny`` with overrides to the logged steps of a run on one device, which trains once."""
    made = {}

    def lines(tiny, *overrides):
        if overrides not in made:
            config = tiny(*overrides, f"run.dir={tmp_path_factory.mktemp('serial')}")
            ranks.run(1, train_in_rank, config)
            made[overrides] = metric_lines(config.run.dir)
        return made[overrides]

    return lines


def mean_loss(config):
    tokens = prepared(config.data).first.tokens("train")
    data = sampler.Sequences(tokens, config.train.seq_len, config.train.seed, shuffle=True)

    def loss_of(model, step):
        ids, targets = batch(data, step * config.train.batch_size, config.train.batch_size)
        return F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())

    return loss_of


def plain_torch_run(config, model, loss_of=None, rate_factor=lambda name: 1.0):
    """Train a model of transformers with torch's optimizer, our schedule and clipping. Return the losses and norms.

    ``loss_of`` returns the loss of the model in a step, by default the mean over the tokens of the configured data.
    ``rate_factor`` returns the factor of the learning rate of a parameter, which divides its weight decay.
    """
    groups = [
        {
            "params": [p],
            "weight_decay": config.optim.weight_decay / rate_factor(name) if p.dim() > 1 else 0.0,
            "factor": rate_factor(name),
        }
        for name, p in model.named_parameters()
    ]
    betas = (config.optim.beta1, config.optim.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=betas, eps=config.optim.epsilon)
    loss_of = loss_of or mean_loss(config)
    losses, norms = [], []
    for step in range(config.train.steps):
        loss = loss_of(model, step)
        loss.backward()
        # In float64, because clip_grad_norm_ sums the squares of a large float32 tensor with an error of 2e-4.
        norm = torch.stack([p.grad.norm(dtype=torch.float64) for p in model.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), config.optim.clip_norm, norm.float())
        norms.append(norm.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.optim, config.train.steps) * group["factor"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def test_a_run_equals_plain_torch_with_transformers_model(serial_run, tiny):
    config = tiny()
    start = build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed)
    losses, norms = losses_and_norms(serial_run(tiny))
    expected_losses, expected_norms = plain_torch_run(config, hf_model(start))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
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


def test_a_run_with_z_loss_equals_plain_torch_and_its_loss_on_a_grid(ranks, tiny, tmp_path):
    z_loss, grid = ("train.z_loss=0.02", "train.loss_chunks=2"), on_grid(GridSizes(2, 1, 2))
    config, on_four = tiny(*z_loss, f"run.dir={tmp_path / 'one'}"), tiny(*z_loss, *grid)
    ranks.run(1, train_in_rank, config)
    ranks.run(4, train_in_rank, on_four)
    start = build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed)
    expected_losses, expected_norms = plain_torch_run(config, hf_model(start), loss_with_z_loss(config))
    without, _ = plain_torch_run(config, hf_model(start))
    for run in (config, on_four):
        losses, norms = losses_and_norms(metric_lines(run.run.dir))
        assert losses == pytest.approx(expected_losses, rel=1e-5) and norms == pytest.approx(expected_norms, rel=1e-4)
    assert max(abs(a - b) for a, b in zip(expected_losses, without, strict=True)) > 1e-3


@pytest.mark.parametrize("sizes", sampled(BINARY_GRIDS[1:], PAIRWISE_GRIDS[2:4]))
def test_20_steps_equal_the_serial_run_and_send_the_planned_bytes(ranks, serial_run, tiny, sizes):
    losses, norms = losses_and_norms(serial_run(tiny))
    config = tiny(*on_grid(sizes))
    ranks.run(sizes.devices, train_in_rank, config)
    on_this_grid = losses_and_norms(metric_lines(config.run.dir))
    assert on_this_grid[0] == pytest.approx(losses, rel=1e-5)
    assert on_this_grid[1] == pytest.approx(norms, rel=1e-5)
    assert bytes_sent(config.run.dir) == bytes_planned(config, sizes)


@pytest.mark.full
def test_20_steps_of_a_qwen3_equal_its_serial_run_and_send_the_planned_bytes(ranks, tiny, tmp_path):
    model = "model=llama_tiny", "model.key_value_heads=2", "model.head_size=16", "model.inner=40", "model.qk_norm=true"
    sizes = GridSizes(4, 1, 2, 1)  # more ranks of x than heads of keys and values
    serial, config = tiny(*model, f"run.dir={tmp_path / 'serial'}"), tiny(*model, *on_grid(sizes))
    ranks.run(1, train_in_rank, serial)
    ranks.run(sizes.devices, train_in_rank, config)
    expected, actual = (losses_and_norms(metric_lines(run.run.dir)) for run in (serial, config))
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert actual[1] == pytest.approx(expected[1], rel=1e-5)
    assert bytes_sent(config.run.dir) == bytes_planned(config, sizes)


@pytest.mark.parametrize(
    "overrides",
    [
        full(("train.micro_batch_size=1", "data.workers=3")),
        ("train.activation_checkpointing=full", "train.micro_batch_size=2", "data.workers=0"),
        full(("train.deterministic=true",)),
        full(("optim.shard_states=true",)),
        full(("optim.shard_states=true", "parallel.overlap.data=false", "train.micro_batch_size=1")),
        full(
            (
                "parallel.replicated_layers=1",
                "parallel.cache_layers=all",
                "parallel.cache_scope=step",
                "train.micro_batch_size=1",
            )
        ),
        ("parallel.chunks=2", "parallel.sequence_parallel=true", "optim.shard_states=true"),
    ],
    ids="+".join,
)
def test_settings_of_the_step_change_no_loss_and_no_planned_byte(ranks, serial_run, tiny, overrides):
    losses, norms = losses_and_norms(serial_run(tiny))
    config = tiny("parallel.gx=2", "parallel.gz=2", *overrides)
    ranks.run(8, train_in_rank, config)
    on_this_grid = losses_and_norms(metric_lines(config.run.dir))
    assert on_this_grid[0] == pytest.approx(losses, rel=1e-5)
    assert on_this_grid[1] == pytest.approx(norms, rel=1e-5)
    assert bytes_sent(config.run.dir) == bytes_planned(config, GridSizes(2, 1, 2, 2))


@pytest.mark.parametrize("order", [full("xy"), "yx"])
def test_a_run_in_mode_atp_equals_the_serial_run(ranks, serial_run, tiny, order):
    losses, norms = losses_and_norms(serial_run(tiny))
    words = ("parallel.d1=2", "parallel.d2=4", f"parallel.rank_order={order}", "model.vocab_multiple=16")
    config = tiny("parallel.mode=atp", "parallel.chunks=2", "parallel.sequence_parallel=true", *words)
    ranks.run(8, train_in_rank, config)
    on_the_mesh = losses_and_norms(metric_lines(config.run.dir))
    assert on_the_mesh[0] == pytest.approx(losses, rel=1e-5)
    assert on_the_mesh[1] == pytest.approx(norms, rel=1e-5)
    assert bytes_sent(config.run.dir) == bytes_planned(config, GridSizes(2, 4))


@pytest.mark.parametrize(
    "overrides",
    [
        full(("train.activation_checkpointing=full", "parallel.cache_layers=1", "train.micro_batch_size=1")),
        full(
            (
                "parallel.cache_layers=all",
                "optim.shard_states=true",
                "train.precision=bf16",
                "train.micro_batch_size=2",
            )
        ),
        full(("model.hidden=36", "model.heads=6", "model.dropout=0.1", "parallel.overlap.all_gather=false")),
        (
            "parallel.cache_layers=all",
            "parallel.cache_scope=step",
            "parallel.replicated_layers=1",
            "train.micro_batch_size=1",
            "train.activation_checkpointing=full",
            "model.dropout=0.1",
        ),
        full(("parallel.replicated_layers=1", "optim.shard_states=true", "train.activation_checkpointing=full")),
        (
            "parallel.chunks=2",
            "train.activation_checkpointing=full",
            "train.precision=bf16",
            "model.dropout=0.1",
            "optim.shard_states=true",
        ),
        full(
            (
                "parallel.chunks=2",
                "parallel.scatter_heads=false",
                "parallel.cache_layers=all",
                "parallel.cache_scope=step",
            )
        ),
    ],
    ids="+".join,
)
def test_bytes_are_as_planned_with_caches_recomputation_and_bf16(ranks, tiny, overrides):
    config = tiny("parallel.gy=2", "parallel.gz=2", "train.steps=3", *overrides)
    ranks.run(8, train_in_rank, config)
    assert bytes_sent(config.run.dir) == bytes_planned(config, GridSizes(1, 2, 2, 2))


DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1", "train.deterministic=true", "optim.schedule_steps=20")


@pytest.mark.parametrize("overrides", [(), full(("optim.shard_states=true", "train.precision=bf16"))], ids="+".join)
def test_a_run_resumed_on_its_grid_gives_the_same_bits(ranks, tiny, overrides):
    uninterrupted = tiny(*DROPOUT, *overrides, "parallel.gy=2", "run.dir=" + tiny().run.dir + "-uninterrupted")
    ranks.run(4, train_in_rank, uninterrupted)
    halves = [tiny(*DROPOUT, *overrides, "parallel.gy=2", f"train.steps={steps}") for steps in (10, 20)]
    for half in halves:
        ranks.run(4, train_in_rank, half)
    assert losses_and_norms(metric_lines(halves[1].run.dir)) == losses_and_norms(metric_lines(uninterrupted.run.dir))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (GridSizes(2, 2, 1, 1), GridSizes(1, 1, 2, 2)),
        (GridSizes(1, 3, 1, 2), GridSizes(2, 1, 1, 1)),
        full(GridSizes(1, 1, 4, 2), GridSizes(4, 1, 1, 1)),
    ],
    ids=str,
)
def test_a_run_resumed_on_another_grid_has_the_uninterrupted_losses(ranks, serial_run, tiny, first, second):
    before = tiny(*DROPOUT, *on_grid(first), "train.steps=10")
    after = tiny(*DROPOUT, *on_grid(second))
    ranks.run(first.devices, train_in_rank, before)
    ranks.run(second.devices, train_in_rank, after)
    losses, norms = losses_and_norms(serial_run(tiny, *DROPOUT))
    resumed = losses_and_norms(metric_lines(after.run.dir))
    assert resumed[0] == pytest.approx(losses, rel=1e-5)
    assert resumed[1] == pytest.approx(norms, rel=1e-5)


def test_a_run_resumes_with_other_states_sharded_and_other_weights_whole(ranks, serial_run, tiny):
    for steps, world, overrides in (
        (7, 4, ["parallel.gy=2", "optim.shard_states=true"]),
        (14, 2, ["parallel.gx=2"]),
        (20, 4, ["parallel.gz=2", "parallel.replicated_layers=1", "optim.shard_states=true"]),
    ):
        # Without a validation, nothing comes between the last update and the checkpoint.
        run = tiny(*overrides, f"train.steps={steps}", "optim.schedule_steps=20", "train.validation_batches=0")
        ranks.run(world, train_in_rank, run)
    losses, norms = losses_and_norms(serial_run(tiny))
    resumed = losses_and_norms(metric_lines(run.run.dir))
    assert resumed[0] == pytest.approx(losses, rel=1e-5)
    assert resumed[1] == pytest.approx(norms, rel=1e-5)


def test_the_run_directory_records_steps_and_events(ranks, tiny):
    config = tiny(
        "parallel.gx=2", "parallel.gy=2", "train.steps=4", "train.validate_every=2", "checkpoint.every=2",
        "checkpoint.keep=1", "logging.sample_tokens=5",
    )  # fmt: skip
    ranks.run(4, train_in_rank, config)
    run_dir = Path(config.run.dir)
    files = {
        "config.yaml",
        "configs",
        "starts.jsonl",
        "metrics.jsonl",
        "checkpoints",
        "loss.png",
        "lock",
        "verified.json",
    }
    assert {p.name for p in run_dir.iterdir()} == files
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["step_00000004"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert set(steps[-1]) == {
        "step", "loss", "grad_norm", "lr", "skipped", "tokens", "epoch", "step_time_s", "busy_s", "data_wait_s",
            "tokens_per_s",         "tflops_per_device", "mfu",
        "memory_gib", "memory", "comm", "time", "elapsed_s",
    }  # fmt: skip
    assert steps[-1]["tokens"] == 4 * 16 * 16
    trained_on = len(prepared(config.data).first.tokens("train"))
    assert steps[-1]["epoch"] == 4 * 16 / ((trained_on - 1) // 16)
    assert set(steps[-1]["comm"]) == {"x", "y", "world"}
    assert set(steps[-1]["memory"]) == {"after_step", "weights", "gradients", "optimizer"}
    events = [(line["event"], line["step"]) for line in lines if line.get("event") not in (None, *OF_THE_MACHINE)]
    # A save is reported when it has ended, which may be after the next validation.
    assert events[0] == ("start", 0)
    assert sorted(events[1:-2]) == [("checkpoint", 2), ("checkpoint", 4), ("validation", 2), ("validation", 4)]
    assert events[-2:] == [("sample", 4), ("done", 4)]


def linear_bytes(m, k, n, sizes, itemsize=4):
    """Bytes that one rank sends for a normal layer in a step (Eq. 1-3, Algorithm 1), m rows per (data, z) shard."""
    weight = k * n // (sizes.x * sizes.y)
    return {
        "y": 2 * (sizes.y - 1) / sizes.y * m * n // sizes.x * itemsize,
        "x": 2 * (sizes.x - 1) / sizes.x * m * k // sizes.y * itemsize,
        "z": (2 + 1) * (sizes.z - 1) / sizes.z * weight * itemsize,  # gathered twice, scattered once
    }


def multiply_once(sizes, m, k, n):
    from gpt4d.parallel.engine.interleave import run_alone
    from gpt4d.parallel.grid import Grid
    from gpt4d.parallel.layers.linear import LinearSpec
    from gpt4d.parallel.layers.module import Layer
    from gpt4d.parallel.sharded_weights import ShardedWeights

    weights = ShardedWeights(Context(Grid(sizes), torch.float32))
    layer = Layer(LinearSpec(k, n), weights)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    inputs = torch.zeros(m, k // sizes.y, requires_grad=True)
    run_alone(layer(inputs)).sum().backward()
    weights.finish()  # a rank must not end before its peers have its reduce-scatter
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


def test_non_finite_losses_end_the_run_and_reach_no_checkpoint(ranks, tiny):
    config = tiny("optim.lr=1e6", "checkpoint.every=1", "optim.warmup_steps=0")
    with pytest.raises(RankFailure, match="Non-finite steps are not checkpointed"):
        ranks.run(2, train_in_rank, config)
    names = [path.name for path in (Path(config.run.dir) / "checkpoints").iterdir()]
    assert names in ([], ["step_00000001"])


def deterministic_settings(config) -> tuple[bool, bool]:
    from gpt4d.trainer import Trainer
    from gpt4d.validation import validate

    Trainer(validate(config, 1), torch.device("cpu"))
    return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


def test_a_deterministic_run_does_not_fill_every_temporary_tensor(ranks, tiny):
    assert ranks.run(1, deterministic_settings, tiny("train.deterministic=true")) == [(True, False)]
