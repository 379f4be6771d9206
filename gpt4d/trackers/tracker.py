"""The interface of a tracker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Shows the curves and samples of one run. A restart continues the same curves.

    Steps may decrease: a save in the background is reported some steps after its own.
    """

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each tag."""

    def text(self, tag: str, text: str, step: int) -> None: ...

    def image(self, tag: str, path: Path, step: int) -> None: ...

    def close(self) -> None:
        """Write everything that has been logged."""
