"""Bandwidths of groups: the 4D paper's cases (Eq. 10, Fig. 5 and 6) and equations; on CPUs, the bytes of a run."""

from dataclasses import replace

import pytest
import torch

from benchmarks.laboratory.virtual_device import VirtualDevice
from gpt4d.config import ClusterConfig, Config, GridSizes, LevelConfig, MeasuredConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.planner.device import KINDS, Device, Links, sent_bytes
from gpt4d.planner.topology import SHIFT, RankSpan, crossed_levels, node_size, paper_bandwidths, spans, speed
from gpt4d.planner.workload import all_reduced_bytes
from tests.support.fake_time import FakeTime
from tests.support.parallel_runs import axis_across_hosts

NODES_OF_4 = ClusterConfig(device="cuda", levels=[LevelConfig(None, 100.0), LevelConfig(4, 300.0, 100.0)])
HOSTS_OF_4 = replace(NODES_OF_4, device="cpu")
TWO_LAYERS = GPT2Config(layers=2, hidden=8, heads=2, vocab_size=16, vocab_multiple=16, max_positions=4)


@pytest.mark.parametrize(
    ("sizes", "node", "expected"),
    [
        (GridSizes(8, 1, 1, 1), 4, (100, 25, 25, 25)),  # Fig. 5: one ring over two nodes does not share the link
        (GridSizes(2, 4, 1, 1), 2, (300, 50, 50, 50)),  # Fig. 6: two rings share each link
        (GridSizes(2, 2, 4, 1), 4, (300, 300, 25, 25)),
        (GridSizes(2, 2, 2, 2), 4, (300, 300, 25, 25)),
        (GridSizes(1, 1, 1, 16), 4, (300, 300, 300, 100)),
        (GridSizes(2, 2, 2, 2), 16, (300, 300, 300, 300)),
    ],
)
def test_rings_share_a_nodes_link_as_in_equation_10(sizes, node, expected):
    cluster = ClusterConfig(levels=[LevelConfig(None, 100.0), LevelConfig(node, 300.0)])
    assert tuple(paper_bandwidths(cluster, sizes).values()) == expected


def test_collectives_send_the_bytes_of_equations_1_to_3():
    kinds = ("all_gather", 10), ("reduce_scatter", 40), ("all_reduce", 40)
    assert [sent_bytes(kind, 4, nbytes) for kind, nbytes in kinds] == [30, 30, 60]


def test_all_reduces_of_a_model_send_the_bytes_of_equations_4_to_8():
    """Two blocks of hidden 8 on (2, 2, 4, 2), 32 rows per data group: each rank sends 2·(1/2) of its part."""
    train = TrainConfig(seq_len=4, batch_size=16, precision="fp32")
    sent = all_reduced_bytes(
        Config(model=TWO_LAYERS, train=train), registry.describe(TWO_LAYERS), GridSizes(2, 2, 4, 2)
    )
    # By qkv (24 outputs), output (8), up (32) and down (8 of 32 inputs); the other axis splits each, and z the rows.
    assert sent["y"] == 2 * 32 * (24 + 8 + 32 + 32) / (4 * 2) * 4
    assert sent["x"] == 2 * 32 * (8 + 8 + 8 + 8) / (4 * 2) * 4


def test_spans_give_stride_size_and_placement_on_nodes():
    assert spans(GridSizes(2, 3, 4, 5), context=10)["context"] == RankSpan(6, 10)
    assert spans(GridSizes(2, 3, 4, 5)) == {
        "x": RankSpan(1, 2), "y": RankSpan(2, 3), "z": RankSpan(6, 4), "data": RankSpan(24, 5),
        "context": RankSpan(6, 1), "batch": RankSpan(6, 20), "world": RankSpan(1, 120),
    }  # fmt: skip
    for span, local, nodes, sharing in ((RankSpan(2, 4), 2, 2, 2), (RankSpan(8, 4), 1, 4, 4)):
        assert (span.local(4), span.nodes(4), span.sharing(4)) == (local, nodes, sharing)
    # A group that does not divide a node spans two.
    assert (RankSpan(1, 3).local(4), RankSpan(1, 3).nodes(4)) == (2, 2)
    assert [RankSpan(*span).nodes(4) for span in ((1, 2), (2, 2), (1, 4))] == [1, 1, 1]
    assert speed(NODES_OF_4, "all_gather", RankSpan(1, 3)).across


