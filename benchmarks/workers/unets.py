"""The workload of ``benchmarks.unet``, equal for all workers: a U-Net, noisy pictures and what to predict of them."""

import torch

from gpt4d.model.unet.config import UNetConfig

# As in the 4D paper's experiments, a device has few small pictures and many weights.
MODEL = UNetConfig("benchmark", image_size=16, channels=128, blocks_per_level=1, attention_at=[8, 4], head_size=64)
BATCH = 16
STEPS = 2  # of a turn, so that work that a step defers to the next one is measured


def pictures(share: int, shares: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return noisy pictures [batch / shares, size, size, channels], timesteps, sample ids and targets of a share."""
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, MODEL.image_size, MODEL.image_size, MODEL.image_channels
    noisy, targets = (torch.randn(shape, generator=generator) for _ in range(2))
    timesteps = torch.randint(0, MODEL.timesteps, (BATCH,), generator=generator)
    rows = torch.arange(BATCH).chunk(shares)[share]
    return noisy[rows], timesteps[rows], rows, targets[rows]
