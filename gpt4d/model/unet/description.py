"""A U-Net without torch: its units in the order of execution, what they pass on, what the grid must divide."""

from typing import NamedTuple

from gpt4d.config import Divisibility
from gpt4d.model.attention_costs import AttentionCost
from gpt4d.model.conv_costs import (
    ConcatenationCost,
    Conv2dCost,
    ForkCost,
    GroupNormCost,
    PicturesCost,
    ScaleShiftCost,
    SquaredErrorCost,
    TimeEmbeddingCost,
)
from gpt4d.model.costs import ActivationCost
from gpt4d.model.description import BlockCost, Description, EdgeTensor, Unit
from gpt4d.model.product_costs import LinearCost
from gpt4d.model.residual import ProductBlock, ResidualBlock
from gpt4d.model.unet import structure
from gpt4d.model.unet.config import UNetConfig
from gpt4d.model.unet.structure import EMBEDDING, INPUT, Block, Tensor, other_axis
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.specs import Axes, interleaved_pieces
from gpt4d.parallel.layout import Layout


def input_spec(config: UNetConfig) -> Conv2dSpec:
    """Return the spec of the first convolution, whose images are replicated over x and y."""
    first = structure.first_tensor(config)
    return Conv2dSpec(config.image_channels, first.channels, 3, Axes(None, first.axis), padding=1)


def output_spec(config: UNetConfig) -> Conv2dSpec:
    """Return the spec of the last convolution."""
    last = structure.blocks(config)[-1].output
    return Conv2dSpec(last.channels, config.image_channels, 3, Axes(last.axis, None), padding=1, std=0.0)


class ResidualSpecs(NamedTuple):
    """The layers of a residual block. ``shortcut``: None if the block does not change the number of channels."""

    shortcut: Conv2dSpec | None
    first_norm: GroupNormSpec
    first: Conv2dSpec
    second_norm: GroupNormSpec
    second: Conv2dSpec


def norm_spec(config: UNetConfig, channels: tuple[int, ...], axis: str) -> GroupNormSpec:
    """Return the spec of a norm over the channels of one or several activations, which ``axis`` splits."""
    return GroupNormSpec(config.groups, channels, axis, config.norm_epsilon)


def residual_specs(config: UNetConfig, block: Block) -> ResidualSpecs:
    """Return the layers of a residual block, except the layers of its attention."""
    wide, channels, outer, inner = sum(block.in_channels), block.output.channels, block.outer, block.inner
    shortcut = Conv2dSpec(wide, channels, 1, Axes(outer, None), scatter_output=True)
    return ResidualSpecs(
        shortcut=shortcut if wide != channels else None,
        first_norm=norm_spec(config, block.in_channels, outer),
        first=Conv2dSpec(wide, channels, 3, Axes(outer, inner), padding=1),
        second_norm=norm_spec(config, (channels,), inner),
        second=Conv2dSpec(channels, channels, 3, Axes(inner, outer), padding=1, std=0.0),
    )


def level_change(block: Block) -> Conv2dSpec:
    """Return the spec of a convolution with stride 2, or of a convolution of an image that is enlarged by 2."""
    stride, upsampling = (2, 1) if block.kind == "down" else (1, 2)
    channels, axes = (block.stream.channels, block.output.channels), Axes(block.outer, block.inner)
    return Conv2dSpec(*channels, 3, axes, stride=stride, padding=1, upsampling=upsampling)


class AttentionSpecs(NamedTuple):
    """The layers before and after the attention of a block, and the number of its heads."""

    heads: int
    norm: GroupNormSpec
    qkv: LinearSpec
    output: LinearSpec


def attention_specs(config: UNetConfig, stream: Tensor) -> AttentionSpecs:
    """Return the layers before and after the attention on a stream."""
    c, heads = stream.channels, stream.channels // config.head_size
    outer, inner = stream.axis, other_axis(stream.axis)
    return AttentionSpecs(
        heads=heads,
        norm=norm_spec(config, (c,), outer),
        qkv=LinearSpec(c, c, num_fused=3, axes=Axes(outer, inner), heads=heads),
        output=LinearSpec(c, c, transposed=True, axes=Axes(inner, outer), std=0.0, heads=heads),
    )


