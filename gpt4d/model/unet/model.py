"""A U-Net for diffusion, written like a serial model: its layers determine the sharding. No torch here.

Shapes: B images, S height and width, C channels of this rank, E features of the time embedding, T pixels of all images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from gpt4d.config import Divisibility
from gpt4d.model.description import Description
from gpt4d.model.parts import EdgeTensor, ModelSpec, Part, Tensors, units_of
from gpt4d.model.unet.config import (
    EMBEDDING,
    INPUT,
    Activation,
    UNetBlock,
    UNetConfig,
    blocks,
    embedding_size,
    first_tensor,
    other_axis,
)
from gpt4d.parallel.engine.interleave import Node, run_alone, run_graph
from gpt4d.parallel.kernels import Tensor
from gpt4d.parallel.layers.activations import DropoutSpec
from gpt4d.parallel.layers.attention import FusedAttentionSpec
from gpt4d.parallel.layers.conv import Conv2dSpec
from gpt4d.parallel.layers.embedding import ScaleShiftSpec, TimeEmbeddingSpec
from gpt4d.parallel.layers.group_norm import GroupNormSpec
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec, LayersSpec
from gpt4d.parallel.layers.linear import LinearSpec, concatenate
from gpt4d.parallel.layers.loss import squared_error
from gpt4d.parallel.layers.product import cast_to, mapped
from gpt4d.parallel.layers.sequence import TokenIndex, tokens_of
from gpt4d.parallel.layers.sharding import Axes, interleaved_pieces
from gpt4d.parallel.layout import Layout


@dataclass(frozen=True)
class PixelAttentionSpec(LayerSpec):
    """Attention of each pixel to all pixels of its image, added to the residual stream."""

    config: UNetConfig
    stream: Activation

    def layers(self) -> dict[str, LayerSpec]:
        c, heads = self.stream.channels, self.stream.channels // self.config.head_size
        outer, inner = self.stream.axis, other_axis(self.stream.axis)
        return {
            "norm": norm(self.config, (c,), outer),
            "qkv": LinearSpec(c, c, num_fused=3, axes=Axes(outer, inner), heads=heads),
            "core": FusedAttentionSpec(heads, causal=False, stream=outer),
            "output": LinearSpec(c, c, transposed=True, axes=Axes(inner, outer), std=0.0, heads=heads),
        }

    async def forward(self, layer: BoundLayer, x_BSSC: Tensor, pixels: TokenIndex) -> Tensor:
        normal_TC = mapped(layer.norm(x_BSSC), lambda normal_BSSC: normal_BSSC.flatten(0, 2))
        attended_TC = await layer.output(await layer.core(await layer.qkv(normal_TC), pixels))
        return x_BSSC + attended_TC.view_as(x_BSSC)


@dataclass(frozen=True)
class ResidualBlockSpec(LayerSpec):
    """Two convolutions, where the time embedding scales and shifts the second input; then attention, if any."""

    config: UNetConfig
    block: UNetBlock

    def layers(self) -> dict[str, LayerSpec]:
        config, block, output = self.config, self.block, self.block.output
        wide, channels, outer, inner = sum(block.in_channels), output.channels, block.outer, block.inner
        layers: dict[str, LayerSpec] = {}
        if wide != channels:
            layers["shortcut"] = Conv2dSpec(wide, channels, 1, Axes(outer, None), scatter_output=True)
        layers |= {
            "first_norm": norm(config, block.in_channels, outer, activates=True),
            "first": Conv2dSpec(wide, channels, 3, Axes(outer, inner), padding=1),
            "second_norm": norm(config, (channels,), inner, activates=True),
            "time": ScaleShiftSpec(embedding_size(config), channels, inner),
            "dropout": DropoutSpec(config.dropout, inner),
            "second": Conv2dSpec(channels, channels, 3, Axes(inner, outer), padding=1, std=0.0),
        }
        if block.attention:
            layers["attention"] = PixelAttentionSpec(config, output)
        return layers

    async def forward(self, layer: BoundLayer, x_BSSC: Tensor, *rest: Any) -> Tensor:
        """Return the stream after the block. ``rest``: the skip, if the block has one, the embedding, the samples."""
        *skip, embedding_BE, samples = rest
        block = self.block
        pixels = replace(samples, length=block.output.size**2)
        if skip:
            x_BSSC = concatenate([x_BSSC, *skip], block.in_channels)
        changes = sum(block.in_channels) != block.output.channels
        shortcut_BSSC = await layer.shortcut(x_BSSC) if changes else x_BSSC
        h_BSSC = await layer.first(layer.first_norm(x_BSSC))
        normal_BSSC = layer.second_norm(h_BSSC, *await layer.time(embedding_BE))
        if layer.current_pass.records:
            normal_BSSC = mapped(normal_BSSC, partial(_dropped, layer.dropout, pixels))
        x_BSSC = shortcut_BSSC + await layer.second(normal_BSSC)
        return await layer.attention(x_BSSC, pixels) if block.attention else x_BSSC


def _dropped(dropout: Any, pixels: TokenIndex, h_BSSC: Tensor) -> Tensor:
    return dropout.spec.drop(dropout, h_BSSC.flatten(0, 2), pixels).view_as(h_BSSC)


@dataclass(frozen=True)
class LevelChangeSpec(LayerSpec):
    """A convolution with stride 2, or a convolution of an image upsampled by 2."""

    block: UNetBlock

    def layers(self) -> dict[str, LayerSpec]:
        block, (stride, upsampling) = self.block, (2, 1) if self.block.kind == "down" else (1, 2)
        channels, axes = (block.stream.channels, block.output.channels), Axes(block.outer, block.inner)
        return {"conv": Conv2dSpec(*channels, 3, axes, stride=stride, padding=1, upsampling=upsampling)}

    async def forward(self, layer: BoundLayer, x_BSSC: Tensor, samples: TokenIndex) -> Tensor:
        return await layer.conv(x_BSSC)


def norm(config: UNetConfig, channels: tuple[int, ...], axis: str, activates: bool = False) -> GroupNormSpec:
    """Return the norm over the channels of one or several activations, which ``axis`` splits."""
    return GroupNormSpec(config.groups, channels, axis, config.norm_epsilon, activates)


@dataclass(frozen=True)
class UNetSpec(ModelSpec):
    """A U-Net, or parts of one."""

    config: UNetConfig
    parts: tuple[Part, ...] = ()

    @cached_property
    def blocks(self) -> list[UNetBlock]:
        """All blocks of the model."""
        return blocks(self.config)

    def layers(self) -> dict[str, LayerSpec]:
        config, first, last = self.config, first_tensor(self.config), self.blocks[-1].output
        layers: dict[str, LayerSpec] = {}
        if any(part.begins for part in self.parts):
            layers["time"] = TimeEmbeddingSpec(config.channels, embedding_size(config))
            # The input images are replicated over x and y.
            axes = Axes(None, first.axis)
            layers["input"] = Conv2dSpec(config.image_channels, first.channels, 3, axes, padding=1, group="embeddings")
        layers["blocks"] = LayersSpec({str(i): self.block(i) for part in self.parts for i in part.blocks})
        if any(part.ends for part in self.parts):
            layers["norm"] = norm(config, (last.channels,), last.axis, activates=True)
            axes = Axes(last.axis, None)
            layers["output"] = Conv2dSpec(
                last.channels, config.image_channels, 3, axes, padding=1, std=0.0, group="head"
            )
        return layers

    def block(self, index: int) -> LayerSpec:
        """Return one of the blocks."""
        block = self.blocks[index]
        return ResidualBlockSpec(self.config, block) if block.kind == "residual" else LevelChangeSpec(block)

    def forward(self, model: BoundLayer, x_BSSC: Tensor, timesteps_B: Tensor, sample_ids_B: Tensor) -> Tensor:
        """Return the prediction [B, S, S, image channels] of a full model for noised images ``x_BSSC``.

        Args:
            model: the layer of this spec.
            x_BSSC: this rank's images, [B, S, S, image channels].
            timesteps_B: their timesteps, [B].
            sample_ids_B: their indices in the run, which dropout depends on.
        """
        (part,) = self.parts
        return self.compute(model, part, {}, x_BSSC, timesteps_B, sample_ids_B)["prediction"]

    def compute(
        self,
        model: BoundLayer,
        part: Part,
        received: Mapping[str, Tensor],
        x_BSSC: Tensor,
        timesteps_B: Tensor,
        sample_ids_B: Tensor,
        targets_BSSC: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the tensors that a part produces for later parts; from the last part ``loss`` or ``prediction``.

        The loss of an image is the mean squared error of its elements. It is summed over this rank's images.

        Args:
            model: the layer of this spec.
            part: one of ``parts``.
            received: the tensors that earlier parts have produced for this one.
            x_BSSC: as for ``forward``; the first part uses it.
            timesteps_B: as for ``forward``; the first part uses it.
            sample_ids_B: as for ``forward``.
            targets_BSSC: the targets, which the last part uses. None: the last part returns the prediction.
        """
        tensors = dict(received)
        if part.begins:
            tensors[EMBEDDING] = run_alone(model.time(timesteps_B))
            tensors[INPUT] = run_alone(model.input(cast_to(x_BSSC, model.context.compute_dtype)))
        nodes, wanted = self._graph(model, part)
        samples = tokens_of(model, sample_ids_B, length=1)
        produced = run_graph(model, nodes, tensors, wanted, samples)
        if not part.ends:
            return produced
        del tensors
        (x_BSSC,) = produced.values()
        del produced
        prediction = run_alone(model.output(model.norm(x_BSSC)))
        if targets_BSSC is None:
            return {"prediction": prediction}
        return {"loss": squared_error(prediction, targets_BSSC)}

    def planned_batch(self, tensor: Callable[..., Tensor], samples: int, length: int) -> tuple[Tensor, ...]:
        size, channels = self.config.image_size, self.config.image_channels
        images = (samples, size, size, channels)
        numbers = (tensor((samples,), "int64") for _ in range(2))  # timesteps and samples
        return (tensor(images, "float32"), *numbers, tensor(images, "float32"))

    def _graph(self, model: BoundLayer, part: Part) -> tuple[list[Node], list[str]]:
        """Return the blocks of a part, and the names of its tensors that later units use.

        Omitted blocks pass on their input stream, because the planner computes only a few of many equal blocks.
        """
        if not part.blocks:
            return [], [self.blocks[-1].name] if part.ends else [INPUT, EMBEDDING]
        first, stop = part.blocks[0], len(self.blocks) if part.ends else part.blocks[-1] + 1
        passed = {name: name for name in (INPUT, EMBEDDING)} if part.begins else {}
        nodes = []
        for index in range(first, stop):
            block = self.blocks[index]
            if index in part.blocks:
                uses = tuple(passed.get(name, name) for name in block.uses)
                nodes.append(Node(getattr(model.blocks, str(index)), uses, block.name))
            stream = passed.get(block.stream.name, block.stream.name)
            passed[block.name] = block.name if index in part.blocks else stream
        later = [name for block in self.blocks[stop:] for name in block.uses] + [self.blocks[-1].name]
        return nodes, list(dict.fromkeys(passed[name] for name in later if name in passed))


