"""Generation of images: a diffusion model denoises them step by step."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt4d.model.edges import unsharded_batch
from gpt4d.parallel.pipeline.runtime import forward_over_stages
from gpt4d.parallel.stage import Stage
from gpt4d.task.diffusion_process import DiffusionProcess
from gpt4d.task.generation import exchange_for


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
            return model.compute(part, received, x, timesteps, numbers)

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