def describe(config: UNetConfig) -> Description:
    """Return the description of a U-Net."""
    blocks = structure.blocks(config)
    first, last = structure.first_tensor(config), blocks[-1].output
    skips = {block.skip.name for block in blocks if block.skip}
    picture = (config.image_size, config.image_size)
    # Equal blocks share one cost.
    costs: dict[tuple, BlockCost] = {}

    def cost(block: Block) -> BlockCost:
        kind = (block.kind, *(tensor and tensor[1:] for tensor in (block.stream, block.skip, block.output)))
        key = (*kind, block.attention, block.name in skips)
        if key not in costs:
            costs[key] = _block(config, block, fork=block.name in skips)
        return costs[key]

    conv_in = Conv2dCost("input", input_spec(config), picture, input_gradient=False)
    conv_out = Conv2dCost("output", output_spec(config), picture)
    return Description(
        units=(
            Unit(
                "time",
                TimeEmbeddingCost(config.channels, structure.embedding_size(config)),
                produces=(EMBEDDING,),
            ),
            Unit("", PicturesCost(config.image_channels, config.image_size**2)),
            Unit("", conv_in, produces=(INPUT,)),
            Unit("", ForkCost(first.channels, first.size**2, first.axis)),
            *(Unit(block.name, cost(block), True, (block.name,), block.uses) for block in blocks),
            Unit(
                "",
                GroupNormCost("norm", norm_spec(config, (last.channels,), last.axis), last.size**2),
                uses=(last.name,),
            ),
            Unit("", _silu(last)),
            Unit("", conv_out),
            Unit("", SquaredErrorCost(config.image_channels, last.size**2)),
        ),
        rules=_rules(config, blocks),
        tensors={
            EMBEDDING: EdgeTensor(
                Layout(("data", "z"), ()), lambda samples, length: (samples, structure.embedding_size(config))
            ),
            **{tensor.name: _edge(tensor) for tensor in (first, *(block.output for block in blocks))},
        },
    )


def _edge(tensor: Tensor) -> EdgeTensor:
    def shape(samples: int, length: int) -> tuple[int, ...]:
        return samples, tensor.size, tensor.size, tensor.channels

    return EdgeTensor(Layout(("data", "z"), (), (), (tensor.axis,)), shape)


def _silu(tensor: Tensor) -> ActivationCost:
    return ActivationCost(tensor.channels, tensor.channels, tensor.axis, tensor.size**2)


def _block(config: UNetConfig, block: Block, fork: bool) -> BlockCost:
    """Return the cost of a block; ``fork``: its output is a skip too."""
    out, outer, inner = block.output, block.outer, block.inner
    forked = ForkCost(out.channels, out.size**2, out.axis) if fork else None
    size = (block.stream.size, block.stream.size)
    if block.kind != "residual":
        return ProductBlock(Conv2dCost("conv", level_change(block), size), forked)
    wide, specs = sum(block.in_channels), residual_specs(config, block)
    within = out._replace(axis=inner)
    before, between = ActivationCost(wide, wide, outer, out.size**2), _silu(within)
    first = (
        GroupNormCost("first_norm", specs.first_norm, out.size**2, branch=True),
        before,
        Conv2dCost("first", specs.first, size, source=before),
        GroupNormCost("second_norm", specs.second_norm, out.size**2),
        ScaleShiftCost("time", structure.embedding_size(config), out.channels, out.size**2, inner),
        between,
        Conv2dCost("second", specs.second, size, source=between),
    )
    return ResidualBlock(
        branches=(first, *([_attention(config, out)] if block.attention else [])),
        features=out.channels,
        axis=outer,
        positions=out.size**2,
        concatenation=ConcatenationCost(block.in_channels, out.size**2, outer) if block.skip else None,
        shortcut=Conv2dCost("shortcut", specs.shortcut, size) if specs.shortcut else None,
        in_features=wide,
        fork=forked,
    )


def _attention(config: UNetConfig, stream: Tensor) -> tuple:
    positions, specs = stream.size**2, attention_specs(config, stream)
    return (
        GroupNormCost("attention.norm", specs.norm, positions, branch=True),
        LinearCost("attention.qkv", specs.qkv, positions=positions),
        AttentionCost(specs.heads, stream.channels, dropout=False, stream=stream.axis, positions=positions),
        LinearCost("attention.output", specs.output, positions=positions),
    )


def _rules(config: UNetConfig, blocks: list[Block]) -> tuple[Divisibility, ...]:
    """Return what the grid must divide. Both axes split the channels of each level, outside and within its blocks."""
    rules = []
    for width in sorted({config.channels * multiplier for multiplier in config.multipliers}):
        rules += [Divisibility("the channels of a level", width, axes) for axes in (("x", "z"), ("y", "z"))]
    for block in blocks:
        if block.skip:
            pieces = interleaved_pieces(block.in_channels)
            name = f"the pieces of the concatenation in {block.name}"
            rules.append(Divisibility(name, pieces, (block.stream.axis,), "or use channels with more common divisors"))
        if block.attention:
            heads = block.output.channels // config.head_size
            name = f"the attention heads of {block.name}"
            rules.append(Divisibility(name, heads, (other_axis(block.output.axis),), "or lower model.head_size"))
    return tuple(dict.fromkeys(rules))
