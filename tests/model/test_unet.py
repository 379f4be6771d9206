"""Invariant 1 for U-Nets: prediction and gradients on every grid equal the values of diffusers' UNet2DModel."""

import math
from dataclasses import replace

import pytest
import torch

from gpt4d.config import Config, ConfigError, DataConfig, GridSizes, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.unet import hugging_face as adapter
from gpt4d.model.unet.config import UNetConfig
from tests.support.grids import BINARY_GRIDS, full, sampled, to_hf
from tests.support.stages import check_float64_step, float64_step

# Both axes split streams, heads and groups: there are groups of which a rank has a part only.
TINY = UNetConfig(
    image_size=8, channels=16, multipliers=[1, 2], blocks_per_level=1, attention_at=[8, 4], head_size=8, groups=2
)
BATCH = 16
ONE = GridSizes()


def pictures():
    """Noisy images [batch, size, size, 3], their timesteps, the targets, and sample ids."""
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, TINY.image_size, TINY.image_size, TINY.image_channels
    noisy, wanted = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return noisy, torch.randint(0, 1000, (BATCH,), generator=generator).double(), wanted, torch.arange(BATCH)


class Sinusoids(torch.nn.Module):
    """The sinusoids of diffusers' Timesteps in float64; there they are float32."""

    def forward(self, timesteps):
        half = TINY.channels // 2
        angles = timesteps[:, None] * torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
        return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.fixture(scope="module")
def oracle():
    """Return a UNet2DModel in float64 with random weights: its state dict, prediction, loss and gradients."""
    from diffusers import UNet2DModel

    model = UNet2DModel.from_config(adapter.hf_config(TINY)).double().eval()
    model.time_proj = Sinusoids()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    noisy, timesteps, wanted, _ = pictures()
    prediction = model(noisy.movedim(-1, 1), timesteps).sample.movedim(1, -1)
    loss = (prediction - wanted).square().sum() / BATCH
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return model.state_dict(), prediction.detach(), loss.item(), grads


def settings(sizes=ONE, **changes):
    """Return the configuration of a grid; ``changes``: stages, chunks, microbatch, recompute."""
    pipeline = PipelineConfig(**changes.pop("pipeline", {}))
    train = {key: changes.pop(key) for key in ("micro_batch_size", "activation_checkpointing") if key in changes}
    parallel = ParallelConfig(gx=sizes.x, gy=sizes.y, gz=sizes.z, pipeline=pipeline, **changes)
    return Config(
        model=TINY,
        data=DataConfig(source="blue_marble", tokenizer_vocab=None),
        parallel=parallel,
        train=TrainConfig(seq_len=1, batch_size=BATCH, **train),
    )


def squared_error(module, part, batch, received):
    noisy, timesteps, wanted, ids = batch
    produced = module.compute(part, received, noisy, timesteps, ids)
    if "prediction" in produced:
        return {"loss": (produced["prediction"] - wanted).square().sum()}
    return produced


def step(config, world_size, state):
    """On a rank: the losses and gradients of ``float64_step``."""
    return float64_step(config, world_size, state, pictures(), squared_error, BATCH)


def check(ranks, oracle, config, devices):
    state, _, loss, grads = oracle
    check_float64_step(ranks.run(devices, step, config, devices, state), config, loss, grads)


@pytest.mark.parametrize("sizes", sampled(BINARY_GRIDS, [ONE, GridSizes(1, 2, 2, 2)]))
def test_loss_and_gradients_equal_diffusers_unet(ranks, oracle, sizes):
    check(ranks, oracle, settings(sizes), sizes.devices)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (GridSizes(2, 2, 2), {"activation_checkpointing": "full"}),
        full(GridSizes(2, 2, 1, 2), {"chunks": 2, "micro_batch_size": 4}),
        (GridSizes(2, 1, 2), {"replicated_layers": 2, "scatter_heads": False}),
        full(GridSizes(2, 2), {"chunks": 4, "activation_checkpointing": "full", "cache_layers": 3}),
        full(GridSizes(1, 2, 2), {"cache_layers": "all", "cache_scope": "step", "micro_batch_size": 2}),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_how_they_are_computed(ranks, oracle, sizes, changes):
    check(ranks, oracle, settings(sizes, **dict(changes)), sizes.devices)


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (3, {"pipeline": {"stages": 3}}),
        (6, {"pipeline": {"stages": 2, "stage_grids": ["2x1x1x2", "1x2x1x1"]}}),
        (2, {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "chunks_per_stage": 2}}),
        full(2, {"pipeline": {"stages": 2}}),
        full(4, {"pipeline": {"stages": 4, "schedule": "1f1b"}}),
        full(8, {"pipeline": {"stages": 2, "schedule": "zb_h1"}, "activation_checkpointing": "full"}),
    ],
    ids=str,
)
def test_gradients_over_stages_equal_diffusers_unet(ranks, oracle, devices, changes):
    sizes = GridSizes(2, 2) if devices == 8 else ONE
    check(ranks, oracle, settings(sizes, **dict(changes)), devices)


def step_with_dropout(config, world_size, state):
    config.model = replace(TINY, dropout=0.3)
    return step(config, world_size, state)


@pytest.fixture(scope="module")
def serial_dropout(ranks, oracle):
    """Return the losses and gradients of one device with dropout."""
    ((losses, gradients),) = ranks.run(1, step_with_dropout, settings(), 1, oracle[0])
    assert losses[0] != losses[1], "no dropout in training"
    return losses, gradients


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        (8, {"activation_checkpointing": "selective", "chunks": 2}),
        (2, {"pipeline": {"stages": 2}, "activation_checkpointing": "full"}),
        full(8, {"micro_batch_size": 4}),
    ],
    ids=str,
)
def test_dropout_does_not_depend_on_the_grid(ranks, oracle, serial_dropout, devices, changes):
    state, (serial, expected) = oracle[0], serial_dropout
    sizes = GridSizes(2, 2, 2) if devices == 8 else ONE
    for losses, parts in ranks.run(devices, step_with_dropout, settings(sizes, **dict(changes)), devices, state):
        assert losses == pytest.approx(serial, rel=1e-12)
        for name, (_, place, part) in parts.items():
            whole = expected[name][2]
            assert (part - whole[place]).norm() <= 1e-11 * max(whole.norm(), 1e-3), name


def test_weights_survive_the_way_to_diffusers_and_back(oracle):
    state, *_ = oracle
    shapes = {name: spec.shape for name, spec in registry.describe(TINY).parameters.items()}
    ours = {
        name: adapter.from_hf(name, [state[key] for key in adapter.names(name, TINY)], shape, TINY)
        for name, shape in shapes.items()
    }
    assert all(ours[name].shape == shape for name, shape in shapes.items())
    back = to_hf(ours, TINY)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_a_model_whose_first_multiplier_is_not_1_is_not_exported():
    with pytest.raises(ConfigError, match=r"multipliers=\[2, 3\]: .*; export a model whose first multiplier is 1"):
        adapter.hf_config(replace(TINY, multipliers=[2, 3]))
    exported = adapter.hf_config(replace(TINY, multipliers=[1, 3]))
    assert adapter.config_from_hf("exported", exported).multipliers == [1, 3]
