"""The diffusion process agrees with diffusers' schedulers, and its noise is a function of seed and sample id."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from gpt4d.task.diffusion_process import SCHEDULES, DiffusionProcess

THEIR_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
THEIR_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}
SHAPE = 3, 4, 4


def theirs(kind, schedule, steps, prediction="epsilon", **settings):
    """Return a scheduler of diffusers with the cumulative products of ours, since it computes its own in float32."""
    scale = 1000 / steps
    scheduler = kind(
        steps, 1e-4 * scale, 0.02 * scale, THEIR_SCHEDULES[schedule], prediction_type=THEIR_PREDICTIONS[prediction],
        **settings,
    )  # fmt: skip
    scheduler.alphas_cumprod = DiffusionProcess(schedule, steps, prediction).alpha_bars
    scheduler.final_alpha_cumprod = torch.ones((), dtype=torch.float64)
    return scheduler


def pictures(count, seed=0):
    """Return images and noise in float64."""
    generator = torch.Generator().manual_seed(seed)
    x_0, epsilon = torch.randn(2, count, *SHAPE, dtype=torch.float64, generator=generator)
    return x_0.tanh(), epsilon


def model(x, timesteps):
    """Return a fixed function of x and the timesteps in place of a model, not bounded."""
    return 1.3 * x.roll(1, -1) + torch.sin(3 * x) - timesteps.view(-1, 1, 1, 1) / 40


@pytest.mark.parametrize("steps", [1000, 250])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_betas_are_those_of_diffusers(schedule, steps):
    betas = SCHEDULES[schedule](steps)
    assert betas.dtype == torch.float64
    torch.testing.assert_close(betas.float(), theirs(DDPMScheduler, schedule, steps).betas, rtol=1e-4, atol=1e-7)
    # Scaled linear betas exceed 1 below 20 steps.
    assert (DiffusionProcess(schedule, 8, "epsilon").alpha_bars > 0).all(), "few steps keep a share of the image"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_noised_pictures_and_velocities_are_those_of_diffusers(schedule):
    x_0, epsilon = pictures(5)
    timesteps = torch.tensor([0, 1, 40, 98, 99])
    process, scheduler = DiffusionProcess(schedule, 100, "v"), theirs(DDPMScheduler, schedule, 100, "v")
    expected = scheduler.add_noise(x_0, epsilon, timesteps)
    torch.testing.assert_close(process.add_noise(x_0, epsilon, timesteps), expected, rtol=1e-12, atol=1e-12)
    expected = scheduler.get_velocity(x_0, epsilon, timesteps)
    torch.testing.assert_close(process.target(x_0, epsilon, timesteps), expected, rtol=1e-12, atol=1e-12)
    assert DiffusionProcess(schedule, 100, "epsilon").target(x_0, epsilon, timesteps) is epsilon


@pytest.mark.parametrize("prediction", THEIR_PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_right_prediction_implies_the_picture_and_the_noise(schedule, prediction):
    (x_0, epsilon), timesteps = pictures(4), torch.tensor([0, 3, 60, 90])
    process = DiffusionProcess(schedule, 100, prediction)
    x_t = process.add_noise(x_0, epsilon, timesteps)
    implied = process.x_0_and_epsilon(process.target(x_0, epsilon, timesteps), x_t, timesteps)
    torch.testing.assert_close(implied, (x_0, epsilon), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("clip", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("prediction", THEIR_PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_ddim_trajectory_is_that_of_diffusers(schedule, prediction, clip, spacing):
    settings = {"clip_sample": clip > 0, "clip_sample_range": clip, "timestep_spacing": spacing}
    scheduler = theirs(DDIMScheduler, schedule, 100, prediction, **settings)
    scheduler.set_timesteps(20)
    process, (_, noise) = DiffusionProcess(schedule, 100, prediction, spacing=spacing), pictures(3)
    seen = []

    def watched(x, timesteps):
        seen.append((x, timesteps))
        return model(x, timesteps)

    result, x = process.ddim(watched, noise, 20, clip), noise
    for (ours, timesteps), timestep in zip(seen, scheduler.timesteps, strict=True):
        assert timesteps.tolist() == [timestep] * 3
        torch.testing.assert_close(ours, x, rtol=1e-9, atol=1e-9)
        x = scheduler.step(model(x, timesteps), timestep, x, use_clipped_model_output=clip > 0).prev_sample
    torch.testing.assert_close(result, x, rtol=1e-9, atol=1e-9)
    assert not clip or result.abs().max() <= clip


def test_sampling_with_the_right_noise_returns_the_picture():
    """The number of steps need not divide the number of timesteps."""
    x_0, epsilon = pictures(2)
    process = DiffusionProcess("cosine", 100, "epsilon")
    assert process.sampling_timesteps(7) == [99, 85, 71, 57, 42, 28, 14]
    start = process.add_noise(x_0, epsilon, torch.tensor([99, 99]))
    torch.testing.assert_close(process.ddim(lambda *_: epsilon, start, 7, clip_range=0), x_0, rtol=0, atol=1e-6)


def test_float32_pictures_stay_float32():
    process = DiffusionProcess("linear", 100, "v")
    x_0, epsilon = (tensor.float() for tensor in pictures(2))
    timesteps = torch.tensor([0, 99])
    assert process.add_noise(x_0, epsilon, timesteps).dtype == process.target(x_0, epsilon, timesteps).dtype
    assert process.ddim(model, epsilon, 5).dtype == torch.float32


def test_noise_and_timestep_of_a_sample_depend_on_seed_and_id_only():
    process = DiffusionProcess("linear", 1000, "epsilon")
    ids = torch.arange(2000, 2064)
    timesteps, noise = process.training_noise(3, ids, SHAPE)
    some = torch.tensor([7, 0, 63, 20])
    again = process.training_noise(3, ids[some], SHAPE)
    assert torch.equal(again[0], timesteps[some]) and torch.equal(again[1], noise[some])
    assert noise.shape == (64, *SHAPE) and noise.dtype == torch.float32
    assert timesteps.dtype == torch.int64
    others = [process.training_noise(4, ids, SHAPE), process.training_noise(3, ids + 64, SHAPE)]
    others.append(process.training_noise(3, ids, SHAPE, held_out=True))
    for other_timesteps, other_noise in others:
        assert (other_timesteps != timesteps).float().mean() > 0.9
        assert abs((other_noise * noise).mean().item()) < 5 / noise.numel() ** 0.5


def test_timesteps_are_uniform_and_the_noise_does_not_depend_on_them():
    process = DiffusionProcess("linear", 10, "epsilon")
    timesteps, noise = process.training_noise(0, torch.arange(20_000), (1, 1, 2))
    counts = timesteps.bincount(minlength=10)
    assert len(counts) == 10 and (counts - 2000).abs().max() < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    for timestep in range(10):
        part = noise[timesteps == timestep]
        assert abs(part.mean().item()) < 5 / part.numel() ** 0.5


def test_sampling_noise_depends_on_seed_and_number_only():
    process = DiffusionProcess("linear", 10, "epsilon")
    noise = process.sampling_noise(1, torch.arange(8), SHAPE)
    assert torch.equal(process.sampling_noise(1, torch.tensor([5, 2]), SHAPE), noise[[5, 2]])
    assert not torch.equal(process.sampling_noise(2, torch.arange(8), SHAPE), noise)
    assert not torch.equal(process.training_noise(1, torch.arange(8), SHAPE)[1], noise)
