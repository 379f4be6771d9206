"""The 4D paper's two performance models (§V, Eq. 1-10) as published: seconds of communication only.

They count the products of blocks: the four fully connected layers of a transformer block, the convolutions of a U-Net.
They omit embedding and head, norms and biases, latency, computation and overlap. The planner's own model includes them.
For experts, rows travel over z in place of weights, which the paper does not treat.
"""

import math

from gpt4d.config import Config, GridSizes
from gpt4d.model.description import Description
from gpt4d.model.probe import Product
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.planner.device import sent_bytes
from gpt4d.planner.topology import group_bandwidth, paper_bandwidths
from gpt4d.planner.workload import all_reduced_bytes, compute_bytes


def weight_bytes(
    product: Product, samples: float, sizes: GridSizes, element: int, gradient: int
) -> dict[str, dict[str, float]]:
    """Return the bytes that a rank sends for one product along z and data, by axis and collective (Eq. 4-8).

    Args:
        product: a product of m·k, m·n and k·n elements in the paper's notation.
        samples: number of samples per data-parallel group.
        sizes: the grid.
        element: bytes per element of activations and gathered weights.
        gradient: bytes per element of weight gradients.
    """
    weight = product.weight / math.prod(getattr(sizes, axis) for axis in product.split if axis is not None)
    if product.exchanged:
        # y splits the rows' features, as it splits the residual stream.
        rows = sent_bytes("reduce_scatter", sizes.z, samples * product.exchanged / (sizes.z * sizes.y) * element)
        over_z = {"forward": rows, "backward": rows}
    else:
        over_z = {
            "all_gather": sent_bytes("all_gather", sizes.z, weight / sizes.z * element),
            "reduce_scatter": sent_bytes("reduce_scatter", sizes.z, weight * gradient),
        }
    return {"z": over_z, "data": {"all_reduce": sent_bytes("all_reduce", sizes.data, weight / sizes.z * gradient)}}


def communication(config: Config, description: Description, sizes: GridSizes, aware: bool) -> dict[str, float]:
    """Return the seconds of a step along each axis (Eq. 9, summed over layers), with Eq. 10's bandwidths if ``aware``.

    Activation checkpointing repeats the forward's collectives, except the all-gathers of cached weights.
    """
    samples, element = config.train.batch_size / sizes.data, compute_bytes(config)
    recompute = config.train.activation_checkpointing == "full"
    cached = description.cached_units(config.parallel.cache_layers)
    summed = all_reduced_bytes(config, description, sizes)
    sent = {"x": summed["x"], "y": summed["y"], "z": 0.0, "data": 0.0}
    for block in description.blocks:
        for product in description.probe.products(block, config.train.seq_len):
            for axis, kinds in weight_bytes(product, samples, sizes, element, MASTER_BYTES).items():
                for kind, nbytes in kinds.items():
                    repeated = kind == "forward" or (kind == "all_gather" and block.name not in cached)
                    sent[axis] += nbytes * (2 if recompute and repeated else 1)
    if aware:
        beta = paper_bandwidths(config.cluster, sizes, config.parallel.rank_order)
    else:
        beta = dict.fromkeys(sent, group_bandwidth(config.cluster.levels[0], 2))
    return {axis: nbytes / 1e9 / beta[axis] for axis, nbytes in sent.items()}
