"""A U-Net for diffusion, readable as a serial model: its layers decide where tensors live.

Shapes: B pictures, S height and width, C channels of this rank, E features of the time embedding, T pixels of all
pictures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.model.description import Part
from gpt4d.model.unet import structure
from gpt4d.model.unet.config import UNetConfig
from gpt4d.model.unet.description import (
    attention_specs,
    input_spec,
    level_change,
    norm_spec,
    output_spec,
    residual_specs,
)
from gpt4d.model.unet.structure import EMBEDDING, INPUT, Block, Tensor
from gpt4d.parallel.chunks import Node, run_graph
from gpt4d.parallel.layers.attention import AttentionCore, head_split
from gpt4d.parallel.layers.concatenation import concatenate
from gpt4d.parallel.layers.dropout import DropoutSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.time_embedding import ScaleShift, TimeEmbedding
from gpt4d.parallel.layers.tokens import Tokens, tokens_of
from gpt4d.parallel.recomputation import recomputable
from gpt4d.parallel.turns import run_alone
from gpt4d.parallel.weights import WeightStream


class Attention(nn.Module):
    """Attention of each pixel to all pixels of its picture, added to the stream."""

    def __init__(self, config: UNetConfig, weights: WeightStream, stream: Tensor):
        super().__init__()
        specs = attention_specs(config, stream)
        self.norm = Layer(specs.norm, weights)
        self.qkv = Layer(specs.qkv, weights)
        self.core = AttentionCore(specs.heads, 0.0, head_split(specs.heads, weights, stream.axis), causal=False)
        self.output = Layer(specs.output, weights)

    async def forward(self, x_BSSC: torch.Tensor, pixels: Tokens) -> torch.Tensor:
        normal_TC = self.norm(x_BSSC).flatten(0, 2)
        attended_TC = await self.output(self.core.of_fused(await self.qkv(normal_TC), pixels))
        return x_BSSC + attended_TC.view_as(x_BSSC)


class ResidualBlock(nn.Module):
    """Two convolutions, the second one's input scaled and shifted by the time embedding; then attention, if any."""

    def __init__(self, config: UNetConfig, weights: WeightStream, block: Block):
        super().__init__()
        self.block, self.weights = block, weights
        specs, channels, inner = residual_specs(config, block), block.output.channels, block.inner
        self.shortcut = Layer(specs.shortcut, weights) if specs.shortcut else None
        self.first_norm = Layer(specs.first_norm, weights)
        self.first = Layer(specs.first, weights)
        self.second_norm = Layer(specs.second_norm, weights)
        self.time = ScaleShift(weights, structure.embedding_size(config), channels, inner)
        self.dropout = Layer(DropoutSpec(config.dropout, inner), weights)
        self.second = Layer(specs.second, weights)
        self.attention = Attention(config, weights, block.output) if block.attention else None

    async def forward(self, x_BSSC: torch.Tensor, *rest) -> torch.Tensor:
        """Return the stream after the block. ``rest``: the skip, if it takes one, the embedding, and the samples."""
        *skip, embedding_BE, samples = rest
        pixels = replace(samples, length=self.block.output.size**2)
        if skip:
            x_BSSC = concatenate([x_BSSC, *skip], self.block.in_channels)
        shortcut_BSSC = x_BSSC if self.shortcut is None else await self.shortcut(x_BSSC)
        h_BSSC = await self.first(recomputable(self.weights, F.silu, self.first_norm(x_BSSC)))
        h_BSSC = await self.time(self.second_norm(h_BSSC), embedding_BE)
        x_BSSC = shortcut_BSSC + await self.second(recomputable(self.weights, partial(self._activated, pixels), h_BSSC))
        return x_BSSC if self.attention is None else await self.attention(x_BSSC, pixels)

    def _activated(self, pixels: Tokens, h_BSSC: torch.Tensor) -> torch.Tensor:
        return self.dropout(F.silu(h_BSSC).flatten(0, 2), pixels).view_as(h_BSSC)


