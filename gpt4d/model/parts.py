"""Parts of a model, of which a stage of a pipeline computes some. No torch here."""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """Consecutive layers of a model, which a model chunk of a stage computes."""

    begins: bool  # has the layers before the blocks, which take the batch
    blocks: Sequence[int]  # indices of its blocks among the model's
    ends: bool  # has the layers behind the blocks, which compute the loss
