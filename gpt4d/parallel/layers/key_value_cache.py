"""The key-value cache of generation. With it, each forward computes only the new tokens."""

from dataclasses import dataclass, field

import torch
from torch import nn

from gpt4d.parallel.layers.documents import Documents


@dataclass(eq=False)
class KeyValueCache:
    """The keys and values of each attention layer on this rank, and the positions of the current forward's tokens.

    Keys are stored at the indices of their tokens. Keys of padding after a text are overwritten when the text reaches
    them, and no earlier token attends to them. ``begin`` describes the tokens of a forward.

    In the forward of a prompt, the ranks of ``parallel.context`` may have segments of each text. They gather the keys
    and values, and each rank stores them all.

    Attributes:
        capacity: maximum number of tokens of a text.
        places: [texts, tokens]: index of each token in its text.
        key_places: [texts, tokens of all ranks that share a text]: index of each new key in its text.
        positions: [texts, tokens]: position of each token in its document.
        mask: [texts, 1, tokens, capacity]: True for the indices that each token attends to.
    """

    capacity: int
    places: torch.Tensor = field(init=False)
    key_places: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    mask: torch.Tensor = field(init=False)
    _cached: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether this rank computes all new tokens of its texts."""
        return self.places.shape == self.key_places.shape

    def begin(
        self,
        places: torch.Tensor,
        positions: torch.Tensor,
        documents: Documents | None = None,
        key_places: torch.Tensor | None = None,
    ) -> None:
        """Begin a forward.

        Args:
            places: index of each token in its text, [texts, tokens].
            positions: position of each token in its document, [texts, tokens].
            documents: the documents of the texts, [texts, capacity]; None if each text is one document.
            key_places: as for the attribute; None if this rank has complete texts.
        """
        self.places, self.positions = places, positions
        self.key_places = places if key_places is None else key_places
        keys = torch.arange(self.capacity, device=places.device)
        mask = keys <= places[..., None]
        if documents is not None:
            mask &= documents.indices.gather(1, places)[..., None] == documents.indices[:, None]
        self.mask = mask[:, None]

    def extend(self, layer: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [texts, tokens, heads, size] and return the cached, [texts, capacity, heads, size]."""
        if layer not in self._cached:
            shape = (k.shape[0], self.capacity, *k.shape[2:])
            self._cached[layer] = k.new_zeros(shape), v.new_zeros(shape)
        texts = torch.arange(len(k), device=k.device)[:, None]
        for cached, new in zip(self._cached[layer], (k, v), strict=True):
            cached[texts, self.key_places] = new
        return self._cached[layer]
