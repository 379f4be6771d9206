"""The planned cost of a mixture of experts equals the cost of its operations. Its collectives, and its size."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from gpt4d.config import Config, GridSizes, ParallelConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.moe.config import MoeConfig
from gpt4d.parallel.layers import routing
from tests.model.test_costs import BATCH, FULL, collectives_of_a_step, compare
from tests.support.settings import configured

LARGER = MoeConfig(
    layers=2, hidden=512, heads=8, key_value_heads=4, head_size=64, inner=256, experts=8, experts_per_token=2,
    vocab_size=512, max_positions=256, qk_norm="heads", router_z_loss=0.01,
)  # fmt: skip
SMALL = replace(
    LARGER, layers=3, hidden=32, heads=4, key_value_heads=2, head_size=8, inner=48, experts_per_token=1,
    vocab_size=64, vocab_multiple=8, max_positions=16, qk_norm="all",
)  # fmt: skip


@pytest.fixture
def route(monkeypatch):
    """Return a function that makes routers choose each of the first ``experts`` experts equally often."""
    choose = routing.chosen_experts
    if choose._run is None:
        choose._load()
    original = choose._run

    def among(experts: int) -> None:
        @functools.cache
        def chosen(tokens: int, each: int) -> torch.Tensor:
            return torch.tensor([[(token * each + n) % experts for n in range(each)] for token in range(tokens)])

        def replaced(logits, *arguments):
            return chosen(*original(logits, *arguments).shape)

        monkeypatch.setattr(choose, "_run", replaced)

    return among


COSTS = [
    (GridSizes(2, 2, 2), "bf16", "selective", {"chunks": 2}, {}),
    (GridSizes(1, 1, 4), "fp32", "none", {}, {"qk_norm": "all", "router": "sigmoid", "balance": "bias"}),
    (GridSizes(4, 1, 2), "fp32", "full", {"sequence_parallel": True}, {"shared_inner": 512}),
    (GridSizes(), "bf16", "full", {}, {"qk_norm": "none"}),
    (GridSizes(1, 4, 2), "bf16", "none", {"scatter_heads": False}, {"normalized_weights": False}),
]


@pytest.mark.parametrize("memory_gb_s", [1000, 0.3], ids="memory={}".format)
@pytest.mark.parametrize(
    ("sizes", "precision", "checkpointing", "options", "model"),
    [*COSTS[:3], *(pytest.param(*case, marks=pytest.mark.full) for case in COSTS[3:])],
    ids=str,
)
def test_planned_computation_takes_as_long_as_a_steps_operations(
    rank_0, route, sizes, precision, checkpointing, options, model, memory_gb_s
):
    rank_0(sizes.devices)
    route(LARGER.experts)
    compare(sizes, memory_gb_s, precision, checkpointing, replace(LARGER, **model), **options)


@pytest.mark.parametrize("imbalance", [2, 4])
def test_the_busiest_device_computes_the_rows_of_its_imbalance(rank_0, route, imbalance):
    """All tokens use the experts of the first rank, or of the first two ranks of z."""
    sizes = GridSizes(1, 1, 4)
    rank_0(sizes.devices)
    route(LARGER.experts // imbalance)
    compare(sizes, 1000, "fp32", "none", replace(LARGER, imbalance=imbalance))


STEPS = [
    ((2, 2, 2, 1), {"activation_checkpointing": "selective"}, {"chunks": 2}),
    ((4, 1, 2, 1), FULL, {"sequence_parallel": True, "chunks": 4}),
    ((1, 1, 4, 2), {"micro_batch_size": 1}, {"cache_layers": "all"}),
    ((2, 1, 2, 2), FULL | {"micro_batch_size": 2}, {"cache_layers": "all", "cache_scope": "step"}),
    ((1, 4, 2, 1), {}, {"replicated_layers": 1}),
]


@pytest.mark.parametrize(
    ("sizes", "train", "parallel"),
    [*STEPS[:3], *(pytest.param(*case, marks=pytest.mark.full) for case in STEPS[3:])],
    ids=str,
)
def test_planned_collectives_are_those_of_a_step_in_the_same_order(rank_0, route, sizes, train, parallel):
    sizes = GridSizes(*sizes)
    rank_0(sizes.devices)
    route(SMALL.experts)
    train = TrainConfig(**{"seq_len": 16, "batch_size": BATCH, "precision": "fp32", **train})
    config = Config(model=SMALL, train=train, parallel=ParallelConfig(**parallel))
    started, planned = collectives_of_a_step(config, sizes)
    assert started == planned
    assert ("all_to_all", "z") in {call[:2] for call in started}


# ------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("olmoe_7b", 6.92, 1.28), ("qwen3_moe_30b", 30.53, 3.35), ("mixtral_8x7b", 46.70, 12.88)],
)
def test_shipped_sizes_have_the_published_numbers_of_parameters(name, total, active):
    description = registry.describe(configured([f"model={name}"]).model)
    found = description.num_parameters, description.active_parameters
    assert tuple(round(count / 1e9, 2) for count in found) == (total, active)


@pytest.mark.parametrize("changes", [{}, {"experts": 64}, {"shared_inner": 96}, {"experts_per_token": 4}], ids=str)
def test_flops_count_the_parameters_that_a_token_uses(changes):
    """Six per token and parameter of a product, and twelve per layer, position and feature of the queries."""
    model, samples, length = replace(SMALL, **changes), 3, 16
    description = registry.describe(model)
    products = [spec for name, spec in description.parameters.items() if name.endswith("weight") and spec.std]
    products += [spec for name, spec in description.parameters.items() if ".experts." in name]
    weights = sum(math.prod(spec.shape) for spec in products) - math.prod(description.parameters["tokens.weight"].shape)
    attention = 12 * model.layers * length * model.heads * model.head_size
    used = weights - description.unused_parameters
    assert description.training_flops(samples, length) == samples * length * (6 * used + attention)
