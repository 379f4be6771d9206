"""Bandwidths of groups: the cases of the 4D paper (Eq. 10, Fig. 5 and 6), and its equations by hand."""

import pytest

from gpt4d.config import ClusterConfig, Config, GridSizes, LevelConfig, MeasuredConfig, ModelConfig, TrainConfig
from gpt4d.planner import paper_models
from gpt4d.planner.device import sent_bytes
from gpt4d.planner.topology import Span, crossed, node_size, spans, speed

NODES_OF_4 = ClusterConfig(levels=[LevelConfig(None, 100.0), LevelConfig(4, 300.0, 100.0)])
TWO_LAYERS = ModelConfig(layers=2, hidden=8, heads=2, vocab_size=16, vocab_multiple=16, max_positions=4)


@pytest.mark.parametrize(
    ("sizes", "node", "expected"),
    [
        (GridSizes(8, 1, 1, 1), 4, (100, 25, 25, 25)),  # Fig. 5: one ring over two nodes has the link to itself
        (GridSizes(2, 4, 1, 1), 2, (300, 50, 50, 50)),  # Fig. 6: two rings over each link
        (GridSizes(2, 2, 4, 1), 4, (300, 300, 25, 25)),
        (GridSizes(2, 2, 2, 2), 4, (300, 300, 25, 25)),
        (GridSizes(1, 1, 1, 16), 4, (300, 300, 300, 100)),
        (GridSizes(2, 2, 2, 2), 16, (300, 300, 300, 300)),
    ],
)
def test_rings_share_a_nodes_link_as_equation_10_says(sizes, node, expected):
    assert paper_models.bandwidths(sizes, node, inter=100, intra=300) == expected


def test_collectives_send_what_equations_1_to_3_say():
    assert sent_bytes("all_gather", 4, 10) == 30
    assert sent_bytes("reduce_scatter", 4, 40) == 30
    assert sent_bytes("all_reduce", 4, 40) == 60


def test_a_layer_sends_what_equations_4_to_8_say():
    """m=64 rows a data group, k=16, n=48 on (2, 2, 4, 2), numbers of one byte."""
    sent = paper_models.layer_bytes(64, 16, 48, False, GridSizes(2, 2, 4, 2), 1, 1)
    assert sent["z"] == {"all_gather": 3 * 16 * 48 / 16, "reduce_scatter": 3 / 4 * 16 * 48 / 4}
    assert sent["y"] == {"forward": 2 * 1 / 2 * 64 * 48 / (4 * 2)}
    assert sent["x"] == {"backward": 2 * 1 / 2 * 64 * 16 / (4 * 2)}
    assert sent["data"] == {"all_reduce": 2 * 1 / 2 * 16 * 48 / 16}
    transposed = paper_models.layer_bytes(64, 16, 48, True, GridSizes(4, 1, 1, 1), 1, 1)
    assert transposed["x"] == {"forward": 2 * 3 / 4 * 64 * 48} and transposed["y"] == {"backward": 0}


def test_a_models_communication_is_equation_9_over_its_layers():
    """Two blocks of hidden 8, 32 tokens, x=2 alone: what crosses x is 2·(1/2) of each of its buffers, in float32."""
    config = Config(model=TWO_LAYERS, train=TrainConfig(seq_len=4, batch_size=8), cluster=NODES_OF_4)
    # qkv and up send the gradient of their input over x, output and down their product: four times 32 rows of 8.
    sent = 2 * 4 * 32 * 8 * 4
    found = paper_models.communication(config, GridSizes(2, 1, 1, 1), aware=True)
    assert found == {"x": pytest.approx(sent / 100e9), "y": 0, "z": 0, "data": 0}
    config.train.activation_checkpointing = "full"  # the two products once more
    again = paper_models.communication(config, GridSizes(2, 1, 1, 1), aware=True)
    assert again["x"] == pytest.approx(1.5 * found["x"])


def test_only_the_aware_model_knows_where_groups_lie():
    config = Config(model=TWO_LAYERS, train=TrainConfig(seq_len=4, batch_size=8), cluster=NODES_OF_4)
    sizes = GridSizes(2, 4, 1, 1)
    aware, agnostic = (paper_models.communication(config, sizes, flag) for flag in (True, False))
    assert aware["x"] == agnostic["x"] and aware["y"] == pytest.approx(2 * agnostic["y"])


