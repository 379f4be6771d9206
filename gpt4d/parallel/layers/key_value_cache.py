"""Keys and values of texts that a model continues, so that each forward computes new tokens alone."""

from dataclasses import dataclass, field

import torch
from torch import nn

from gpt4d.parallel.layers.documents import Documents


@dataclass(eq=False)
class KeyValueCache:
    """The keys and values of each attention here, and where the tokens of the current forward belong.

    Keys are in the places of their tokens: those of padding behind a text are overwritten when the text reaches them,
    and no earlier token attends to them. ``begin`` describes the tokens of a forward.

    Attributes:
        capacity: most tokens of a text.
        places: [texts, tokens]: place of each token in its text.
        positions: [texts, tokens]: position of each token in its document.
        mask: [texts, 1, tokens, capacity]: the places that each token attends to.
    """

    capacity: int
    places: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    mask: torch.Tensor = field(init=False)
    _kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def begin(self, places: torch.Tensor, positions: torch.Tensor, documents: Documents | None = None) -> None:
        """Begin a forward.

        Args:
            places: place of each token in its text, [texts, tokens].
            positions: its position in its document.
            documents: the documents of the texts, [texts, capacity]; None for texts of one.
        """
        self.places, self.positions = places, positions
        keys = torch.arange(self.capacity, device=places.device)
        mask = keys <= places[..., None]
        if documents is not None:
            mask &= documents.indices.gather(1, places)[..., None] == documents.indices[:, None]
        self.mask = mask[:, None]

    def extend(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [texts, tokens, heads, size] of ``layer``. Return those of all positions."""
        if layer not in self._kept:
            shape = (k.shape[0], self.capacity, *k.shape[2:])
            self._kept[layer] = k.new_zeros(shape), v.new_zeros(shape)
        texts = torch.arange(len(k), device=k.device)[:, None]
        for whole, new in zip(self._kept[layer], (k, v), strict=True):
            whole[texts, self.places] = new
        return self._kept[layer]
