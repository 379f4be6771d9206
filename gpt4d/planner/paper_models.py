"""The 4D paper's two performance models (§V, Eq. 1-10) as published: seconds of communication only.

They count the products of blocks: the four fully connected layers of a transformer block, the convolutions of a U-Net.
They omit embedding and head, norms and biases, latency, computation and overlap. The planner's own model includes them.
For experts, rows travel over z in place of weights, which the paper does not treat.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from gpt4d.config import Config, GridSizes
from gpt4d.model.description import Description
from gpt4d.model.probe import Product
from gpt4d.parallel.stage_plan import strides
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.planner.device import sent_bytes
from gpt4d.planner.topology import group_bandwidth, node_size
from gpt4d.planner.workload import compute_bytes, product_tflops, step_flops


def products(description: Description, length: int, cached: Collection[str] = ()) -> list[tuple[Product, int, int]]:
    """Return the products of blocks, each with its number of blocks and its number of blocks in ``cached``."""
    blocks = Counter(block.kind for block in description.blocks)
    kept = Counter(block.kind for block in description.blocks if block.name in cached)
    first = {block.kind: block for block in reversed(description.blocks)}
    return [
        (product, n, kept[kind])
        for kind, n in blocks.items()
        for product in description.probe.products(first[kind], length)
    ]


def bandwidths(
    sizes: GridSizes, node: int, inter: float, intra: float, rank_order: str | None = None
) -> dict[str, float]:
    """Return each axis's bandwidth (Eq. 10) in the unit of ``inter`` and ``intra``, on nodes of ``node`` devices."""
    return {
        axis: intra if inner * getattr(sizes, axis) <= node else inter / min(node, inner)
        for axis, inner in strides(sizes, rank_order).items()
    }


def product_bytes(
    product: Product, samples: float, sizes: GridSizes, element: int, gradient: int
) -> dict[str, dict[str, float]]:
    """Return the bytes that a rank sends for one product, by axis and collective (Eq. 4-8).

    Args:
        product: a product of m·k, m·n and k·n elements in the paper's notation.
        samples: number of samples per data-parallel group.
        sizes: the grid.
        element: bytes per element of activations and gathered weights.
        gradient: bytes per element of weight gradients.
    """
    contracted, produced = (1 if axis is None else getattr(sizes, axis) for axis in product.split)
    weight = product.weight / (contracted * produced)
    output = sent_bytes("all_reduce", contracted, samples * product.output / (sizes.z * produced) * element)
    of_input = sent_bytes("all_reduce", produced, samples * product.input / (sizes.z * contracted) * element)
    if product.exchanged:
        # y splits the rows' features, as it splits the residual stream.
        rows = sent_bytes("reduce_scatter", sizes.z, samples * product.exchanged / (sizes.z * sizes.y) * element)
        over_z = {"forward": rows, "backward": rows}
    else:
        over_z = {
            "all_gather": sent_bytes("all_gather", sizes.z, weight / sizes.z * element),
            "reduce_scatter": sent_bytes("reduce_scatter", sizes.z, weight * gradient),
        }
    along = {product.split.contracted: {"forward": output}, product.split.produced: {"backward": of_input}}
    return {
        "z": over_z,
        **{axis: kinds for axis, kinds in along.items() if axis is not None},
        "data": {"all_reduce": sent_bytes("all_reduce", sizes.data, weight / sizes.z * gradient)},
    }


def busy_s(config: Config, description: Description, sizes: GridSizes) -> float:
    """Return the seconds of a step for computation and for all-reduces of outputs without overlap.

    Without ``parallel.rank_order``, the ranks have the faster order.
    """
    parallel = config.parallel
    orders = [parallel.rank_order] if parallel.rank_order or 1 in (sizes.x, sizes.y) else ["xy", "yx"]
    configs = [replace(config, parallel=replace(parallel, rank_order=order)) for order in orders]
    comms = [communication(one, description, sizes, aware=True) for one in configs]
    return step_flops(config, description) / sizes.devices / (product_tflops(config) * 1e12) + min(
        comm["x"] + comm["y"] for comm in comms
    )


def communication(config: Config, description: Description, sizes: GridSizes, aware: bool) -> dict[str, float]:
    """Return the seconds of a step along each axis (Eq. 9, summed over layers), with Eq. 10's bandwidths if ``aware``.

    Activation checkpointing repeats the forward's collectives, except the all-gathers of cached weights.
    """
    e, cluster = compute_bytes(config), config.cluster
    samples, length = config.train.batch_size / sizes.data, config.train.seq_len
    recompute = config.train.activation_checkpointing == "full"
    cached = description.cached_units(config.parallel.cache_layers)
    sent = dict.fromkeys(sizes._asdict(), 0.0)
    for product, blocks, kept in products(description, length, cached):
        for axis, kinds in product_bytes(product, samples, sizes, e, MASTER_BYTES).items():
            for kind, nbytes in kinds.items():
                sent[axis] += nbytes * blocks
                if recompute and kind == "forward":
                    sent[axis] += nbytes * blocks
                if recompute and kind == "all_gather":
                    sent[axis] += nbytes * (blocks - kept)
    outer, inner = cluster.levels[0], cluster.levels[-1]
    inter = group_bandwidth(outer, 2)
    intra = group_bandwidth(inner, 2)
    rank_order = config.parallel.rank_order
    beta = bandwidths(sizes, node_size(cluster), inter, intra, rank_order) if aware else dict.fromkeys(sent, inter)
    return {axis: nbytes / 1e9 / beta[axis] for axis, nbytes in sent.items()}
