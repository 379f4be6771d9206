"""The batch that a task yields and a training step consumes."""

from typing import Any, NamedTuple

import torch


class Counts(NamedTuple):
    """Numbers of units of some samples: ``trained`` units have a loss, ``unpadded`` ones are no padding."""

    trained: int
    unpadded: int


class Batch(NamedTuple):
    """Inputs, targets and sample ids of one microbatch; the first dim of every tensor is the microbatch.

    ``inputs`` maps the names of the model's inputs to tensors or their metadata. A task without targets sets
    ``targets`` to None. ``sample_ids`` [microbatch] contains the global index of each sample in the run. If ``masked``,
    tokens with a negative target have no loss. ``sources`` [microbatch] contains the index of each sample's source in a
    blend; None if their losses are not reported.
    """

    inputs: dict[str, Any]
    targets: torch.Tensor | None
    sample_ids: torch.Tensor
    masked: bool = False
    sources: torch.Tensor | None = None
