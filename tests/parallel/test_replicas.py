"""Parameters that several ranks replicate have the same bits on all of them after training."""

from collections import defaultdict

import pytest
import torch

from gpt4d.config.composing import compose
from tests.exactness.cases import FAMILIES
from tests.exactness.comparison import train
from tests.support.grids import full
from tests.support.stages import own_stage


def trained(config, world_size):
    """On a rank: for each parameter, its slices in the global tensor and its values after three steps."""
    plan, stage = own_stage(config, world_size, torch.float32)
    return {name: (place, values) for name, (_, place, values) in train(plan, stage).weights.items()}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt", ["parallel.scatter_heads=false"]),
        ("unet", []),
        full("llama", ["model.qk_norm=true"]),
        full("gemma3", []),
        full("olmo2", []),
    ],
)
def test_replicas_of_a_parameter_have_the_same_bits_after_training(ranks, family, settings):
    shape = ["train.batch_size=4"] if family == "unet" else ["train.batch_size=4", "train.seq_len=16", "model.layers=2"]
    config = compose([f"model={FAMILIES[family]}", "parallel.gx=2", "parallel.gy=2", *shape, *settings])
    replicas = defaultdict(list)
    for parameters in ranks.run(4, trained, config, 4):
        for name, (place, values) in parameters.items():
            replicas[name, str(place)].append(values)
    assert max(map(len, replicas.values())) > 1
    for (name, _), (first, *others) in replicas.items():
        assert all(torch.equal(first, other) for other in others), name
