"""TensorBoard: event files in run.dir/tensorboard."""

import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

from gpt4d.config import Config


class TensorBoardTracker:
    """Writes one file of events per start. TensorBoard joins all files of the directory."""

    def __init__(self, config: Config, run_dir: Path, run_id: str):
        from torch.utils.tensorboard import SummaryWriter

        _hide_errors_of_writers()
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def text(self, tag: str, text: str, step: int) -> None:
        # TensorBoard shows Markdown, in which an indented block is literal text.
        self._writer.add_text(tag, textwrap.indent(text, "    ", lambda line: True), step)

    def image(self, tag: str, path: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(tag, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


def _hide_errors_of_writers() -> None:
    """Print no traceback of the writer's thread: its next call raises the error, which costs one warning."""
    show = threading.excepthook

    def show_others(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            show(arguments)

    threading.excepthook = show_others
