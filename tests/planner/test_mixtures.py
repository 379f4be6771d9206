"""Planned times of mixtures of experts, and their grids."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest

from gpt4d.config import ClusterConfig, GridSizes, LevelConfig, MeasuredConfig
from gpt4d.planner.candidates import fewest_microbatches
from gpt4d.planner.device import Device, Links
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.options import levels
from gpt4d.planner.search import rank
from gpt4d.planner.topology import ALL_TO_ALL, RankSpan, speed
from gpt4d.planner.workload import grids
from tests.support.planner_runs import ask
from tests.support.settings import configured

MODEL = (
    "model=moe_tiny", "model.hidden=32", "model.head_size=8", "model.inner=24", "model.vocab_size=320",
    "model.vocab_multiple=16", "model.max_positions=16", "optim.algorithm=adamw", "train.seq_len=16",
    "train.batch_size=8", "train.precision=fp32",
)  # fmt: skip
NODES = ClusterConfig(
    device="cuda",
    levels=[LevelConfig(None, 100.0, None, 20.0), LevelConfig(2, 200.0, None, 5.0), LevelConfig(4, 300.0, 100.0, 1.0)],
)


def test_an_imbalance_costs_time_only_if_z_splits_the_experts():
    for sizes, slower in ((GridSizes(1, 1, 4, 1), True), (GridSizes(2, 2, 1, 1), False)):
        one, three = (
            Estimate(configured([*MODEL, "cluster=perlmutter", f"model.imbalance={factor}"]), sizes).step(1)
            for factor in (1, 3)
        )
        assert (three.compute_s > one.compute_s, three.memory_gib > one.memory_gib) == (slower, slower)


def slowest_link_s(span: RankSpan, devices: int) -> float:
    """Return the seconds of the slowest link if each rank sends a byte to each other rank of its group."""
    blocks = range(0, devices, span.stride * span.size)
    starts = (first + place for first in blocks for place in range(span.stride))
    groups = [range(start, start + span.stride * span.size, span.stride) for start in starts]
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
    found = speed(NODES, ALL_TO_ALL, span)
    assert (span.size - 1) * found.s_per_byte == pytest.approx(slowest_link_s(span, 64))


def test_a_measured_exchange_leaves_more_nodes_with_more_bytes():
    measured = MeasuredConfig(ALL_TO_ALL, local=8, nodes=2, sharing=1, latency_us=30.0, gb_s=20.0, hidden=0.5)
    cluster = replace(NODES, measured=[measured])
    two, four = (speed(cluster, ALL_TO_ALL, RankSpan(1, size)) for size in (16, 32))
    assert (two.s_per_byte, two.latency_s, two.hidden) == pytest.approx((1 / 20e9, 30e-6, 0.5))
    assert four.s_per_byte / two.s_per_byte == pytest.approx((24 / 31) / (8 / 15))


def test_an_exchange_ends_when_the_larger_direction_has_ended():
    device = Device(NODES, Links(NODES, GridSizes(1, 1, 4, 1)))
    for sent, received in ((1e6, 3e6), (3e6, 1e6)):
        device.wait(device.start(ALL_TO_ALL, "z", sent, received))
    found = speed(NODES, ALL_TO_ALL, RankSpan(1, 4))
    assert device.bytes["z"] == 4e6
    assert device.time_s["z"] == pytest.approx(2 * (found.latency_s + 3e6 * found.s_per_byte))


def test_the_search_splits_experts_over_z_where_that_is_fastest():
    words = "model=olmoe_7b", "model.layers=4", "train.batch_size=16", "train.seq_len=2048", "cluster=perlmutter"
    config = configured([*words, "cluster.memory_gib=24", "parallel.pipeline.stages=1"])
    best, times = rank(config, 4).plans[0], {}
    for sizes in grids(4):
        if step := fewest_microbatches(levels(config)[0], (sizes,)):
            times[sizes] = step.step_time_s
    assert GridSizes(1, 1, 1, 4) not in times, "all experts fit one device"
    assert best.sizes == min(times, key=times.__getitem__) == GridSizes(1, 1, 4, 1)


def test_an_answer_for_programs_has_the_published_numbers_of_parameters():
    (entry,) = json.loads(ask("model=olmoe_7b", "grid=1x1x8x1", "cluster=dgx_h100", "format=json"))
    found = entry["parameters"], entry["active_parameters"]
    assert [round(count / 1e9, 2) for count in found] == [6.92, 1.28]
