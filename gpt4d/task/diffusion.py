"""Diffusion: prediction of the noise, or the velocity, of noised images (Ho et al.; Nichol & Dhariwal)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpt4d.config import HELD_OUT, Config, ConfigError, DataConfig, check_image_format
from gpt4d.data.images import ImageFiles, ImageSamples, image_files
from gpt4d.data.loader import Batch, Source
from gpt4d.model.edges import unsharded_batch
from gpt4d.model.parts import Part
from gpt4d.parallel.pipeline.runtime import forward_over_stages
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.consensus import run_on_all_ranks, run_on_rank0
from gpt4d.runtime.files import optional_file, required_file
from gpt4d.task.diffusion_process import DiffusionProcess
from gpt4d.task.generation import exchange_for
from gpt4d.task.patch_statistics import frechet_distance, patch_statistics
from gpt4d.task.reading import ReadingTask
from gpt4d.task.task import Artifact, GenerateConfig

_COMPARED = 10_000  # maximum number of real images in a Fréchet distance


def generate(config: GenerateConfig, files: Mapping[str, bytes], stage: Stage) -> str:
    """Write an image file and return a message (gpt4d.task.registry.TaskEntry)."""
    if config.out is None:
        raise ConfigError("out=…: missing; set it to the name of the image file to write")
    check_image_format("out", config.out)
    images, out = generated_images(stage, config.images, config.steps, config.seed), Path(config.out)

    def save() -> None:
        with required_file(out):
            save_images(images, out)

    run_on_rank0(save, "writing images")
    return f"{config.out}: {config.images} images"


def generated_images(stage: Stage, count: int, steps: int, seed: int = 0, first: int = 0) -> np.ndarray:
    """Return the images from number ``first`` on, uint8 [count, size, size, channels].

    Every rank of the job calls it and gets equal images. Image i depends on ``seed`` and i alone. ``steps``: number of
    DDIM steps.
    """
    model: Any = stage.module
    settings, grid, device = model.spec.config, stage.grid, stage.weights.device
    schedule, prediction, spacing = settings.noise_schedule, settings.prediction, settings.timestep_spacing
    process = DiffusionProcess(schedule, settings.timesteps, prediction, device, spacing)
    shape = settings.image_size, settings.image_size, settings.image_channels
    numbers = torch.arange(first, first + count, device=device)
    exchange = exchange_for(stage, count, 1, unsharded_batch)

    def predict(x: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        def compute(part, received):
            return model.spec.compute(model, part, received, x, timesteps, numbers)

        result = forward_over_stages(stage, exchange, compute)
        # All ranks use one rank's prediction, so that ranks that round differently continue with equal images.
        own = result is not None and grid.index == 0
        prediction = result["prediction"].float() if result is not None and own else torch.zeros_like(x)
        return grid.world.all_reduce(prediction)

    with torch.no_grad():
        x_0 = process.ddim(predict, process.sampling_noise(seed, numbers, shape), steps, settings.clip_range)
    return ((x_0.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu().numpy()


def save_images(images: np.ndarray, path: Path, scale: int = 2, gap: int = 2) -> None:
    """Write images, uint8 [n, size, size, channels], side by side to one image file, enlarged by ``scale``."""
    from PIL import Image

    count, size, _, channels = images.shape
    columns = int(np.ceil(np.sqrt(count)))
    rows, cell = -(-count // columns), size + gap
    sheet = np.full((rows * cell + gap, columns * cell + gap, channels), 255, np.uint8)
    for index, image in enumerate(images):
        top, left = gap + index // columns * cell, gap + index % columns * cell
        sheet[top : top + size, left : left + size] = image
    image = Image.fromarray(sheet.squeeze(-1) if channels == 1 else sheet)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST).save(path)


def _prepare(config: DataConfig, size: int, channels: int) -> tuple[str, dict]:
    files = image_files(config, size, channels)
    return str(files.directory), files.header


class Diffusion(ReadingTask):
    """Diffusion on the images of ``config.data`` (gpt4d.task.task.Task).

    Rank 0 prepares images that are not in the cache; all ranks read them. Raises ConfigError on every rank for data
    that cannot be used. The loss of an image is the mean squared error of its elements.
    """

    def __init__(self, config: Config):
        settings: Any = config.model  # any family with settings of images and of the diffusion
        self.settings, size, channels = settings, settings.image_size, settings.image_channels
        directory, header = run_on_rank0(lambda: _prepare(config.data, size, channels), "preparing the data")
        self._files = ImageFiles(Path(directory), header)
        seed, data = config.train.seed, config.data
        training, held_out = run_on_all_ranks(
            lambda: [self._files.array(split) for split in ("train", "validation")], "opening the data"
        )
        unseen = ImageSamples(held_out, seed, shuffle=False, flip=False) if len(held_out) else None
        super().__init__(config, ImageSamples(training, seed, data.shuffle, data.flip), unseen)

    def connect(self, stage: Stage, micro_batch_size: int) -> None:
        model, device = self.settings, stage.weights.device
        self._process = DiffusionProcess(model.noise_schedule, model.timesteps, model.prediction, device)
        self._reading = self._reads(stage, self._training)
        super().connect(stage, micro_batch_size)

    def _reads(self, stage: Stage, source: Source) -> bool:
        # Stages between the first and the last one need no images.
        return any(part.begins or part.ends for part in stage.parts.values())

    def _batch(self, rows: torch.Tensor, sample_ids: torch.Tensor, held_out: bool = False) -> Batch:
        """Return noised images [B, height, width, channels], their timesteps [B] and the training targets."""
        if not self._reading:
            return Batch({}, None, sample_ids)
        x_0 = rows.to(sample_ids.device, non_blocking=True).float() / 127.5 - 1
        timesteps, noise = self._process.training_noise(
            self.config.train.seed, sample_ids, tuple(x_0.shape[1:]), held_out
        )
        noisy = self._process.add_noise(x_0, noise, timesteps)
        return Batch({"noisy": noisy, "timesteps": timesteps}, self._process.target(x_0, noise, timesteps), sample_ids)

    def compute(
        self, module: nn.Module, part: Part, batch: Batch, received: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        model: Any = module
        noisy, timesteps = batch.inputs.get("noisy"), batch.inputs.get("timesteps")
        return model.spec.compute(model, part, received, noisy, timesteps, batch.sample_ids, batch.targets)

    def sample(self) -> Artifact | None:
        logging = self.config.logging
        if not logging.sample_images:
            return None
        with self.averaged():
            images = generated_images(self._stage, logging.sample_images, logging.sample_steps)
        path = Path(self.config.run.dir) / "samples.png"
        values: dict[str, Any] = {"image": str(path)}
        message = f"{len(images)} samples in {path}"
        if self._stage.grid.world.index == 0:
            with optional_file(path):
                save_images(images, path)
            if HELD_OUT in self._sets:
                distances = self._distances(images)
                values |= distances
                message += (
                    f"; Fréchet distance of patches to held-out images {distances['frechet']:.4f} (Gaussian noise of "
                    f"the same mean and variance: {distances['frechet_of_noise']:.4f}, one half of the training "
                    f"images to the other: {distances['frechet_of_halves']:.4f})"
                )
        return Artifact(message, values)

    def _distances(self, images: Any) -> dict[str, float]:
        """Return Fréchet distances of patches (gpt4d.task.patch_statistics)."""
        real = patch_statistics(self._files.array("validation")[:_COMPARED])
        halves = [patch_statistics(self._files.array("train")[start : 2 * _COMPARED : 2]) for start in (0, 1)]
        return {
            "frechet": frechet_distance(patch_statistics(images), real),
            "frechet_of_noise": frechet_distance(real.of_noise(images.shape[-1]), real),
            "frechet_of_halves": frechet_distance(*halves),
        }

    def summary(self) -> str:
        def count(split: str) -> int:
            return self._files.count(split)

        text = f"{self.config.data.name}: {count('train'):,} images to train on, {count('validation'):,} held out"
        if self.config.train.validation_batches and not self._validates_held_out:
            text += "\nno validation: fewer images are held out than a batch has"
        return text

    def identity(self) -> dict[str, str]:
        return {"data": self.config.data.name, "samples": self._files.header["identity"]}

    def verify(self, run_dir: Path) -> None: ...

    def documents(self) -> dict[str, bytes]:
        return {}
