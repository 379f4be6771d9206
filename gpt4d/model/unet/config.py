"""The settings of a U-Net for diffusion."""

from dataclasses import dataclass

from gpt4d.config import COUNT, FRACTION, SIZE, ModelConfig, redefined, setting
from gpt4d.config.conditions import with_base


@dataclass
class UNetConfig(ModelConfig):
    """A U-Net after Nichol & Dhariwal, and the diffusion that it is trained for."""

    name: str = redefined(ModelConfig, "name", "unet_tiny")
    image_size: int = setting(32, "height and width of the images", at_least=1, at_most=16_384)
    image_channels: int = setting(3, "channels of the images: 3 for RGB, 1 for gray", choices=(1, 3))
    channels: int = setting(32, "channels of the first level", **SIZE)
    multipliers: list[int] = setting([1, 2, 2, 2], "channels of each level, as multiples of model.channels", **SIZE)
    blocks_per_level: int = setting(3, "residual blocks of the encoder; the decoder has one more", **COUNT)
    attention_at: list[int] = setting([16, 8], "image sizes at which blocks end with attention")
    head_size: int = setting(32, "channels of an attention head", **SIZE)
    groups: int = setting(32, "groups of GroupNorm", **SIZE)
    dropout: float = setting(0.0, "dropout in each residual block", **FRACTION)
    norm_epsilon: float = setting(1e-5, "addend of the variance in norms", at_least=0, at_most=1)
    timesteps: int = setting(1000, "time steps of the diffusion", **SIZE)
    noise_schedule: str = setting("cosine", "schedule of the noise", choices=("cosine", "linear"))
    prediction: str = setting("epsilon", "output: the noise epsilon or the velocity v", choices=("epsilon", "v"))
    clip_range: float = setting(1.0, "samples: largest absolute value of a predicted image; 0: any", at_least=0)
    timestep_spacing: str = setting(
        "trailing",
        "samples: the last timestep is drawn from (trailing), or the first one (leading)",
        choices=("trailing", "leading"),
    )
    base_channels: int | None = setting(
        None, "optim.width_transfer: channels of the model that the learning rate fits", **SIZE, read_if=with_base
    )
    width_key = "channels"
