"""The settings of a U-Net for diffusion."""

from dataclasses import dataclass, field

from gpt4d.config import ModelConfig


@dataclass
class UNetConfig(ModelConfig):
    """A U-Net after Nichol & Dhariwal, and the diffusion that it is trained for."""

    name: str = "unet_tiny"
    image_size: int = 32  # height and width of the pictures
    image_channels: int = 3  # 3: RGB, 1: gray
    channels: int = 32  # of the first level
    multipliers: list[int] = field(default_factory=lambda: [1, 2, 2, 2])  # of `channels` at each level
    blocks_per_level: int = 3  # residual blocks of the encoder; the decoder has one more
    attention_at: list[int] = field(default_factory=lambda: [16, 8])  # sizes at which blocks end with attention
    head_size: int = 32  # channels of an attention head
    groups: int = 32  # of GroupNorm
    dropout: float = 0.0  # in each residual block
    norm_epsilon: float = 1e-5
    timesteps: int = 1000  # of the diffusion
    noise_schedule: str = "cosine"  # or linear
    prediction: str = "epsilon"  # what the model predicts: the noise, or the velocity v
