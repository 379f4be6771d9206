"""Parts of a model, the model chunks of pipeline stages. No torch here."""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """Consecutive layers of a model that form a model chunk of a stage."""

    begins: bool  # has the layers before the blocks, which take the batch
    blocks: Sequence[int]  # indices of its blocks in the model
    ends: bool  # has the layers behind the blocks, which compute the loss