def test_an_axis_knows_its_neighbours():
    along = spans(GridSizes(2, 3, 4, 5))
    assert along == {
        "x": Span(1, 2), "y": Span(2, 3), "z": Span(6, 4), "data": Span(24, 5), "world": Span(1, 120),
    }  # fmt: skip
    assert (Span(2, 4).local(4), Span(2, 4).nodes(4), Span(2, 4).sharing(4)) == (2, 2, 2)
    assert (Span(8, 4).local(4), Span(8, 4).nodes(4), Span(8, 4).sharing(4)) == (1, 4, 4)


def test_a_group_crosses_the_levels_between_its_ranks():
    torus = ClusterConfig(levels=[LevelConfig(None, 100.0), LevelConfig(2, 200.0), LevelConfig(4, 300.0)])
    assert node_size(torus) == 8
    assert [(c.level.group_gb_s, c.members, c.sharing) for c in crossed(torus, Span(1, 4))] == [(300, 4, 1)]
    assert [(c.level.group_gb_s, c.members, c.sharing) for c in crossed(torus, Span(2, 4))] == [
        (300, 2, 1), (200, 2, 2),
    ]  # fmt: skip
    assert [(c.level.group_gb_s, c.members, c.sharing) for c in crossed(torus, Span(8, 3))] == [(100, 3, 8)]
    assert crossed(torus, Span(4, 1)) == []


@pytest.mark.parametrize("sizes", [GridSizes(8, 1, 1, 1), GridSizes(2, 4, 1, 1), GridSizes(1, 2, 8, 1)])
def test_between_nodes_a_group_has_what_equation_10_gives_it(sizes):
    beta = paper_models.bandwidths(sizes, 4, inter=100, intra=300)
    for axis, span in spans(sizes).items():
        if axis != "world" and span.nodes(4) > 1:
            assert 1e-9 / speed(NODES_OF_4, "all_gather", span).s_per_byte == pytest.approx(getattr(beta, axis))


def test_two_devices_on_one_link_have_that_and_four_all_their_links():
    assert 1e-9 / speed(NODES_OF_4, "all_gather", Span(1, 2)).s_per_byte == pytest.approx(100)
    assert 1e-9 / speed(NODES_OF_4, "all_gather", Span(1, 4)).s_per_byte == pytest.approx(300)


def test_without_a_measurement_messages_go_up_and_down_a_tree_or_around_a_ring():
    cluster = ClusterConfig(levels=[LevelConfig(None, 100.0, None, 10.0), LevelConfig(4, 300.0, 100.0, 1.0)])
    assert speed(cluster, "all_reduce", Span(1, 32)).latency_s == pytest.approx((2 * 3 * 10 + 2 * 2 * 1) / 1e6)
    assert speed(cluster, "all_gather", Span(1, 32)).latency_s == pytest.approx((7 * 10 + 3 * 1) / 1e6)


def test_groups_that_do_not_divide_a_node_lie_on_two():
    assert (Span(1, 3).local(4), Span(1, 3).nodes(4)) == (2, 2)
    assert (Span(1, 2).nodes(4), Span(2, 2).nodes(4), Span(1, 4).nodes(4)) == (1, 1, 1)
    assert speed(NODES_OF_4, "all_gather", Span(1, 3)).across


def test_a_measurement_comes_before_what_levels_would_give():
    measured = MeasuredConfig("all_gather", local=2, nodes=2, sharing=2, latency_us=30.0, gb_s=4.0, hidden=0.5)
    cluster = ClusterConfig(levels=NODES_OF_4.levels, measured=[measured])
    there = speed(cluster, "all_gather", Span(2, 4))
    assert (
        (there.latency_s, there.s_per_byte) == pytest.approx((30e-6, 0.25e-9)) and there.hidden == 0.5 and there.across
    )
    further = speed(cluster, "all_gather", Span(2, 8))  # the same on four nodes: more messages
    assert further.s_per_byte == there.s_per_byte and further.latency_s == pytest.approx(7 / 3 * 30e-6)
    assert speed(cluster, "all_reduce", Span(2, 4)) == speed(NODES_OF_4, "all_reduce", Span(2, 4))
