"""The 4D paper's two performance models (§V, Eq. 1-10) as published: seconds of communication only.

They count the four fully connected layers of each transformer block. They omit embedding and head, norms and biases,
latency, computation and overlap, which the planner's own model includes.
"""

from collections import Counter
from collections.abc import Collection
from typing import cast

from gpt4d.config import Config, GridSizes
from gpt4d.model import registry
from gpt4d.model.costs import MASTER_BYTES
from gpt4d.model.description import Description
from gpt4d.model.product_costs import LinearCost
from gpt4d.model.residual import ResidualBlock
from gpt4d.parallel.plan import strides
from gpt4d.planner.device import sent_bytes
from gpt4d.planner.topology import group_bandwidth, node_size
from gpt4d.planner.workload import compute_bytes, step_flops


def linear_layers(description: Description, cached: Collection[str] = ()) -> list[tuple[LinearCost, int, int]]:
    """Return the blocks' linear layers, each with the number of blocks that have it and of those in ``cached``."""
    blocks = Counter(block.layer for block in description.blocks)
    kept = Counter(block.layer for block in description.blocks if block.name in cached)
    return [(layer, n, kept[block]) for block, n in blocks.items() for layer in cast(ResidualBlock, block).linears]


def bandwidths(
    sizes: GridSizes, node: int, inter: float, intra: float, innermost: str | None = None
) -> dict[str, float]:
    """Return each axis's bandwidth (Eq. 10) in the unit of ``inter`` and ``intra``, on nodes of ``node`` devices."""
    return {
        axis: intra if inner * getattr(sizes, axis) <= node else inter / min(node, inner)
        for axis, inner in strides(sizes, innermost).items()
    }


def layer_bytes(
    m: float, k: int, n: int, transposed: bool, sizes: GridSizes, element: int, gradient: int
) -> dict[str, dict[str, float]]:
    """Return the bytes a rank sends for one layer, by axis and collective (Eq. 4-8).

    ``m``: rows per data-parallel group. ``element``: bytes per element of activations and gathered weights;
    ``gradient``: of weight gradients.
    """
    gx, gy = (sizes.y, sizes.x) if transposed else (sizes.x, sizes.y)
    weight = k * n / (gx * gy)
    along_y = sent_bytes("all_reduce", gy, m * n / (sizes.z * gx) * element)
    along_x = sent_bytes("all_reduce", gx, m * k / (sizes.z * gy) * element)
    y, x = ("x", "y") if transposed else ("y", "x")
    return {
        "z": {
            "all_gather": sent_bytes("all_gather", sizes.z, weight / sizes.z * element),
            "reduce_scatter": sent_bytes("reduce_scatter", sizes.z, weight * gradient),
        },
        y: {"forward": along_y},
        x: {"backward": along_x},
        "data": {"all_reduce": sent_bytes("all_reduce", sizes.data, weight / sizes.z * gradient)},
    }


def busy_s(config: Config, sizes: GridSizes, description: Description) -> float:
    """Return the seconds of a step in which a grid computes and sums outputs, which nothing hides."""
    comm = communication(config, sizes, aware=True)
    return (
        step_flops(config, description) / sizes.devices / (config.cluster.matmul_tflops * 1e12) + comm["x"] + comm["y"]
    )


def communication(config: Config, sizes: GridSizes, aware: bool) -> dict[str, float]:
    """Return the seconds of a step along each axis (Eq. 9, summed over layers), with Eq. 10's bandwidths if ``aware``.

    Activation checkpointing repeats the forward's collectives, except the all-gathers of cached weights.
    """
    e, cluster = compute_bytes(config), config.cluster
    m = config.train.batch_size * config.train.seq_len / sizes.data
    recompute = config.train.activation_checkpointing == "full"
    description = registry.describe(config.model)
    cached = description.cached_units(config.parallel.cache_layers)
    sent = dict.fromkeys(sizes._asdict(), 0.0)
    for layer, blocks, kept in linear_layers(description, cached):
        k, n = layer.in_features, layer.out_features * (layer.num_fused or 1)
        for axis, kinds in layer_bytes(m, k, n, layer.transposed, sizes, e, MASTER_BYTES).items():
            for kind, nbytes in kinds.items():
                sent[axis] += nbytes * blocks
                if recompute and kind == "forward":
                    sent[axis] += nbytes * blocks
                if recompute and kind == "all_gather":
                    sent[axis] += nbytes * (blocks - kept)
    outer, inner = cluster.levels[0], cluster.levels[-1]
    inter = group_bandwidth(outer, 2)
    intra = group_bandwidth(inner, 2)
    innermost = config.parallel.innermost
    beta = bandwidths(sizes, node_size(cluster), inter, intra, innermost) if aware else dict.fromkeys(sent, inter)
    return {axis: nbytes / 1e9 / beta[axis] for axis, nbytes in sent.items()}
