"""U-Nets for diffusion after Nichol & Dhariwal, with or without attention at every level. No torch here."""

from gpt4d.config import Config, ConfigError, check_at_least, divisors
from gpt4d.config.fields import LARGEST_COUNT
from gpt4d.model.family import Family
from gpt4d.model.unet import hugging_face
from gpt4d.model.unet.config import UNetConfig, blocks
from gpt4d.model.unet.model import describe


def _check(config: Config) -> None:
    model = config.model
    assert isinstance(model, UNetConfig)
    if not model.multipliers:
        raise ConfigError("model.multipliers=[]: each level needs one; use [1, 2, 2, 2], for example")
    check_at_least("model.blocks_per_level·levels", model.blocks_per_level * len(model.multipliers), 1, LARGEST_COUNT)
    if model.channels % 2:
        raise ConfigError(f"model.channels={model.channels}: odd; use an even number, half sines and half cosines")
    halvings = 2 ** (len(model.multipliers) - 1)
    if model.image_size % halvings:
        raise ConfigError(
            f"model.image_size={model.image_size}: cannot be halved {len(model.multipliers) - 1} times; use a multiple "
            f"of {halvings}, or fewer model.multipliers"
        )
    sizes = [model.image_size >> level for level in range(len(model.multipliers))]
    for size in model.attention_at:
        if size not in sizes:
            raise ConfigError(
                f"model.attention_at={model.attention_at}: no level has images of size {size}; use some of "
                f"{', '.join(map(str, sizes))}"
            )
    _check_channels(model)
    for key, value in (("train.seq_len", config.train.seq_len), ("parallel.context", config.parallel.context)):
        if value != 1:
            raise ConfigError(f"{key}={value}: an image has no tokens; leave it out")
    if config.train.loss_chunks != 1:
        raise ConfigError(f"train.loss_chunks={config.train.loss_chunks}: an image has no logits; use 1")
    if config.train.precision == "fp8":
        raise ConfigError(
            "train.precision=fp8: multiplies matrices, and most products of a U-Net are convolutions; use "
            "train.precision=bf16"
        )
    if config.parallel.sequence_parallel:
        raise ConfigError(
            "parallel.sequence_parallel=true: splits the tokens of a text, and a U-Net has none; use false, or "
            "parallel.chunks for the overlap of sums"
        )


def _check_channels(model: UNetConfig) -> None:
    """Check that groups and heads divide the channels of every block."""
    for block in blocks(model):
        for channels in (sum(block.in_channels), block.output.channels):
            if block.kind == "residual" and channels % model.groups:
                raise ConfigError(
                    f"model.groups={model.groups}: does not divide the {channels} channels of {block.name}; use one of "
                    f"{', '.join(map(str, divisors(model.channels)))}"
                )
        if block.attention and block.output.channels % model.head_size:
            raise ConfigError(
                f"model.head_size={model.head_size}: does not divide the {block.output.channels} channels of "
                f"{block.name}; use one of {', '.join(map(str, divisors(model.channels)))}"
            )


FAMILY = Family(
    name="unet",
    config=UNetConfig,
    task="diffusion",
    unit="images",
    check=_check,
    describe=describe,
    adapter=hugging_face,
)
