"""A U-Net without torch: its units in the order of execution, what they pass on, what the grid must divide."""

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
from gpt4d.parallel.layers.specs import Axes, interleaved_pieces
from gpt4d.parallel.layout import Layout

_KERNEL, _PADDING = (3, 3), (1, 1)


def describe(config: UNetConfig) -> Description:
    """Return the description of a U-Net."""
    blocks = structure.blocks(config)
    first, last = structure.first_tensor(config), blocks[-1].output
    skips = {block.skip.name for block in blocks if block.skip}
    picture = (config.image_size, config.image_size)
    into, out_of = Axes(None, first.axis), Axes(last.axis, None)
    # Equal blocks share one cost.
    costs: dict[tuple, BlockCost] = {}

    def cost(block: Block) -> BlockCost:
        kind = (block.kind, *(tensor and tensor[1:] for tensor in (block.stream, block.skip, block.output)))
        key = (*kind, block.attention, block.name in skips)
        if key not in costs:
            costs[key] = _block(config, block, fork=block.name in skips)
        return costs[key]

    conv_in = Conv2dCost(
        "input", config.image_channels, first.channels, _KERNEL, picture, into, padding=_PADDING, input_gradient=False
    )
    conv_out = Conv2dCost("output", last.channels, config.image_channels, _KERNEL, picture, out_of, padding=_PADDING)
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
            Unit("", _norm(config, "norm", last), uses=(last.name,)),
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


def _norm(config: UNetConfig, name: str, tensor: Tensor, branch: bool = False) -> GroupNormCost:
    return GroupNormCost(name, (tensor.channels,), config.groups, tensor.size**2, tensor.axis, branch)


def _silu(tensor: Tensor) -> ActivationCost:
    return ActivationCost(tensor.channels, tensor.channels, tensor.axis, tensor.size**2)


def _block(config: UNetConfig, block: Block, fork: bool) -> BlockCost:
    """Return the cost of a block; ``fork``: its output is a skip too."""
    out, outer, inner = block.output, block.outer, block.inner
    forked = ForkCost(out.channels, out.size**2, out.axis) if fork else None
    size = (block.stream.size, block.stream.size)
    if block.kind != "residual":
        stride, upsampling = ((2, 2), 1) if block.kind == "down" else ((1, 1), 2)
        conv = Conv2dCost(
            "conv", block.stream.channels, out.channels, _KERNEL, size, Axes(outer, inner), stride, _PADDING, upsampling
        )
        return ProductBlock(conv, forked)
    wide = sum(block.in_channels)
    within = out._replace(axis=inner)
    before, between = ActivationCost(wide, wide, outer, out.size**2), _silu(within)
    first = (
        GroupNormCost("first_norm", block.in_channels, config.groups, out.size**2, outer, branch=True),
        before,
        Conv2dCost("first", wide, out.channels, _KERNEL, size, Axes(outer, inner), padding=_PADDING, source=before),
        _norm(config, "second_norm", within),
        ScaleShiftCost("time", structure.embedding_size(config), out.channels, out.size**2, inner),
        between,
        Conv2dCost(
            "second", out.channels, out.channels, _KERNEL, size, Axes(inner, outer), padding=_PADDING, source=between
        ),
    )
    shortcut = None
    if wide != out.channels:
        shortcut = Conv2dCost("shortcut", wide, out.channels, (1, 1), size, Axes(outer, None), scatter_output=True)
    return ResidualBlock(
        branches=(first, *([_attention(config, out)] if block.attention else [])),
        features=out.channels,
        axis=outer,
        positions=out.size**2,
        concatenation=ConcatenationCost(block.in_channels, out.size**2, outer) if block.skip else None,
        shortcut=shortcut,
        in_features=wide,
        fork=forked,
    )


def _attention(config: UNetConfig, stream: Tensor) -> tuple:
    c, heads, positions = stream.channels, stream.channels // config.head_size, stream.size**2
    outer, inner = stream.axis, other_axis(stream.axis)
    return (
        _norm(config, "attention.norm", stream, branch=True),
        LinearCost("attention.qkv", c, c, num_fused=3, heads=heads, axes=Axes(outer, inner), positions=positions),
        AttentionCost(heads, c, dropout=False, stream=stream.axis, positions=positions),
        LinearCost("attention.output", c, c, True, heads=heads, axes=Axes(inner, outer), positions=positions),
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
