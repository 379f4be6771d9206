"""The planned cost of a step equals the cost of its operations on a device of the same rates.

The planned collectives equal the collectives of the step, in the same order.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from gpt4d.config import (
    ClusterConfig,
    Config,
    GridSizes,
    LoraConfig,
    OverlapConfig,
    ParallelConfig,
    TrainConfig,
)
from gpt4d.model.gemma3 import Gemma3Config
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.llama import LlamaConfig
from gpt4d.model.moe import MoeConfig
from gpt4d.model.olmo2 import Olmo2Config
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel.layers import float8, linear, routing
from tests.model.recording import collectives_of_a_step, computation_s
from tests.support.grids import full
from tests.support.model_oracles import MODELS

FLOPS, LAUNCH_US = 2e10, 20.0
BATCH = 16
_LARGE = {"layers": 2, "hidden": 512, "heads": 8, "vocab_size": 512, "max_positions": 256}
_LLAMA = LlamaConfig(**_LARGE, key_value_heads=2, head_size=64, inner=1024)
LARGE = {
    "gpt2": GPT2Config(**_LARGE),
    "llama": _LLAMA,
    "qwen2": replace(_LLAMA, qkv_bias=True),
    "qwen3": replace(_LLAMA, key_value_heads=4, tied=False, qk_norm=True),
    "gemma3": Gemma3Config(**_LARGE, key_value_heads=2, head_size=64, inner=1024, window=64, global_every=2),
    "olmo2": Olmo2Config(**_LARGE, key_value_heads=4, head_size=64, inner=1024),
    "moe": MoeConfig(
        **_LARGE, key_value_heads=4, head_size=64, inner=256, experts=8, experts_per_token=2, qk_norm="heads",
        router_z_loss=0.01,
    ),
}  # fmt: skip


# y and x split streams, heads and groups of channels alternately; every grid cuts a group.
UNET = UNetConfig(
    image_size=8, channels=48, multipliers=[1, 2], blocks_per_level=1, attention_at=[8, 4], head_size=6, groups=3
)


@pytest.fixture
def route(monkeypatch):
    """Return a function that makes routers choose each of the first ``experts`` experts equally often."""
    choose = routing.chosen_experts

    def among(experts: int) -> None:
        @functools.cache
        def chosen(tokens: int, each: int) -> torch.Tensor:
            return torch.tensor([[(token * each + n) % experts for n in range(each)] for token in range(tokens)])

        def replaced(logits, *arguments):
            found = choose(logits, *arguments)
            return chosen(*found.shape) if isinstance(found, torch.Tensor) else found

        monkeypatch.setattr(routing, "chosen_experts", replaced)

    return among


def check_computation(model, sizes, precision, checkpointing, memory_gb_s, loss_chunks=1, **parallel):
    """Compare the planned computation of a step with the time of its operations on a virtual device."""
    rates = {"matmul_tflops": FLOPS / 1e12, "memory_gb_s": memory_gb_s, "operation_us": LAUNCH_US}
    cluster = ClusterConfig(device="cpu", **rates)  # a virtual device executes the kernels of a CPU
    train = TrainConfig(
        compile=False, seq_len=model.max_positions, batch_size=BATCH, precision=precision,
        activation_checkpointing=checkpointing, loss_chunks=loss_chunks,
    )  # fmt: skip
    config = Config(model=model, cluster=cluster, train=train, parallel=ParallelConfig(**parallel))
    planned_s, busy_s = computation_s(config, sizes)
    assert planned_s == pytest.approx(busy_s, rel=0.02)


GRIDS = [GridSizes(*sizes) for sizes in ((1, 1, 1, 1), (4, 1, 2, 1), (2, 2, 2, 1), (1, 4, 2, 1), (1, 1, 1, 8))]
MEMORY_GB_S = 1000, 0.3
OPTIONS = [
    (GridSizes(2, 2, 2, 1), "fp32", "none", {"chunks": 2}),
    (GridSizes(2, 4, 1, 1), "bf16", "full", {"chunks": 4, "scatter_heads": False}),
    (GridSizes(4, 2, 1, 1), "fp32", "full", {"sequence_parallel": True}),
    (GridSizes(2, 2, 2, 1), "bf16", "selective", {}),
    (GridSizes(4, 1, 1, 2), "fp32", "selective", {"sequence_parallel": True, "loss_chunks": 2}),
    (GridSizes(2, 2, 2, 1), "bf16", "full", {"loss_chunks": 4}),
    (GridSizes(2, 2, 1, 2), "bf16", "none", {"sequence_parallel": True, "chunks": 4}),
]
FAMILIES = "llama", "qwen2", "qwen3", "gemma3", "olmo2"
OF_FAMILIES = [
    (GridSizes(), "fp32", "none", {}),
    (GridSizes(), "bf16", "full", {}),
    (GridSizes(2, 2, 2, 1), "bf16", "selective", {"chunks": 2}),
    (GridSizes(4, 2, 1, 1), "fp32", "full", {"sequence_parallel": True}),
    (GridSizes(1, 4, 2, 1), "bf16", "none", {"scatter_heads": False}),
]


def computations():
    """Yield (is in the sample, model, grid, precision, recomputation, GB/s of memory, options).

    In the sample of GPT-2, each pair of two settings occurs. Further options and families occur with few of them.
    """
    kinds = enumerate(("fp32", "bf16", "fp8")), enumerate(("none", "full")), enumerate(MEMORY_GB_S)
    for (g, sizes), (p, precision), (c, checkpointing), (m, memory) in itertools.product(enumerate(GRIDS), *kinds):
        yield (c, m) == ((g + p) % 2, (g + p) // 2 % 2), "gpt2", sizes, precision, checkpointing, memory, {}
    for (i, (*case, options)), (m, memory) in itertools.product(enumerate(OPTIONS), enumerate(MEMORY_GB_S)):
        yield m == i % 2, "gpt2", *case, memory, options
    settings = enumerate(FAMILIES), enumerate(OF_FAMILIES), enumerate(MEMORY_GB_S)
    for (j, model), (i, (*case, options)), (m, memory) in itertools.product(*settings):
        yield m == (i + j) % 2 and (i - j) % 5 < 2, model, *case, memory, options


@pytest.mark.parametrize(
    ("model", "sizes", "precision", "checkpointing", "memory_gb_s", "options"),
    [(pytest.param if chosen else full)(*case, id="-".join(map(str, case))) for chosen, *case in computations()],
)
def test_planned_computation_takes_as_long_as_a_steps_operations(
    rank_0, model, sizes, precision, checkpointing, memory_gb_s, options
):
    rank_0(sizes.devices)
    check_computation(LARGE[model], sizes, precision, checkpointing, memory_gb_s, **options)


@pytest.mark.parametrize(
    ("sizes", "precision", "memory_gb_s", "checkpointing", "options", "changes"),
    [
        (GridSizes(2, 2, 2), "bf16", 1000, "selective", {"chunks": 2}, {}),
        (GridSizes(1, 1, 4), "fp32", 0.3, "none", {}, {"qk_norm": "all", "router": "sigmoid", "balance": "bias"}),
        (GridSizes(4, 1, 2), "fp32", 1000, "full", {"sequence_parallel": True}, {"shared_inner": 512}),
        full(GridSizes(2, 2, 2), "bf16", 0.3, "selective", {"chunks": 2}, {}),
        full(GridSizes(4, 1, 2), "fp32", 0.3, "full", {"sequence_parallel": True}, {"shared_inner": 512}),
        full(GridSizes(), "bf16", 0.3, "full", {}, {"qk_norm": "none"}),
        full(GridSizes(1, 4, 2), "bf16", 1000, "none", {"scatter_heads": False}, {"normalized_weights": False}),
        # All tokens use the experts of the first two ranks of z, or of the first rank.
        (GridSizes(1, 1, 4), "fp32", 1000, "none", {}, {"imbalance": 2}),
        (GridSizes(1, 1, 4), "fp32", 1000, "none", {}, {"imbalance": 4}),
    ],
    ids=str,
)
def test_planned_computation_of_experts_takes_as_long_as_that_of_the_busiest_device(
    rank_0, route, sizes, precision, memory_gb_s, checkpointing, options, changes
):
    rank_0(sizes.devices)
    model = replace(LARGE["moe"], **changes)
    route(model.experts // changes.get("imbalance", 1))
    check_computation(model, sizes, precision, checkpointing, memory_gb_s, **options)


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [
        (GridSizes(), "bf16"),
        (GridSizes(2, 2, 2, 1), "fp32"),
        full(GridSizes(), "fp32"),
        full(GridSizes(2, 2, 2, 1), "bf16"),
    ],
    ids=str,
)
def test_planned_computation_of_adapters_takes_as_long(rank_0, sizes, precision):
    rank_0(sizes.devices)
    check_computation(replace(LARGE["qwen3"], lora=LoraConfig(16)), sizes, precision, "full", 1000)


@pytest.mark.parametrize(("memory_gb_s", "within"), [(1000, 0.03), (0.3, 0.1)])
@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(2, 2, 2, 1), GridSizes(1, 4, 1, 1)], ids=str)
def test_planned_computation_of_pictures_takes_as_long_as_a_steps_operations(rank_0, sizes, memory_gb_s, within):
    """The virtual device counts an operand that the kernel of an input's gradient does not read.

    It does not count operations on small tensors, such as the statistics of a norm.
    """
    rank_0(sizes.devices)
    cluster = ClusterConfig(device="cuda", matmul_tflops=FLOPS / 1e12, memory_gb_s=memory_gb_s, operation_us=0.1)
    train = TrainConfig(batch_size=48, precision="fp32", seq_len=1, compile=False)
    planned_s, busy_s = computation_s(Config(model=UNET, cluster=cluster, train=train), sizes)
    assert planned_s == pytest.approx(busy_s, rel=within)


# --------------------------------------------------------------------------------------------------- collectives


def collectives_of(model, sizes: GridSizes, train=None, **parallel) -> tuple[list, list]:
    length = {"seq_len": 1 if model is UNET else 16}
    train = TrainConfig(**{"batch_size": BATCH, "precision": "fp32", **length, **(train or {})})
    return collectives_of_a_step(Config(model=model, train=train, parallel=ParallelConfig(**parallel)), sizes)


_SMALL = {"layers": 3, "hidden": 32, "vocab_size": 64, "vocab_multiple": 8, "max_positions": 16}
_GROUPED = {**_SMALL, "head_size": 8, "inner": 48}
SMALL = {
    "gpt2": replace(LARGE["gpt2"], **_SMALL),
    "dropout": replace(LARGE["gpt2"], **_SMALL, dropout=0.1),
    **{name: replace(LARGE[name], **_GROUPED) for name in ("llama", "qwen3")},
    "gemma3": replace(LARGE["gemma3"], **_GROUPED, window=4),
    "olmo2": replace(LARGE["olmo2"], **_GROUPED, heads=4, key_value_heads=2),
    "olmo2, narrow": replace(MODELS["olmo2"], layers=3),
    "unet": UNET,
    "moe": replace(LARGE["moe"], **_GROUPED, heads=4, key_value_heads=2, experts_per_token=1, qk_norm="all"),
}
FULL, SELECTIVE = {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}
TOKENS, PER_STEP = {"sequence_parallel": True}, {"cache_layers": "all", "cache_scope": "step"}


@pytest.mark.parametrize(
    ("model", "sizes", "train", "parallel"),
    [
        ("gpt2", (2, 2, 2, 1), {}, {"chunks": 2}),
        ("gpt2", (4, 2, 1, 1), FULL, TOKENS | {"chunks": 4}),
        ("gpt2", (4, 1, 1, 2), FULL, TOKENS),
        ("dropout", (2, 2, 1, 2), FULL, TOKENS | {"chunks": 2}),
        ("dropout", (1, 4, 2, 1), FULL | {"micro_batch_size": 2}, {"chunks": 2, "cache_layers": "all"}),
        ("gpt2", (2, 1, 4, 1), {"micro_batch_size": 2}, PER_STEP | {"chunks": 2}),
        ("dropout", (2, 2, 2, 1), {}, {"scatter_heads": False, "replicated_layers": 1, "chunks": 4}),
        ("gpt2", (1, 8, 1, 1), {}, {"overlap": OverlapConfig(all_reduce=False), "chunks": 2}),
        ("gpt2", (2, 2, 2, 1), {"loss_chunks": 4}, {"chunks": 2}),
        ("gpt2", (4, 2, 1, 1), SELECTIVE | {"loss_chunks": 2}, TOKENS),
        ("gpt2", (2, 1, 2, 2), {}, TOKENS | {"overlap": OverlapConfig(data=False, all_gather=False)}),
        ("qwen3", (2, 2, 2, 1), {}, {"chunks": 2}),
        ("llama", (4, 2, 1, 1), FULL, TOKENS | {"chunks": 4}),
        ("qwen3", (8, 1, 1, 1), FULL, {}),
        ("llama", (1, 4, 2, 1), {"micro_batch_size": 2}, {"chunks": 2, "cache_layers": "all"}),
        ("qwen3", (1, 4, 1, 2), FULL, {"scatter_heads": False, "replicated_layers": 1}),
        ("gemma3", (2, 2, 2, 1), SELECTIVE, {"chunks": 2}),
        ("gemma3", (4, 2, 1, 1), FULL, TOKENS | {"chunks": 4}),
        ("olmo2, narrow", (2, 2, 2, 1), SELECTIVE, {"chunks": 2}),
        ("olmo2, narrow", (4, 2, 1, 1), FULL, TOKENS | {"chunks": 4}),
        ("olmo2, narrow", (3, 2, 1, 2), FULL, {"replicated_layers": 1}),
        full("olmo2, narrow", (1, 4, 2, 1), FULL | {"micro_batch_size": 2}, {"chunks": 2, "cache_layers": "all"}),
        full("olmo2, narrow", (1, 4, 1, 2), {}, {"scatter_heads": False}),
        ("unet", (1, 1, 1, 1), {}, {}),
        ("unet", (2, 2, 1, 1), {}, {}),
        ("unet", (2, 1, 2, 1), {}, {"chunks": 2}),
        ("unet", (1, 2, 2, 2), {}, {"cache_layers": "all"}),
        ("unet", (2, 4, 1, 1), {}, {"scatter_heads": False, "chunks": 4}),
        ("unet", (4, 2, 2, 1), {}, {"chunks": 2}),
        ("moe", (2, 2, 2, 1), SELECTIVE, {"chunks": 2}),
        ("moe", (4, 1, 2, 1), FULL, TOKENS | {"chunks": 4}),
        ("moe", (1, 1, 4, 2), {"micro_batch_size": 1}, {"cache_layers": "all"}),
        full("moe", (2, 1, 2, 2), FULL | {"micro_batch_size": 2}, PER_STEP),
        full("moe", (1, 4, 2, 1), {}, {"replicated_layers": 1}),
    ],
    ids=str,
)
def test_planned_collectives_are_those_of_a_step_in_the_same_order(rank_0, route, model, sizes, train, parallel):
    sizes = GridSizes(*sizes)
    rank_0(sizes.devices)
    if model == "moe":
        route(SMALL[model].experts)
    started, planned = collectives_of(SMALL[model], sizes, train, **parallel)
    assert started == planned and (len(started) > 20 or sizes.devices == 1)
    assert (("all_to_all", "z") in {call[:2] for call in started}) == (model == "moe")


@pytest.fixture
def cpu_products(monkeypatch, rank_0):
    """Replace the products of a GPU, which a CPU does not have for all dtypes."""

    def product(a, b, dtype, added_to=None):
        return a.to(dtype) @ b.to(dtype) if added_to is None else added_to

    monkeypatch.setattr(linear, "product", product)


@pytest.mark.parametrize(
    ("model", "sizes", "train", "parallel"),
    [
        ("gpt2", (2, 2, 2, 1), {}, {"chunks": 2}),
        ("llama", (4, 2, 1, 1), FULL, TOKENS | {"chunks": 2}),
        ("qwen3", (1, 4, 2, 1), {"micro_batch_size": 2}, PER_STEP),
        ("llama", (2, 1, 2, 2), {"loss_chunks": 4, "precision": "bf16"}, {"replicated_layers": 1}),
    ],
    ids=str,
)
def test_planned_collectives_of_adapters_are_those_of_a_step(rank_0, cpu_products, model, sizes, train, parallel):
    sizes = GridSizes(*sizes)
    rank_0(sizes.devices)
    model = replace(SMALL[model], lora=LoraConfig(2))
    started, planned = collectives_of(model, sizes, train, **parallel)
    assert started == planned
    assert ("reduce_scatter", "z") not in {call[:2] for call in started}, "a frozen weight has a gradient"


@pytest.mark.parametrize("parallel", [{"chunks": 2}, {"cache_layers": "all"}], ids=str)
def test_planned_collectives_of_float8_weights_are_those_of_a_step(rank_0, cpu_products, parallel):
    rank_0(8)
    train = {"micro_batch_size": 2, "precision": "fp8"}
    started, planned = collectives_of(SMALL["gpt2"], GridSizes(2, 1, 4), train, **parallel)
    assert started == planned
    shard = 32 * 128 // (2 * 4) + float8.SCALE_BYTES  # bytes: a layer of the MLP has one per value
    assert ("all_gather", "z", 3 * shard) in started


@pytest.mark.parametrize(("model", "elements"), [("qwen3", 3 * 2 * 8), ("olmo2", 3 * (32 + 16))])
def test_a_step_reduces_the_gradients_of_all_norms_of_heads_at_once(rank_0, model, elements):
    """The backward of a norm of heads starts no collective."""
    rank_0(4)
    train = {"batch_size": 4, "micro_batch_size": 2}
    started, planned = collectives_of(SMALL[model], GridSizes(2, 2), train)
    assert started == planned
    bytes_of_statistics = 4 * 2 * 16  # a number for each token of a microbatch
    assert not [call for call in started if call[1] in ("x", "y") and call[2] < bytes_of_statistics]
    reduced = [call for call in started if call[2] == 4 * elements]
    assert reduced == [("all_reduce", axis, 4 * elements) for axis in "yx"]
