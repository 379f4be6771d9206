"""The planned cost of a step equals the cost of its operations on a device of the same rates.

The planned collectives equal the collectives of the step, in the same order.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.laboratory.virtual_device import VirtualDevice
from gpt4d.config import (
    ClusterConfig,
    Config,
    GridSizes,
    LoraConfig,
    OptimConfig,
    OverlapConfig,
    ParallelConfig,
    TrainConfig,
)
from gpt4d.model import registry
from gpt4d.model.gemma3.config import Gemma3Config
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.olmo2.config import Olmo2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import float8, linear_kernels
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.planner.device import Links
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.step import StepWalk
from gpt4d.step import TrainStep, build_stage
from tests.model.recording import recorded_collectives
from tests.support.fake_time import FakeTime
from tests.support.grids import grid_name, token_loss

FLOPS, LAUNCH_US = 2e10, 20.0
MODEL = GPT2Config(layers=2, hidden=512, heads=8, vocab_size=512, max_positions=256)
BATCH = 16
GRIDS = [GridSizes(*sizes) for sizes in ((1, 1, 1, 1), (4, 1, 2, 1), (2, 2, 2, 1), (1, 4, 2, 1), (1, 1, 1, 8))]


GROUPED = LlamaConfig(
    layers=2,
    hidden=512,
    heads=8,
    key_value_heads=2,
    head_size=64,
    inner=1024,
    vocab_size=512,
    max_positions=256,
)
NORMED = replace(GROUPED, key_value_heads=4, tied=False, qk_norm=True)
GEMMA3 = Gemma3Config(
    layers=2, hidden=512, heads=8, key_value_heads=2, head_size=64, inner=1024, vocab_size=512, max_positions=256,
    window=64, global_every=2,
)  # fmt: skip


def planned_and_busy_s(config: Config, sizes: GridSizes) -> tuple[float, float]:
    stage = build_stage(config, Grid(sizes), torch.device("cpu"), initialized=False)
    step = TrainStep(stage, whole_model(token_loss), OptimConfig())
    samples = BATCH // sizes.batch_shards
    ids = torch.zeros(samples, config.train.seq_len, dtype=torch.int64)
    with VirtualDevice(FLOPS, config.cluster.memory_gb_s, LAUNCH_US, source=FakeTime()) as device:
        step([(ids, ids, torch.arange(samples))], 1, ids.numel(), 1e-3)
    walk = StepWalk(config, registry.describe_run(config), sizes, Links(config.cluster, sizes), samples)
    return walk.run(1).compute_s, device.stream.busy_s


def compare(sizes, memory_gb_s, precision, activation_checkpointing, model=MODEL, loss_chunks=1, **parallel):
    rates = {"matmul_tflops": FLOPS / 1e12, "memory_gb_s": memory_gb_s, "operation_us": LAUNCH_US}
    cluster = ClusterConfig(device="cpu", **rates)  # a virtual device executes the kernels of a CPU
    train = TrainConfig(
        compile=False,
        seq_len=model.max_positions,
        batch_size=BATCH,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        loss_chunks=loss_chunks,
    )
    config = Config(model=model, cluster=cluster, train=train, parallel=ParallelConfig(**parallel))
    planned_s, busy_s = planned_and_busy_s(config, sizes)
    assert planned_s == pytest.approx(busy_s, rel=0.02)


@pytest.mark.parametrize("memory_gb_s", [1000, 0.3], ids="memory={}".format)
@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("sizes", GRIDS, ids=grid_name)
def test_planned_computation_takes_as_long_as_a_steps_operations(
    rank_0, sizes, precision, activation_checkpointing, memory_gb_s
):
    rank_0(sizes.devices)
    compare(sizes, memory_gb_s, precision, activation_checkpointing)


@pytest.mark.parametrize("memory_gb_s", [1000, 0.3], ids="memory={}".format)
@pytest.mark.parametrize(
    ("sizes", "precision", "activation_checkpointing", "options"),
    [
        (GridSizes(2, 2, 2, 1), "fp32", "none", {"chunks": 2}),
        (GridSizes(2, 4, 1, 1), "bf16", "full", {"chunks": 4, "scatter_heads": False}),
        (GridSizes(4, 2, 1, 1), "fp32", "full", {"sequence_parallel": True}),
        (GridSizes(2, 2, 2, 1), "bf16", "selective", {}),
        (GridSizes(4, 1, 1, 2), "fp32", "selective", {"sequence_parallel": True, "loss_chunks": 2}),
        (GridSizes(2, 2, 2, 1), "bf16", "full", {"loss_chunks": 4}),
        (GridSizes(2, 2, 1, 2), "bf16", "none", {"sequence_parallel": True, "chunks": 4}),
    ],
    ids=str,
)
def test_planned_computation_of_chunks_and_split_tokens_takes_as_long(
    rank_0, sizes, precision, activation_checkpointing, options, memory_gb_s
):
    rank_0(sizes.devices)
    compare(sizes, memory_gb_s, precision, activation_checkpointing, **options)


@pytest.mark.parametrize("memory_gb_s", [1000, 0.3], ids="memory={}".format)
@pytest.mark.parametrize(
    "model",
    [GROUPED, replace(GROUPED, qkv_bias=True), NORMED, GEMMA3],
    ids=["llama", "qwen2", "qwen3", "gemma3"],
)
@pytest.mark.parametrize(
    ("sizes", "precision", "activation_checkpointing", "options"),
    [
        (GridSizes(), "fp32", "none", {}),
        (GridSizes(), "bf16", "full", {}),
        (GridSizes(2, 2, 2, 1), "bf16", "selective", {"chunks": 2}),
        (GridSizes(4, 2, 1, 1), "fp32", "full", {"sequence_parallel": True}),
        (GridSizes(1, 4, 2, 1), "bf16", "none", {"scatter_heads": False}),
    ],
    ids=str,
)
def test_planned_computation_of_grouped_queries_takes_as_long(
    rank_0, model, sizes, precision, activation_checkpointing, options, memory_gb_s
):
    rank_0(sizes.devices)
    compare(sizes, memory_gb_s, precision, activation_checkpointing, model, **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(2, 2, 2, 1)], ids=grid_name)
def test_planned_computation_of_adapters_takes_as_long(rank_0, sizes, precision):
    rank_0(sizes.devices)
    compare(sizes, 1000, precision, "full", replace(NORMED, lora=LoraConfig(16)))


def collectives_of_a_step(config: Config, sizes: GridSizes) -> tuple[list, list]:
    """Return (kind, axis, bytes) of each collective that a step starts, and of each that is planned."""
    stage = build_stage(config, Grid(sizes), torch.device("cpu"), initialized=False)
    step = TrainStep(stage, whole_model(token_loss), OptimConfig(), config.parallel.overlap.data)
    samples = config.train.batch_size // sizes.batch_shards
    ids = torch.zeros(samples, config.train.seq_len, dtype=torch.int64)
    size = config.train.micro_batch_size or samples
    microbatches = [(part, part, torch.arange(len(part))) for part in ids.split(size)]

    with recorded_collectives() as (started, planned):
        step(microbatches, len(microbatches), ids.numel(), 1e-3)
        estimate = Estimate(config, sizes)
        estimate.walk(size, estimate.description.blocks).run(len(microbatches))
    return started, planned


SMALL = GPT2Config(layers=3, hidden=32, heads=8, vocab_size=64, vocab_multiple=8, max_positions=16)
SMALL_GROUPED = replace(
    GROUPED, layers=3, hidden=32, head_size=8, inner=48, vocab_size=64, vocab_multiple=8, max_positions=16
)
SMALL_NORMED = replace(SMALL_GROUPED, tied=False, qk_norm=True)
SMALL_GEMMA3 = replace(
    GEMMA3, layers=3, hidden=32, head_size=8, inner=48, vocab_size=64, vocab_multiple=8, max_positions=16, window=4
)
SMALL_OLMO2 = Olmo2Config(
    layers=3, hidden=32, heads=4, key_value_heads=2, head_size=8, inner=48, vocab_size=64, vocab_multiple=8,
    max_positions=16,
)  # fmt: skip
FULL = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("sizes", "train", "dropout", "parallel"),
    [
        ((2, 2, 2, 1), {}, 0.0, {"chunks": 2}),
        ((4, 2, 1, 1), FULL, 0.0, {"sequence_parallel": True, "chunks": 4}),
        ((4, 1, 1, 2), FULL, 0.0, {"sequence_parallel": True}),
        ((2, 2, 1, 2), FULL, 0.1, {"sequence_parallel": True, "chunks": 2}),
        ((1, 4, 2, 1), FULL | {"micro_batch_size": 2}, 0.1, {"chunks": 2, "cache_layers": "all"}),
        ((2, 1, 4, 1), {"micro_batch_size": 2}, 0.0, {"cache_layers": "all", "cache_scope": "step", "chunks": 2}),
        ((2, 2, 2, 1), {}, 0.1, {"scatter_heads": False, "replicated_layers": 1, "chunks": 4}),
        ((1, 8, 1, 1), {}, 0.0, {"overlap": OverlapConfig(all_reduce=False), "chunks": 2}),
        ((2, 2, 2, 1), {"loss_chunks": 4}, 0.0, {"chunks": 2}),
        ((4, 2, 1, 1), {"loss_chunks": 2, "activation_checkpointing": "selective"}, 0.0, {"sequence_parallel": True}),
        ((2, 1, 2, 2), {}, 0.0, {"sequence_parallel": True, "overlap": OverlapConfig(data=False, all_gather=False)}),
    ],
    ids=str,
)
def test_planned_collectives_are_those_of_a_step_in_the_same_order(rank_0, sizes, train, dropout, parallel):
    sizes = GridSizes(*sizes)
    rank_0(sizes.devices)
    train = TrainConfig(**{"seq_len": 16, "batch_size": BATCH, "precision": "fp32", **train})
    config = Config(model=replace(SMALL, dropout=dropout), train=train, parallel=ParallelConfig(**parallel))
    started, planned = collectives_of_a_step(config, sizes)
    assert started == planned


def product_on_a_cpu(a, b, dtype, added_to=None):
    return a.to(dtype) @ b.to(dtype) if added_to is None else added_to


@pytest.mark.parametrize(
    ("model", "sizes", "train", "parallel"),
    [
        (SMALL, (2, 2, 2, 1), {}, {"chunks": 2}),
        (SMALL_GROUPED, (4, 2, 1, 1), FULL, {"sequence_parallel": True, "chunks": 2}),
        (SMALL_NORMED, (1, 4, 2, 1), {"micro_batch_size": 2}, {"cache_layers": "all", "cache_scope": "step"}),
        (SMALL_GROUPED, (2, 1, 2, 2), {"loss_chunks": 4, "precision": "bf16"}, {"replicated_layers": 1}),
    ],
    ids=str,
)
def test_planned_collectives_of_adapters_are_those_of_a_step(rank_0, monkeypatch, model, sizes, train, parallel):
    sizes = GridSizes(*sizes)
    rank_0(sizes.devices)
    monkeypatch.setattr(linear_kernels, "product", product_on_a_cpu)
    train = TrainConfig(**{"seq_len": 16, "batch_size": BATCH, "precision": "fp32", **train})
    config = Config(model=replace(model, lora=LoraConfig(2)), train=train, parallel=ParallelConfig(**parallel))
    started, planned = collectives_of_a_step(config, sizes)
    assert started == planned
    scattered = [event for event in started if event[0] == "reduce_scatter" and event[1] == "z"]
    assert not scattered, "a frozen weight has a gradient"


@pytest.mark.parametrize("parallel", [{"chunks": 2}, {"cache_layers": "all"}], ids=str)
def test_planned_collectives_of_float8_weights_are_those_of_a_step(rank_0, monkeypatch, parallel):
    sizes = GridSizes(2, 1, 4, 1)
    rank_0(sizes.devices)
    monkeypatch.setattr(linear_kernels, "product", product_on_a_cpu)
    train = TrainConfig(seq_len=16, batch_size=BATCH, micro_batch_size=2, precision="fp8")
    started, planned = collectives_of_a_step(
        Config(model=SMALL, train=train, parallel=ParallelConfig(**parallel)), sizes
    )
    assert started == planned
    shard = 32 * 128 // (2 * 4) + float8.SCALE_BYTES  # bytes: a layer of the MLP has one per value
    assert ("all_gather", "z", 3 * shard) in started


@pytest.mark.parametrize(
    ("model", "sizes", "train", "parallel"),
    [
        (SMALL_NORMED, (2, 2, 2, 1), {}, {"chunks": 2}),
        (SMALL_GROUPED, (4, 2, 1, 1), FULL, {"sequence_parallel": True, "chunks": 4}),
        (SMALL_NORMED, (8, 1, 1, 1), FULL, {}),
        (SMALL_GROUPED, (1, 4, 2, 1), {"micro_batch_size": 2}, {"chunks": 2, "cache_layers": "all"}),
        (SMALL_NORMED, (1, 4, 1, 2), FULL, {"scatter_heads": False, "replicated_layers": 1}),
        (SMALL_GEMMA3, (2, 2, 2, 1), {"activation_checkpointing": "selective"}, {"chunks": 2}),
        (SMALL_GEMMA3, (4, 2, 1, 1), FULL, {"sequence_parallel": True, "chunks": 4}),
    ],
    ids=str,
)
def test_planned_collectives_of_grouped_queries_are_those_of_a_step(rank_0, model, sizes, train, parallel):
    sizes = GridSizes(*sizes)
    rank_0(sizes.devices)
    train = TrainConfig(**{"seq_len": 16, "batch_size": BATCH, "precision": "fp32", **train})
    config = Config(model=model, train=train, parallel=ParallelConfig(**parallel))
    started, planned = collectives_of_a_step(config, sizes)
    assert started == planned


@pytest.mark.parametrize(
    ("model", "elements"),
    [(SMALL_NORMED, 3 * 2 * 8), (SMALL_OLMO2, 3 * (32 + 16))],
    ids=["qwen3", "olmo2"],
)
def test_a_step_reduces_the_gradients_of_all_norms_of_heads_at_once(rank_0, model, elements):
    """The backward of a norm of heads starts no collective."""
    sizes = GridSizes(2, 2, 1, 1)
    rank_0(sizes.devices)
    train = TrainConfig(seq_len=16, batch_size=4, micro_batch_size=2, precision="fp32")
    started, planned = collectives_of_a_step(Config(model=model, train=train), sizes)
    assert started == planned
    bytes_of_statistics = 4 * 2 * 16  # a number for each token of a microbatch
    assert not [call for call in started if call[1] in ("x", "y") and call[2] < bytes_of_statistics]
    reduced = [call for call in started if call[2] == 4 * elements]
    assert reduced == [("all_reduce", axis, 4 * elements) for axis in "yx"]