def test_a_group_crosses_the_levels_between_its_ranks():
    torus = ClusterConfig(levels=[LevelConfig(None, 100.0), LevelConfig(2, 200.0), LevelConfig(4, 300.0)])
    assert node_size(torus) == 8
    for span, expected in (
        (RankSpan(1, 4), [(300, 4, 1)]),
        (RankSpan(2, 4), [(300, 2, 1), (200, 2, 2)]),
        (RankSpan(8, 3), [(100, 3, 8)]),
        (RankSpan(4, 1), []),
    ):
        assert [(c.level.group_gb_s, c.members, c.sharing) for c in crossed_levels(torus, span)] == expected


@pytest.mark.parametrize("sizes", [GridSizes(8, 1, 1, 1), GridSizes(2, 4, 1, 1), GridSizes(1, 2, 8, 1)])
def test_between_nodes_the_bandwidth_is_that_of_equation_10(sizes):
    beta = paper_bandwidths(NODES_OF_4, sizes)
    for axis, span in spans(sizes).items():
        if axis in beta and span.nodes(4) > 1:
            assert 1e-9 / speed(NODES_OF_4, "all_gather", span).s_per_byte == pytest.approx(beta[axis])


@pytest.mark.parametrize(("devices", "gb_s"), [(2, 100), (4, 300)])
def test_two_devices_use_one_link_and_four_use_all_their_links(devices, gb_s):
    assert 1e-9 / speed(NODES_OF_4, "all_gather", RankSpan(1, devices)).s_per_byte == pytest.approx(gb_s)


def test_unmeasured_latency_is_that_of_a_tree_or_a_ring():
    cluster = ClusterConfig(levels=[LevelConfig(None, 100.0, None, 10.0), LevelConfig(4, 300.0, 100.0, 1.0)])
    assert speed(cluster, "all_reduce", RankSpan(1, 32)).latency_s == pytest.approx((2 * 3 * 10 + 2 * 2 * 1) / 1e6)
    assert speed(cluster, "all_gather", RankSpan(1, 32)).latency_s == pytest.approx((7 * 10 + 3 * 1) / 1e6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_measurement_overrides_the_speed_from_levels(device):
    measured = MeasuredConfig("all_gather", local=2, nodes=2, sharing=2, latency_us=30.0, gb_s=4.0, hidden=0.5)
    cluster = replace(NODES_OF_4, device=device, measured=[measured])
    two_nodes = speed(cluster, "all_gather", RankSpan(2, 4))
    assert (two_nodes.latency_s, two_nodes.s_per_byte) == pytest.approx((30e-6, 0.25e-9))
    assert two_nodes.hidden == 0.5 and two_nodes.across
    assert two_nodes.before_s_per_byte == two_nodes.after_s_per_byte == 0
    four_nodes = speed(cluster, "all_gather", RankSpan(2, 8))  # same bandwidth, more messages
    assert four_nodes.s_per_byte == two_nodes.s_per_byte and four_nodes.latency_s == pytest.approx(7 / 3 * 30e-6)
    unmeasured = replace(cluster, measured=[])
    assert speed(cluster, "all_reduce", RankSpan(2, 4)) == speed(unmeasured, "all_reduce", RankSpan(2, 4))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("span", "latency_us", "gb_s"),
    [
        (RankSpan(1, 4), 5, 300),  # on a node
        (RankSpan(1, 8), 20, 100),  # one message between the nodes
        (RankSpan(4, 2), 20, 25),  # four
    ],
)
def test_a_shift_takes_the_time_of_a_message_over_the_slowest_link(device, span, latency_us, gb_s):
    levels = LevelConfig(None, 100.0, latency_us=20.0), LevelConfig(4, 300.0, 100.0, latency_us=5.0)
    cluster = replace(NODES_OF_4, device=device, levels=list(levels))
    found = speed(cluster, SHIFT, span)
    assert (found.latency_s, found.s_per_byte) == pytest.approx((latency_us / 1e6, 1e-9 / gb_s))
    assert found.before_s_per_byte == found.after_s_per_byte == 0
    assert found.hidden == speed(cluster, "all_gather", span).hidden


