"""The 4D paper's models of communication: equations, and the orders in which the planner's benchmark compares them."""

import pytest
from omegaconf import OmegaConf

from benchmarks.experiments import planner
from benchmarks.laboratory import paper_models
from benchmarks.settings import DeviceConfig, plain_rates
from gpt4d.config import ClusterConfig, Config, GridSizes, LevelConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.probe import Product
from gpt4d.parallel.layers import sharding

NODES_OF_4 = ClusterConfig(device="cuda", levels=[LevelConfig(None, 100.0), LevelConfig(4, 300.0, 100.0)])
TWO_LAYERS = GPT2Config(layers=2, hidden=8, heads=2, vocab_size=16, vocab_multiple=16, max_positions=4)


def test_a_weight_is_gathered_and_its_gradient_reduced_as_in_equations_4_to_8():
    """m=64 rows per data group, k=16, n=48 on (2, 2, 4, 2), elements of one byte."""
    product = Product(sharding.NORMAL, 64 * 16, 64 * 48, 16 * 48)
    sent = paper_models.weight_bytes(product, 1, GridSizes(2, 2, 4, 2), 1, 1)
    assert sent["z"] == {"all_gather": 3 * 16 * 48 / 16, "reduce_scatter": 3 / 4 * 16 * 48 / 4}
    assert sent["data"] == {"all_reduce": 2 * 1 / 2 * 16 * 48 / 16}


def test_communication_of_a_model_is_equation_9_summed_over_layers():
    """Two blocks of hidden 8, 32 tokens, only x=2: each rank sends 2·(1/2) of each float32 buffer along x."""
    train = TrainConfig(seq_len=4, batch_size=8, precision="fp32")
    config, model = Config(model=TWO_LAYERS, train=train, cluster=NODES_OF_4), registry.describe(TWO_LAYERS)
    # qkv and up reduce their input gradient over x, output and down their product: four times 32 rows of 8.
    sent = 2 * 4 * 32 * 8 * 4
    for recomputation, factor in (("none", 1), ("full", 1.5)):  # full repeats the two products
        config.train.activation_checkpointing = recomputation
        seconds = paper_models.communication(config, model, GridSizes(2), aware=True)
        assert seconds == {"x": pytest.approx(factor * sent / 100e9), "y": 0, "z": 0, "data": 0}


def test_only_the_aware_model_depends_on_placement():
    config = Config(model=TWO_LAYERS, train=TrainConfig(seq_len=4, batch_size=8), cluster=NODES_OF_4)
    sizes, model = GridSizes(2, 4, 1, 1), registry.describe(TWO_LAYERS)
    aware, agnostic = (paper_models.communication(config, model, sizes, flag) for flag in (True, False))
    assert aware["x"] == agnostic["x"] and aware["y"] == pytest.approx(2 * agnostic["y"])


def test_the_benchmark_of_the_planner_compares_three_orders_of_the_same_grids(tmp_path):
    config, path = DeviceConfig(virtual=True, hosts=2, ranks=2), tmp_path / "cluster.yaml"
    OmegaConf.save(plain_rates(config), path)
    orders = {cost: [plan.sizes for plan in plans] for cost, plans in planner.rank_grids(path, config).items()}
    assert len(orders["ours"]) > 5 and all(set(order) == set(orders["ours"]) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 3
