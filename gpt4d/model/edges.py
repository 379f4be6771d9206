"""The tensors that cross between pipeline stages, from the description of a model."""

from collections.abc import Callable, Mapping, Sequence

import torch

from gpt4d.model.description import Description
from gpt4d.model.parts import EdgeTensor
from gpt4d.parallel.grid import BATCH_AXES
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline.stage_links import Edge


def edges(
    description: Description,
    crossing: Mapping[tuple[int, int], Sequence[str]],
    samples: int,
    length: int,
    compute_dtype: torch.dtype,
    layout_of: Callable[[EdgeTensor], Layout],
) -> list[Edge]:
    """Return the edges between pipeline stages with the tensors of one microbatch.

    Args:
        description: the full model.
        crossing: names of the tensors on each edge (``Description.crossing``).
        samples: number of samples of the microbatch, over all devices.
        length: length of each sample.
        compute_dtype: dtype of activations.
        layout_of: returns the layout of a tensor, such as ``plain``, ``token_split`` or ``unsharded_batch``.
    """
    dtypes = {"activation": compute_dtype, "integer": torch.int64, "mask": torch.bool}
    return [
        Edge(name, source, target, layout_of(tensor), tensor.shape(samples, length), dtypes[tensor.kind])
        for (source, target), names in crossing.items()
        for name, tensor in ((name, description.tensors[name]) for name in names)
    ]


def plain(tensor: EdgeTensor) -> Layout:
    """Return the layout in an evaluation, and in training without ``parallel.sequence_parallel``."""
    return tensor.layout


def token_split(tensor: EdgeTensor) -> Layout:
    """Return the layout in training with ``parallel.sequence_parallel``."""
    return tensor.sequence_parallel or tensor.layout


def unsharded_batch(tensor: EdgeTensor) -> Layout:
    """Return the layout of samples that are replicated on all ranks, as in a generation."""
    return Layout(*(tuple(axis for axis in dim if axis not in BATCH_AXES) for dim in tensor.layout.dims))