def test_a_shift_takes_a_step_of_a_measured_all_gather():
    measured = MeasuredConfig("all_gather", local=4, nodes=2, sharing=1, latency_us=70.0, gb_s=4.0, hidden=0.5)
    found = speed(replace(NODES_OF_4, measured=[measured]), SHIFT, RankSpan(1, 8))
    assert (found.latency_s, found.s_per_byte, found.hidden) == pytest.approx((10e-6, 0.25e-9, 0.5))


def test_a_device_counts_the_bytes_and_the_time_of_a_shift():
    device = Device(NODES_OF_4, Links(NODES_OF_4, GridSizes(8, 1, 1, 1)))
    device.do(SHIFT, "x", 3e6)
    found = speed(NODES_OF_4, SHIFT, RankSpan(1, 8))
    assert device.bytes["x"] == 3e6 == sent_bytes(SHIFT, 8, 3e6)
    assert device.now == pytest.approx(found.latency_s + 3e6 * found.s_per_byte)


def seconds_by_hosts(kind: str, nbytes: int) -> tuple[float, float]:
    """Return a collective's seconds inside and between two hosts of three ranks, at 1 MB/s per rank."""
    axis = axis_across_hosts([0, 0, 0, 1, 1, 1])
    tensor = torch.zeros(nbytes // 4)

    def run(ranks_per_host: int) -> float:
        device = VirtualDevice(1e12, 1e12, 0, intra_host_mb_s=1, ranks_per_host=ranks_per_host, source=FakeTime())
        with device:
            getattr(axis, f"start_{kind}")(tensor).wait()
            return device.source.now

    inside = run(3)
    return inside, run(6) - inside  # with six ranks per host, no transfer is free


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_of_cpus_sends_the_planned_bytes_inside_and_between_hosts(ranks, kind):
    links = LevelConfig(None, 3e-3, None, 0.0), LevelConfig(3, 1e-3, None, 0.0)  # a host's link carries three ranks
    planned, nbytes = speed(ClusterConfig(levels=list(links)), kind, RankSpan(1, 6)), 6 << 14
    sent = sent_bytes(kind, 6, nbytes)
    expected = [sent * s for s in (planned.before_s_per_byte + planned.after_s_per_byte, planned.s_per_byte)]
    for seconds in ranks.run(6, seconds_by_hosts, kind, nbytes):
        assert seconds == pytest.approx(expected)


def test_by_hosts_a_link_carries_less_than_in_a_ring():
    """Eight ranks on two hosts: half of a gathered tensor enters each host, instead of seven eighths."""
    by_hosts, ring = (speed(cluster, "all_gather", RankSpan(1, 8)) for cluster in (HOSTS_OF_4, NODES_OF_4))
    assert by_hosts.s_per_byte == pytest.approx(4 / 7 * ring.s_per_byte) and ring.after_s_per_byte == 0


@pytest.mark.parametrize("span", [RankSpan(4, 8), RankSpan(1, 3)], ids=["one rank per host", "hosts of unequal ranks"])
def test_other_groups_across_hosts_form_rings(span):
    assert speed(HOSTS_OF_4, "all_reduce", span) == speed(NODES_OF_4, "all_reduce", span)


@pytest.mark.parametrize("cluster", [HOSTS_OF_4, ClusterConfig()], ids=["hosts of four", "one level"])
def test_collectives_inside_a_host_of_cpus_occupy_them(cluster):
    inside = speed(cluster, "all_reduce", RankSpan(2, 2))
    assert inside.hidden == 0 and not inside.across
