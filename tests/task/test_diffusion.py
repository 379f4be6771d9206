"""Diffusion runs: invariants 1 and 2 and planned bytes for a U-Net, averaged weights, generated images."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpt4d import generate
from gpt4d.checkpoint import exporter, importer
from gpt4d.checkpoint.__main__ import main
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError, GridSizes
from gpt4d.model.unet import hugging_face as unet
from gpt4d.model.unet.config import UNetConfig
from gpt4d.task.diffusion import save_images
from gpt4d.task.diffusion_process import DiffusionProcess
from gpt4d.validation import validate
from tests.support.data_files import one_line
from tests.support.grids import build_model, bytes_planned, bytes_sent, full, on_grid, train_in_rank
from tests.support.settings import configured
from tests.support.training import losses_and_norms

SIZE = 8
CACHED = "parallel.cache_layers=all", "parallel.cache_scope=step"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder of 48 images, each with a gradient of a color of its own."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    ramp = np.linspace(0, 1, SIZE)[:, None, None] * np.linspace(0.5, 1, SIZE)[None, :, None]
    for number in range(48):
        color = generator.integers(50, 255, 3)
        Image.fromarray((ramp * color).astype(np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(photos, cache, tmp_path):
    """Return a function from overrides to the configuration of six steps of a tiny U-Net."""
    return lambda *overrides: settings(photos, cache, tmp_path / "run", *overrides)


def settings(photos, cache, run_dir, *overrides):
    return configured(
            [
                "model=unet_tiny", f"model.image_size={SIZE}", "model.channels=16", "model.multipliers=[1,2]",
                "model.blocks_per_level=1", "model.attention_at=[4]", "model.head_size=8", "model.groups=4",
                "model.timesteps=50", "data=pictures", f"data.path={photos}", "data.validation_fraction=0.3",
                f"data.cache_dir={cache}", "train.steps=6", "train.batch_size=8", "train.validate_every=0",
                "train.validation_batches=1", "checkpoint.every=3", "logging.every=1", "logging.sample_images=4",
                "logging.sample_steps=3", "optim.ema_decay=0.9", "optim.warmup_steps=1", "optim.algorithm=adamw",
                f"run.dir={run_dir}",
                *overrides,
            ]
        )  # fmt: skip


def event(run_dir, name):
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line.get("event") == name)


def assert_losses(run, serial):
    for ours, theirs in zip(losses_and_norms(run), losses_and_norms(serial), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def pixels(run_dir):
    return np.asarray(Image.open(Path(run_dir) / "samples.png")).astype(int)


@pytest.fixture(scope="module")
def serial(ranks, photos, cache, tmp_path_factory):
    config = settings(photos, cache, tmp_path_factory.mktemp("serial"))
    ranks.run(1, train_in_rank, config)
    return config


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        (GridSizes(1, 2, 2), ()),
        full(GridSizes(2, 2, 2), ()),
        full(GridSizes(2, 2, 1, 2), ("parallel.chunks=2", "optim.shard_states=true")),
        full(GridSizes(1, 2, 2), ("train.activation_checkpointing=full", "train.micro_batch_size=2")),
        full(GridSizes(2, 1, 2, 2), (*CACHED, "parallel.replicated_layers=2")),
    ],
    ids=str,
)
def test_a_run_on_a_grid_equals_the_serial_run_and_sends_the_planned_bytes(ranks, tiny, serial, sizes, overrides):
    config = tiny(*on_grid(sizes), *overrides)
    ranks.run(sizes.devices, train_in_rank, config)
    assert_losses(config, serial)
    assert bytes_sent(config.run.dir) == bytes_planned(config, sizes)
    assert np.abs(pixels(config.run.dir) - pixels(serial.run.dir)).max() <= 1
    ours, theirs = (event(run.run.dir, "validation")["loss"] for run in (config, serial))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("devices", [full(2), full(6)])
def test_a_run_over_stages_equals_the_serial_run(ranks, tiny, serial, devices):
    grids = ["parallel.pipeline.stage_grids=[2x1x1x2,1x2x1x1]"] if devices == 6 else []
    config = tiny("parallel.pipeline.stages=2", *grids)
    ranks.run(devices, train_in_rank, config)
    assert_losses(config, serial)
    assert np.abs(pixels(config.run.dir) - pixels(serial.run.dir)).max() <= 1
    links = validate(config, devices).link_bytes
    assert {name: nbytes for name, nbytes in bytes_sent(config.run.dir).items() if name in links} == links


def tensors(run_dir, prefix):
    files = Checkpoint.open(Path(run_dir)).files
    return {name: files.global_tensor(name) for name in files.tensors if name.startswith(prefix)}


def test_averages_continue_on_another_grid_and_follow_the_weights(ranks, tiny, serial):
    """Three steps on four ranks and three on one rank give the averages of six steps on one device."""
    sizes, first = GridSizes(2, 1, 2), ("train.steps=3", "optim.schedule_steps=6")
    ranks.run(4, train_in_rank, split := tiny(*on_grid(sizes), *first))
    assert bytes_sent(split.run.dir) == bytes_planned(split, sizes)
    config = tiny("optim.schedule_steps=6")
    ranks.run(1, train_in_rank, config)
    assert_losses(config, serial)
    ours, theirs = (tensors(run.run.dir, "extra.average.") for run in (config, serial))
    assert ours.keys() == theirs.keys() and len(ours) == len(tensors(serial.run.dir, "model."))
    for name, average in theirs.items():
        assert (ours[name] - average).norm() <= 1e-3 * average.norm(), name  # AdamW amplifies rounding at first
    weight, average = (tensors(serial.run.dir, f"{kind}.blocks.0.first.weight") for kind in ("model", "extra.average"))
    (weight,), (average,) = weight.values(), average.values()
    assert 0 < (weight - average).abs().max() < 0.1


def test_generate_writes_the_pictures_that_the_run_ended_with(serial, tmp_path, capsys):
    out = tmp_path / "pictures.png"
    generate.main([f"checkpoint={serial.run.dir}", f"out={out}", "images=4", "steps=3"])
    assert np.abs(np.asarray(Image.open(out)).astype(int) - pixels(serial.run.dir)).max() <= 1
    with pytest.raises(ConfigError, match="out=…: missing"):
        generate.main([f"checkpoint={serial.run.dir}", "prompt=a"])


def test_an_exported_model_predicts_the_same_in_diffusers_and_comes_back_unchanged(serial, tmp_path):
    from diffusers import UNet2DModel

    checkpoint = Checkpoint.open(Path(serial.run.dir))
    exporter.export(checkpoint, tmp_path / "exported", weights="raw")
    theirs = UNet2DModel.from_pretrained(tmp_path / "exported" / "unet").eval()
    ours, weights = build_model(serial.model, GridSizes(), torch.float32), tensors(serial.run.dir, "model.")
    noisy, timesteps = torch.randn(2, SIZE, SIZE, 3), torch.tensor([3, 40])
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[f"model.{name}"])
        expected = ours(noisy, timesteps, torch.arange(2))
        assert expected.abs().max() > 0.1
        assert torch.allclose(theirs(noisy.movedim(-1, 1), timesteps).sample.movedim(1, -1), expected, atol=1e-5)
    alone = {"timesteps": 1000, "noise_schedule": "cosine", "prediction": "epsilon"}
    for folder, diffusion in (("", {}), ("unet", alone)):  # a pipeline, or its model alone
        run = tmp_path / f"imported{folder}"
        model = importer.import_model(str(tmp_path / "exported" / folder), run)
        assert model == replace(serial.model, name=model.name, **diffusion)
        imported = tensors(run, "model.")
        assert imported.keys() == weights.keys()
        assert all(torch.equal(imported[name], weight) for name, weight in weights.items())


def test_an_exported_pipeline_draws_the_samples_of_the_run(serial, tmp_path, monkeypatch):
    from diffusers import DDIMPipeline
    from diffusers.pipelines.ddim import pipeline_ddim

    main(["export", f"checkpoint={serial.run.dir}", f"out={tmp_path / 'exported'}"])
    generate.main([f"checkpoint={serial.run.dir}", f"out={tmp_path / 'ours.png'}", "images=4", "steps=5"])
    process = DiffusionProcess("cosine", 50, "epsilon")
    noise = process.sampling_noise(0, torch.arange(4), (SIZE, SIZE, 3)).movedim(-1, 1)
    monkeypatch.setattr(pipeline_ddim, "randn_tensor", lambda *_, **__: noise)
    pipeline = DDIMPipeline.from_pretrained(tmp_path / "exported")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(4, num_inference_steps=5, use_clipped_model_output=True, output_type="np").images
    save_images((images * 255).round().astype(np.uint8), tmp_path / "theirs.png")
    ours, theirs = (np.asarray(Image.open(tmp_path / f"{name}.png")).astype(int) for name in ("ours", "theirs"))
    assert np.abs(ours - theirs).max() <= 1 and ours.std() > 10


@pytest.mark.parametrize("steps", [10, 50, 1000])
@pytest.mark.parametrize(("schedule", "prediction"), [("linear", "epsilon"), ("cosine", "v")])
def test_the_exported_scheduler_has_the_noise_of_the_training(schedule, steps, prediction):
    from diffusers import DDIMScheduler

    config = UNetConfig(noise_schedule=schedule, timesteps=steps, prediction=prediction)
    theirs, ours = DDIMScheduler.from_config(unet.scheduler_to_hf(config)), DiffusionProcess(schedule, steps, "v")
    assert torch.allclose(theirs.alphas_cumprod.double(), ours.alpha_bars, rtol=2e-5, atol=1e-9)
    theirs.set_timesteps(5)
    assert theirs.timesteps.tolist() == ours.sampling_timesteps(5)
    assert UNetConfig(**unet.scheduler_from_hf("source", unet.scheduler_to_hf(config))) == config


def test_a_scheduler_with_another_diffusion_is_rejected():
    for values in (
        {"beta_schedule": "sigmoid"}, {"beta_schedule": "linear", "beta_end": 0.5}, {"prediction_type": "sample"},
        {"rescale_betas_zero_snr": True}, {"trained_betas": [0.1]}, {"_class_name": "PNDMScheduler"},
        {"timestep_spacing": "linspace"}, {"thresholding": True}, {"clip_sample_range": 0},
    ):  # fmt: skip
        with one_line(r"source: \w+=.* is not supported; use a model with"):
            unet.scheduler_from_hf("source", unet.scheduler_to_hf(UNetConfig()) | values)


def test_mistakes_are_one_line_with_a_remedy(tiny):
    for override, message in (
        ("data=sotu", "data.source=sotu: text, but model=unet_tiny trains on images; use data=blue_marble"),
        ("model.image_size=9", "model.image_size=9: cannot be halved 1 times; use a multiple of 2"),
        ("model.groups=3", "model.groups=3: does not divide the 16 channels of blocks.0; use one of 1, 2, 4"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel=true: splits the tokens of a text"),
        ("logging.sample_steps=51", "logging.sample_steps=51: more than model.timesteps=50; lower it"),
        ("parallel.gy=8", "parallel.gy=8: does not divide the attention heads of blocks.2=4; use one of 1, 2, 4"),
        ("model.noise_schedule=sigmoid", "model.noise_schedule=sigmoid: use one of cosine, linear"),
    ):
        with one_line(message):
            validate(tiny(override), 8)
