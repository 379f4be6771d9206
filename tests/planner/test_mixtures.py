"""Planned bytes, memory and times of mixtures of experts. The planner replays the routing of a run."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import ClusterConfig, Config, ConfigError, GridSizes, LevelConfig, MeasuredConfig
from gpt4d.parallel.layers import experts, routing
from gpt4d.planner import recording
from gpt4d.planner.capacity import largest_micro_batch
from gpt4d.planner.device import Device, Links
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.search import rank
from gpt4d.planner.stages import PipelineEstimate
from gpt4d.planner.topology import ALL_TO_ALL, RankSpan, exchange_speed
from gpt4d.planner.workload import grids, training_state
from gpt4d.validation import validate
from tests.planner.test_memory import check_peak, peak_taken
from tests.planner.test_pipelines import bytes_of_a_step
from tests.planner.test_search import ask
from tests.support.grids import full
from tests.support.settings import configured

MODEL = (
    "model=moe_tiny", "model.hidden=32", "model.head_size=8", "model.inner=24", "model.vocab_size=320",
    "model.vocab_multiple=16", "model.max_positions=16", "optim.algorithm=adamw", "train.seq_len=16",
    "train.batch_size=8", "train.precision=fp32",
)  # fmt: skip
PIPELINE = "parallel.pipeline."
STAGES = [PIPELINE + "stages=2", PIPELINE + "microbatches=1"]


# ------------------------------------------------------------------------------------------------- recorded routings


def recorded_step(config: Config, world_size: int) -> tuple[dict[str, float], list]:
    """On a rank: the bytes of its axes in the second step, and the rows for and from each rank of z at each call."""
    rows, rows_of_ranks = [], experts._rows_of_ranks

    def record(order, received, ranks):
        found = rows_of_ranks(order, received, ranks)
        if isinstance(received, torch.Tensor):  # not in a plan that the run makes
            rows.append(found)
        return found

    with patch.object(experts, "_rows_of_ranks", record):
        counted = bytes_of_a_step(config, world_size)
    return counted, rows[len(rows) // 2 :]


@contextmanager
def replayed(rows: list, own: int) -> Iterator[None]:
    """Let experts on symbolic tensors exchange recorded ``rows`` of the rank at index ``own`` of the experts' axis."""
    calls = iter(rows)

    def replay(*_):
        return [counts[own:] + counts[:own] for counts in next(calls)]  # the planner's device is the first one

    recording.recorded_segments.cache_clear()
    with (
        patch.object(experts, "_rows_of_ranks", replay),
        patch.object(recording, "few_blocks", lambda reduced, model: [unit.name for unit in reduced.blocks]),
    ):
        yield
    recording.recorded_segments.cache_clear()
    assert next(calls, None) is None


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, ["parallel.gz=2", "train.activation_checkpointing=full"]),
        (4, ["parallel.gz=4", "parallel.chunks=2"]),
        (8, ["parallel.gx=2", "parallel.gy=2", "parallel.gz=2", "parallel.sequence_parallel=true"]),
        (4, [*STAGES, "parallel.gz=2", "model.shared_inner=48"]),
        (4, ["parallel.gz=2", "parallel.expert_data=true"]),
        full(4, ["parallel.gx=2", "parallel.expert_data=true", "train.activation_checkpointing=full"]),
        full(4, ["parallel.gz=2", "parallel.gdata=2", "parallel.context=2", "optim.shard_states=true"]),
        full(6, [*STAGES, PIPELINE + "stage_grids=[1x1x4x1,2x1x1x1]"]),
    ],
    ids=str,
)
def test_ranks_send_the_planned_bytes_of_their_routing(ranks, world_size, settings):
    config = configured([*MODEL, *settings])
    plan = validate(config, world_size)
    estimate = PipelineEstimate.of(plan)
    answers = ranks.run(world_size, recorded_step, config, world_size)
    for index, stage in enumerate(plan.stages):
        x, y, z, data = stage.sizes
        split = z * data if config.parallel.expert_data else z
        for place, member in enumerate(stage.ranks):
            counted, rows = answers[member]
            with replayed(rows, place // (x * y) % split):
                axes = PipelineEstimate.of(plan).of_stage(index).comm
            planned = {name: estimate.link_bytes[name] if "stage " in name else axes[name]["bytes"] for name in counted}
            assert counted == pytest.approx(planned, rel=1e-9)
    assert len({str(rows) for _, rows in answers}) > 1 or "z" not in counted, "equal routings of ranks show nothing"


# ------------------------------------------------------------------------------------------------- memory, imbalance

LARGER = (*MODEL, "model.hidden=64", "model.inner=96", "train.seq_len=64", "model.max_positions=64")


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        (GridSizes(), []),
        (GridSizes(1, 1, 4, 1), ["train.activation_checkpointing=full"]),
        (GridSizes(2, 1, 2, 1), ["train.precision=bf16", "train.micro_batch_size=2"]),
        full(GridSizes(1, 2, 2, 1), ["train.activation_checkpointing=selective", "parallel.chunks=2"]),
        full(GridSizes(1, 1, 2, 2), ["optim.shard_states=true", "parallel.cache_layers=all"]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_predicted_within_10_percent(ranks, sizes, overrides):
    check_peak(ranks, sizes, [*LARGER, *overrides])


def peak_of_few_experts(config: Config, sizes: GridSizes, count: int) -> int:
    """On a rank: the peak memory of a step in which all tokens use the first ``count`` experts."""
    choose = routing.chosen_experts._run or routing.chosen_experts._load()

    def chosen(logits, bias, scoring):
        logits = logits.clone()
        logits[:, count:] = -torch.inf
        return choose(logits, bias, scoring)

    with patch.object(routing.chosen_experts, "_run", chosen):
        return peak_taken(config, sizes)


def test_the_busiest_device_needs_the_memory_of_its_imbalance(ranks):
    sizes, z = GridSizes(1, 1, 4, 1), 4
    words = [*LARGER, "cluster.reserved_gib=0", "train.batch_size=16", "model.layers=2"]
    config, even = configured([*words, f"model.imbalance={z}"]), configured(words)
    taken = max(ranks.run(z, peak_of_few_experts, config, sizes, 2))
    estimate, balanced = Estimate(config, sizes), Estimate(even, sizes)
    state = training_state(estimate.description, sizes, config.optim)
    planned = estimate.memory_gib(estimate.share) * GIB
    assert planned == pytest.approx(taken + state["weights"] + state["optimizer"], rel=0.1)
    assert planned > 1.5 * balanced.memory_gib(estimate.share) * GIB


def test_an_imbalance_costs_time_only_if_z_splits_the_experts():
    for sizes, slower in ((GridSizes(1, 1, 4, 1), True), (GridSizes(2, 2, 1, 1), False)):
        one, three = (
            Estimate(configured([*MODEL, "cluster=perlmutter", f"model.imbalance={factor}"]), sizes).plan(1)
            for factor in (1, 3)
        )
        assert (three.compute_s > one.compute_s, three.memory_gib > one.memory_gib) == (slower, slower)


# -------------------------------------------------------------------------------------------------------------- time

NODES = ClusterConfig(
    device="cuda",
    levels=[LevelConfig(None, 100.0, None, 20.0), LevelConfig(2, 200.0, None, 5.0), LevelConfig(4, 300.0, 100.0, 1.0)],
)


def slowest_link_s(span: RankSpan, devices: int) -> float:
    """Return the seconds of the slowest link if each rank sends a byte to each other rank of its group."""
    blocks = range(0, devices, span.stride * span.size)
    groups = [
        range(first + place, first + span.stride * span.size, span.stride)
        for first in blocks
        for place in range(span.stride)
    ]
    loads = Counter[tuple[int, int]]()
    for group in groups:
        for source, target in itertools.permutations(group, 2):
            level = 0 if source // 8 != target // 8 else 1 if source // 4 != target // 4 else 2
            loads[level, source // (8, 4, 1)[level]] += 1
    members = len({device % 4 for device in groups[0]})
    rates = 100.0, 200.0, min(300.0, 100.0 * (members - 1))
    return max(load / 1e9 / rates[level] for (level, _), load in loads.items())


@pytest.mark.parametrize(
    "span", [RankSpan(*s) for s in ((1, 2), (1, 4), (1, 8), (1, 32), (2, 4), (2, 8), (4, 8), (8, 4))]
)
def test_an_exchange_takes_the_time_of_its_slowest_link(span):
    found = exchange_speed(NODES, span)
    assert (span.size - 1) * found.s_per_byte == pytest.approx(slowest_link_s(span, 64))


def test_a_measured_exchange_leaves_more_nodes_with_more_bytes():
    measured = MeasuredConfig(ALL_TO_ALL, local=8, nodes=2, sharing=1, latency_us=30.0, gb_s=20.0, hidden=0.5)
    cluster = replace(NODES, measured=[measured])
    two, four = (exchange_speed(cluster, RankSpan(1, size)) for size in (16, 32))
    assert (two.s_per_byte, two.latency_s, two.hidden) == pytest.approx((1 / 20e9, 30e-6, 0.5))
    assert four.s_per_byte / two.s_per_byte == pytest.approx((24 / 31) / (8 / 15))


def test_an_exchange_ends_when_the_larger_direction_has_ended():
    device = Device(NODES, Links(NODES, GridSizes(1, 1, 4, 1)))
    for sent, received in ((1e6, 3e6), (3e6, 1e6)):
        device.wait(device.start(ALL_TO_ALL, "z", sent, received))
    speed = exchange_speed(NODES, RankSpan(1, 4))
    assert device.bytes["z"] == 4e6
    assert device.time_s["z"] == pytest.approx(2 * (speed.latency_s + 3e6 * speed.s_per_byte))


# ------------------------------------------------------------------------------------------------------------ search


def test_the_search_splits_experts_over_z_where_that_is_fastest():
    words = ["model=olmoe_7b", "model.layers=4", "train.batch_size=16", "train.seq_len=2048", PIPELINE + "stages=1"]
    config = configured([*words, "cluster=perlmutter", "cluster.memory_gib=24"])
    best, times = rank(config, 4).plans[0], {}
    for sizes in grids(4):
        estimate = Estimate(config, sizes)
        if micro_batch := largest_micro_batch(estimate)[0]:
            times[sizes] = estimate.plan(micro_batch).step_time_s
    assert GridSizes(1, 1, 1, 4) not in times, "all experts fit one device"
    assert best.sizes == min(times, key=times.__getitem__) == GridSizes(1, 1, 4, 1)


def test_the_values_of_z_that_divide_the_experts_are_named():
    config = configured([*MODEL, "model.experts=12", "model.hidden=48", "parallel.gz=8", "train.batch_size=8"])
    with pytest.raises(ConfigError, match=r"parallel.gz=8: does not divide model.experts=12; use one of 1, 2, 3, 4, 6"):
        validate(config, 8)


def test_an_answer_for_programs_has_the_published_numbers_of_parameters():
    (entry,) = json.loads(ask("model=olmoe_7b", "grid=1x1x8x1", "cluster=dgx_h100", "format=json"))
    found = entry["parameters"], entry["active_parameters"]
    assert [round(count / 1e9, 2) for count in found] == [6.92, 1.28]