def describe(config: UNetConfig) -> Description:
    """Return the description of a U-Net."""
    all_blocks = blocks(config)
    first, last = first_tensor(config), all_blocks[-1].output
    skips = {block.skip.name for block in all_blocks if block.skip}

    def kind(block: UNetBlock) -> tuple:
        sizes = (tensor and tensor[1:] for tensor in (block.stream, block.skip, block.output))
        return block.kind, *sizes, block.attention, block.name in skips

    units = units_of(
        [kind(block) for block in all_blocks],
        Tensors(produces=(EMBEDDING, INPUT)),
        [Tensors((block.name,), block.uses) for block in all_blocks],
        Tensors(uses=(last.name,)),
    )
    embedding = Layout(("data", "z"), ())
    return Description(
        model=UNetSpec(config).of_parts,
        parts=(units,),
        rules=_rules(config, all_blocks),
        width_exponents={"output.weight": 1},
        tensors={
            EMBEDDING: EdgeTensor(embedding, lambda samples, length: (samples, embedding_size(config))),
            **{tensor.name: _edge(tensor) for tensor in (first, *(block.output for block in all_blocks))},
        },
    )


def _edge(tensor: Activation) -> EdgeTensor:
    def shape(samples: int, length: int) -> tuple[int, ...]:
        return samples, tensor.size, tensor.size, tensor.channels

    return EdgeTensor(Layout(("data", "z"), (), (), (tensor.axis,)), shape)


def _rules(config: UNetConfig, blocks: list[UNetBlock]) -> tuple[Divisibility, ...]:
    """Return the divisibility rules. Both axes split the channels of each level, outside and within its blocks."""
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
