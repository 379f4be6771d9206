"""The settings of a U-Net for diffusion, its blocks in the order of execution, and the tensors that they pass on.

Level 0 has the full image size. Axis y splits the channels of even levels, and axis x splits the channels of odd
levels. A residual block changes the axis twice, a change of level once. So encoder and decoder agree at every level.
No torch here.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpt4d.config import COUNT, FRACTION, SIZE, ModelConfig, redefined, setting
from gpt4d.config.conditions import with_base

INPUT, EMBEDDING = "input", "embedding"


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
    unstructured = ModelConfig.unstructured | {"dropout", "clip_range", "timestep_spacing", "base_channels"}


class Activation(NamedTuple):
    """An activation [samples, size, size, channels] that a unit passes on, and the axis that splits its channels."""

    name: str
    channels: int
    size: int
    axis: str


class UNetBlock(NamedTuple):
    """A residual block, with attention or without, or a change of level.

    Attributes:
        name: prefix of its parameters, and name of its output.
        kind: residual block, downsampling or upsampling.
        stream: the output of the previous unit.
        skip: an output of the encoder that is concatenated to the stream.
        output: the tensor that it produces.
        attention: whether attention follows the convolutions.
    """

    name: str
    kind: Literal["residual", "down", "up"]
    stream: Activation
    skip: Activation | None
    output: Activation
    attention: bool

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of the input tensors."""
        skip = (self.skip.name,) if self.skip else ()
        return (self.stream.name, *skip, *((EMBEDDING,) if self.kind == "residual" else ()))

    @property
    def outer(self) -> str:
        """The axis that splits the channels of its input."""
        return self.stream.axis

    @property
    def inner(self) -> str:
        """The axis that splits the channels of its first convolution's output."""
        return other_axis(self.stream.axis)

    @property
    def in_channels(self) -> tuple[int, ...]:
        """Channels of the stream and, for a block with a skip, of the skip."""
        return (self.stream.channels, *((self.skip.channels,) if self.skip else ()))


def other_axis(axis: str) -> str:
    """Return y for x, and x for y."""
    return "x" if axis == "y" else "y"


def embedding_size(config: UNetConfig) -> int:
    """Return the features of the time embedding."""
    return 4 * config.channels


def first_tensor(config: UNetConfig) -> Activation:
    """Return the output of the first convolution."""
    return _tensor(config, INPUT, config.channels, 0)


def _tensor(config: UNetConfig, name: str, channels: int, level: int) -> Activation:
    return Activation(name, channels, config.image_size >> level, "yx"[level % 2])


def blocks(config: UNetConfig) -> list[UNetBlock]:
    """Return the blocks of the encoder, the two middle blocks, and the blocks of the decoder."""
    widths = [config.channels * multiplier for multiplier in config.multipliers]
    last, skips, found = len(widths) - 1, [first_tensor(config)], list[UNetBlock]()

    def add(kind, level: int, attention: bool = False, skip: Activation | None = None, channels: int = 0) -> Activation:
        name, stream = f"blocks.{len(found)}", found[-1].output if found else skips[0]
        output = _tensor(config, name, channels or widths[level], level)
        found.append(UNetBlock(name, kind, stream, skip, output, attention))
        return output

    attended = [config.image_size >> level in config.attention_at for level in range(len(widths))]
    for level, width in enumerate(widths):
        skips += [add("residual", level, attended[level]) for _ in range(config.blocks_per_level)]
        if level < last:
            skips.append(add("down", level + 1, channels=width))
    add("residual", last, attention=True)
    add("residual", last)
    for level, width in reversed([*enumerate(widths)]):
        for _ in range(config.blocks_per_level + 1):
            add("residual", level, attended[level], skips.pop())
        if level:
            add("up", level - 1, channels=width)
    return found
