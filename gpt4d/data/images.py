"""Image files: a corpus as two uint8 arrays [n, size, size, channels], memory-mapped.

A directory contains ``train.npy``, ``validation.npy`` and, written last, ``header.json`` with counts, size, channels
and identity.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt4d.config import HEADER, ConfigError, DataConfig
from gpt4d.data import image_sources
from gpt4d.data.directory import in_cache, write_once
from gpt4d.data.parts import SPLITS
from gpt4d.data.sampler import Order, random_bits
from gpt4d.data.sources import is_held_out
from gpt4d.runtime import activity
from gpt4d.runtime.files import sync, write_file

FORMAT = 1
_REPORT_INTERVAL_S = 2.0


class ImageSamples:
    """Images [n, height, width, channels] as the samples of a run, each epoch in a different order.

    With ``flip``, half of the samples are mirrored left to right. Order and mirroring are functions of the seed and the
    sample id.
    """

    def __init__(self, array: np.ndarray, seed: int, shuffle: bool, flip: bool):
        self.array, self.seed, self.flip = array, seed, flip
        self.count = len(array)
        self.row_shape: tuple[int, ...] = array.shape[1:]
        self.order = Order(self.count, seed, shuffle)

    def rows(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the samples as an array [n, height, width, channels] in the files' dtype, uint8."""
        rows = self.array[self.order.positions(sample_ids)]
        if self.flip:
            mirrored = random_bits(sample_ids, self.seed, "flip")
            rows[mirrored] = rows[mirrored, :, ::-1]
        return rows


@dataclass(frozen=True)
class ImageFiles:
    """A directory of image files; ``open`` checks that they are complete."""

    directory: Path
    header: dict

    @classmethod
    def open(cls, directory: Path) -> "ImageFiles":
        """Return the files of a directory. Raises ConfigError, naming the file, if one is missing or damaged."""
        path = directory / HEADER
        try:
            files = cls(directory, json.loads(path.read_bytes()))
            if files.header["format"] != FORMAT:
                raise ValueError(f"format {files.header['format']}, this version reads {FORMAT}")
            size, channels = files.header["size"], files.header["channels"]
            for split in SPLITS:
                path, expected = files._path(split), (files.count(split), size, size, channels)
                if (shape := files._load(split).shape) != expected:
                    raise ValueError(f"shape {shape} instead of {expected}")
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: missing or damaged ({error}); remove {directory}, and the next start prepares it again"
            ) from None
        return files

    def array(self, split: str) -> np.ndarray:
        """Return the images of a split: uint8 [n, size, size, channels], read from the file on access.

        Raises ConfigError on a node that does not have the file.
        """
        try:
            return self._load(split)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: {error.strerror} on {socket.gethostname()}; use a file system that all nodes share"
            ) from None

    def count(self, split: str) -> int:
        """Return the number of images of a split."""
        return self.header["counts"][split]

    def _path(self, split: str) -> Path:
        return self.directory / f"{split}.npy"

    def _load(self, split: str) -> np.ndarray:
        return np.load(self._path(split), mmap_mode="r").view(np.ndarray)  # indexing a plain array is faster


def image_files(config: DataConfig, size: int, channels: int) -> ImageFiles:
    """Return the images of ``data``, in size × size pixels, and prepare them unless they are in the cache.

    ``channels`` is 1 for gray or 3 for RGB. One rank calls it, and all ranks open the returned files. Raises
    ConfigError for images that cannot be read, and if there are no images to train on.
    """
    with activity.unlimited():  # it may ask the hub
        facts = (FORMAT, image_sources.identity(config, size, channels), config.validation_fraction)
    identity = hashlib.sha256(repr(facts).encode()).hexdigest()
    directory = in_cache(config, identity)

    def report(text: str) -> None:
        print(f"{directory}: {text}", flush=True)

    write_once(directory, lambda partial: _write(config, size, channels, identity, partial, report), report)
    return ImageFiles.open(directory)


def _write(
    config: DataConfig, size: int, channels: int, identity: str, directory: Path, on_progress: Callable[[str], None]
) -> None:
    """Write all images and the header. Raises ConfigError if there is no image to train on."""
    for path in directory.iterdir():
        path.unlink()  # belongs to an interrupted preparation
    shape = (size, size, channels)
    with ExitStack() as stack:
        files = {split: stack.enter_context(_NewArray(directory / f"{split}.npy", shape)) for split in SPLITS}
        next_report = time.monotonic() + _REPORT_INTERVAL_S
        for image in image_sources.images(config, size, channels):
            held_out = is_held_out(image.tobytes(), config.validation_fraction)
            files["validation" if held_out else "train"].append(image)
            if time.monotonic() >= next_report:
                next_report += _REPORT_INTERVAL_S
                on_progress(f"{sum(file.count for file in files.values()):,} images")
        counts = {split: file.count for split, file in files.items()}
        if not counts["train"]:
            source = f"data.source={config.source}, data.path={config.path!r}"
            if counts["validation"]:
                raise ConfigError(f"{source}: every image is held out; set data.validation_fraction=0")
            raise ConfigError(f"{source}: there is no image of {size}×{size} pixels to train on; add images")
    header = {"format": FORMAT, "identity": identity, "counts": counts, "size": size, "channels": channels}
    write_file(directory / HEADER, json.dumps(header, indent=1).encode())
    sync(directory)


class _NewArray:
    """Writer of a .npy file of uint8 arrays of one shape. The number of arrays is known only at the end.

    It is a context manager: on exit without an error the file is complete and flushed to disk.
    """

    def __init__(self, path: Path, shape: tuple[int, ...]):
        self.file = open(path, "xb")  # noqa: SIM115 – closed by __exit__
        self.shape, self.count = shape, 0
        self._write_header()

    def __enter__(self) -> "_NewArray":
        return self

    def append(self, array: np.ndarray) -> None:
        assert array.dtype == np.uint8 and array.shape == self.shape
        self.file.write(array.tobytes())
        self.count += 1

    def __exit__(self, kind, *_) -> None:
        with self.file:
            if kind is None:
                self.file.seek(0)
                self._write_header()
                self.file.flush()
                os.fsync(self.file.fileno())

    def _write_header(self) -> None:
        """Write the header, whose length does not depend on the count: NumPy leaves space for any number."""
        header = {"descr": "|u1", "fortran_order": False, "shape": (self.count, *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, header)