class LevelChange(nn.Module):
    """A convolution with stride 2, or one of a picture enlarged by 2."""

    def __init__(self, weights: WeightStream, block: Block):
        super().__init__()
        self.conv = Layer(level_change(block), weights)

    async def forward(self, x_BSSC: torch.Tensor, samples: Tokens) -> torch.Tensor:
        return await self.conv(x_BSSC)


class UNet(nn.Module):
    """A U-Net, or parts of one, on the grid of ``weights``.

    Its values are not set until ``gpt4d.model.init.initialize``.
    """

    def __init__(self, config: UNetConfig, weights: WeightStream, parts: Sequence[Part]):
        super().__init__()
        self.config, self.weights, self.parts = config, weights, parts
        self.all_blocks = structure.blocks(config)
        last = self.all_blocks[-1].output
        if any(part.begins for part in parts):
            self.time = TimeEmbedding(weights, config.channels, structure.embedding_size(config))
            self.input = Layer(input_spec(config), weights)
        self.blocks = nn.ModuleDict(
            {str(index): self._build(self.all_blocks[index]) for part in parts for index in part.blocks}
        )
        if any(part.ends for part in parts):
            self.norm = Layer(norm_spec(config, (last.channels,), last.axis), weights)
            self.output = Layer(output_spec(config), weights)

    def _build(self, block: Block) -> nn.Module:
        if block.kind == "residual":
            return ResidualBlock(self.config, self.weights, block)
        return LevelChange(self.weights, block)

    def forward(self, x_BSSC: torch.Tensor, timesteps_B: torch.Tensor, sample_ids_B: torch.Tensor) -> torch.Tensor:
        """Return the prediction [B, S, S, image channels] of a whole model for noisy pictures ``x_BSSC``.

        Args:
            x_BSSC: this rank's pictures, [B, S, S, image channels].
            timesteps_B: how noisy they are, [B].
            sample_ids_B: their indices in the whole run, which dropout depends on.
        """
        (part,) = self.parts
        (prediction,) = self.compute(part, {}, x_BSSC, timesteps_B, sample_ids_B).values()
        return prediction

    def compute(
        self,
        part: Part,
        received: Mapping[str, torch.Tensor],
        x_BSSC: torch.Tensor,
        timesteps_B: torch.Tensor,
        sample_ids_B: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that a part produces for later parts, or the last part's ``prediction``.

        Args:
            part: one of ``parts``.
            received: what earlier parts have produced for this one.
            x_BSSC: as for ``forward``; the first part uses it.
            timesteps_B: as for ``forward``; the first part uses it.
            sample_ids_B: as for ``forward``.
        """
        tensors, wanted = dict(received), self._wanted(part)
        if part.begins:
            tensors[EMBEDDING] = run_alone(self.time(timesteps_B))
            tensors[INPUT] = run_alone(self.input(x_BSSC.to(self.weights.compute_dtype)))
        nodes = [
            Node(self.blocks[str(index)], self.all_blocks[index].uses, self.all_blocks[index].name)
            for index in part.blocks
        ]
        samples = tokens_of(self.weights, sample_ids_B, length=1)
        produced = run_graph(self.weights, nodes, tensors, wanted, samples)
        if not part.ends:
            return produced
        (x_BSSC,) = produced.values()
        return {"prediction": run_alone(self.output(F.silu(self.norm(x_BSSC))))}

    def _wanted(self, part: Part) -> list[str]:
        """Return the names of the tensors that exist after a part, its own or received, and that later units use."""
        last = part.blocks.stop
        exist = {INPUT, EMBEDDING, *(block.name for block in self.all_blocks[part.blocks.start : last])}
        if not part.begins:
            exist -= {INPUT, EMBEDDING}
        later = [name for block in self.all_blocks[last:] for name in block.uses] + [self.all_blocks[-1].name]
        return [name for name in dict.fromkeys(later) if name in exist]
