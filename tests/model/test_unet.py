"""Invariant 1 for U-Nets: prediction and gradients on every grid equal the values of diffusers' UNet2DModel."""

import math
from dataclasses import replace

import pytest
import torch

from gpt4d.config import Config, ConfigError, DataConfig, GridSizes, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.unet import hugging_face as adapter
from gpt4d.model.unet.config import UNetConfig
from tests.support.grids import BINARY_GRIDS, full, to_hf
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
    stages = PipelineConfig(**changes.pop("pipeline", {}))
    train = {key: changes.pop(key) for key in ("micro_batch_size", "activation_checkpointing") if key in changes}
    parallel = ParallelConfig(gx=sizes.x, gy=sizes.y, gz=sizes.z, pipeline=stages, **changes)
    return Config(
        model=TINY,
        data=DataConfig(source="blue_marble", tokenizer_vocab=None),
        parallel=parallel,
        train=TrainConfig(seq_len=1, batch_size=BATCH, **train),
    )


def squared_error(module, part, batch, received):
    noisy, timesteps, wanted, ids = batch
    produced = module.spec.compute(module, part, received, noisy, timesteps, ids)
    if "prediction" in produced:
        return {"loss": (produced["prediction"] - wanted).square().sum()}
    return produced


def step(config, world_size, state):
    """On a rank: the losses and gradients of ``float64_step``."""
    return float64_step(config, world_size, state, pictures(), squared_error, BATCH)


@pytest.mark.parametrize(
    ("devices", "sizes", "changes"),
    [
        (1, ONE, {}),
        (4, GridSizes(1, 2, 1, 2), {}),
        (8, GridSizes(2, 2, 2), {"activation_checkpointing": "full"}),
        (4, GridSizes(2, 1, 2), {"replicated_layers": 2, "scatter_heads": False}),
        (4, ONE, {"pipeline": {"stages": 2, "stage_grids": ["1x1x1x2", "1x2x1x1"]}}),
        (2, ONE, {"pipeline": {"stages": 2, "schedule": "interleaved_1f1b", "chunks_per_stage": 2}}),
        *(full(s.devices, s, {}) for s in BINARY_GRIDS[1:] if s != GridSizes(1, 2, 1, 2)),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_diffusers_unet(ranks, oracle, devices, sizes, changes):
    (state, _, loss, grads), config = oracle, settings(sizes, **changes)
    check_float64_step(ranks.run(devices, step, config, devices, state), config, loss, grads)


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
