"""Texts that end a generated text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopTexts:
    """Ends texts that contain one of the ``stops`` (gpt4d.task.generation.Ends)."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stops: Sequence[str]):
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        # A token may have no visible character, and the first characters may be parts of one.
        self._longest = 8 + max((len(stop.encode()) for stop in self.stops), default=0)

    def __call__(self, index: int, new: Sequence[int]) -> bool:
        end = self._decoded(new[-self._longest :]) if self.stops else ""
        return any(stop in end for stop in self.stops)

    def text(self, new: Sequence[int]) -> str:
        """Return the text of ids up to the first stop."""
        text = self._decoded(new)
        return text[: min((text.index(stop) for stop in self.stops if stop in text), default=len(text))]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
