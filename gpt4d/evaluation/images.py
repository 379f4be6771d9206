"""Fréchet distance of generated images to real images: on features of Inception-v3 (FID), otherwise on patches.

The package torch-fidelity (``pip install 'gpt4d[fid]'``) has the network of the original FID. Its weights are read from
a local file and never downloaded.
"""

import importlib.util
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError, DataConfig
from gpt4d.data.images import ImageFiles, image_files
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.consensus import all_gather_json, run_on_all_ranks, run_on_rank0
from gpt4d.runtime.errors import one_line
from gpt4d.task.diffusion import generated_images
from gpt4d.task.patch_statistics import FeatureStatistics, frechet_distance, patch_statistics
from gpt4d.task.task import Artifact

WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS}"
_FEATURES = 2048
_MAX_REAL = 50_000  # maximum number of real images, as in the original FID
_AT_ONCE = 64  # number of images that are generated together, and whose features are computed together

Features = Callable[[torch.Tensor], torch.Tensor]  # from images, uint8 [n, 3, height, width], to [n, features]


def evaluate(
    stage: Stage, real: np.ndarray, count: int, steps: int = 50, seed: int = 0, inception: str | None = None
) -> Artifact:
    """Return the distance of ``count`` generated images to ``real`` images, uint8 [n, size, size, channels].

    All ranks call it together and get the same result. Raises ConfigError on all ranks if ``inception`` is set and
    cannot be used.

    Args:
        stage: the stage of a trained diffusion model on this rank.
        real: images of the size of the model.
        count: number of images to generate.
        steps: number of DDIM steps for each image.
        seed: seed of the images.
        inception: file of the network's weights; None: the file in torch's cache, and without it patches.
    """
    real = real[:_MAX_REAL]
    generated = _generated(stage, count, steps, seed)
    compared = f"{count:,} generated images and {len(real):,} real images"
    values: dict[str, Any] = {"images": count, "real_images": len(real)}
    reason = run_on_all_ranks(lambda: _unusable(inception), "looking for Inception-v3")
    reasons = all_gather_json(reason, "looking for Inception-v3")
    if missing := next(filter(None, reasons), None):
        images = np.concatenate([*generated])
        distance = frechet_distance(patch_statistics(images), patch_statistics(real))
        message = f"no FID: {missing}\nFréchet distance of patches between {compared}: {distance:.4f}"
        return Artifact(message, {"frechet": distance, **values})
    features = run_on_all_ranks(
        lambda: inception_features(_weights_file(inception), stage.weights.device), "loading Inception-v3"
    )
    batches = (real[first : first + _AT_ONCE] for first in range(0, len(real), _AT_ONCE))
    distance = fid(features, generated, batches, stage)
    message = f"FID between {compared}: {distance:.4f}"
    if min(count, len(real)) < _FEATURES:
        message += f"; fewer images than {_FEATURES:,} features, so compare it with equal numbers of images only"
    return Artifact(message, {"fid": distance, **values})


def training_images(checkpoint: Checkpoint) -> np.ndarray:
    """Return the training images of the run that has saved a checkpoint, uint8 [n, size, size, channels].

    All ranks call it together. Rank 0 prepares images that are not in the cache. Raises ConfigError on all ranks if the
    run's configuration is missing, or if the images cannot be read.
    """
    path, model = checkpoint.path.resolve().parent.parent / "config.yaml", checkpoint.meta.model
    settings: Any = model  # the settings of a family of images

    def prepare() -> tuple[str, dict]:
        if not path.is_file():
            raise ConfigError(
                f"checkpoint={checkpoint.path}: {path} is missing, which names the images; use a checkpoint of a run"
            )
        stored: Any = OmegaConf.load(path)
        data: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), stored.data))
        files = image_files(data, settings.image_size, settings.image_channels)
        return str(files.directory), files.header

    directory, header = run_on_rank0(prepare, "preparing the images")
    return run_on_all_ranks(lambda: ImageFiles(Path(directory), header).array("train"), "opening the images")


def fid(features: Features, generated: Iterator[np.ndarray], real: Iterator[np.ndarray], stage: Stage) -> float:
    """Return the Fréchet distance of features between batches of images. Each rank computes its share of each batch."""
    one, other = (_statistics(features, batches, stage) for batches in (generated, real))
    return frechet_distance(one, other)


def _statistics(features: Features, batches: Iterator[np.ndarray], stage: Stage) -> FeatureStatistics:
    """Return mean and covariance of the features of all images, as numpy.cov does, from sums in float64."""
    world, device = stage.grid.world, stage.weights.device
    sums = torch.zeros((), dtype=torch.float64, device=device)
    for batch in batches:
        share = batch[world.index :: world.size]
        images = torch.from_numpy(np.ascontiguousarray((share if len(share) else batch[:1]).transpose(0, 3, 1, 2)))
        if images.shape[1] == 1:  # gray
            images = images.expand(-1, 3, -1, -1)
        with torch.no_grad():
            values = features(images.to(device))[: len(share)].double()
        values = torch.cat((torch.ones_like(values[:, :1]), values), 1)
        sums = sums + values.T @ values  # the first row: the number of images, and the sums of the features
    sums = world.all_reduce(sums).cpu()
    count, totals, products = sums[0, 0], sums[0, 1:], sums[1:, 1:]
    mean = totals / count
    covariance = (products - count * mean.outer(mean)) / (count - 1)
    return FeatureStatistics(mean.numpy(), covariance.numpy())


def inception_features(path: Path, device: torch.device) -> Features:
    """Return the function from images to the 2,048 features of the network. Raises ConfigError for other weights."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    try:
        torch.load(path, map_location="cpu", weights_only=True)  # rejects code, which the package's own load executes
        network = FeatureExtractorInceptionV3("inception-v3-compat", [str(_FEATURES)], str(path)).to(device)
    except (OSError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise ConfigError(f"inception={path}: not these weights ({one_line(error)}); download {URL}") from None
    return lambda images: network(images)[0]


def _unusable(inception: str | None) -> str | None:
    """Return why FID cannot be computed, and the remedy; None if it can be. Raises ConfigError if it is asked for."""
    path, reason = _weights_file(inception), None
    if not path.is_file():
        reason = f"{path}: no such file; download {URL} to it"
    elif importlib.util.find_spec("torch_fidelity") is None:
        reason = "the package torch-fidelity is not installed; run pip install 'gpt4d[fid]'"
    if reason and inception is not None:
        raise ConfigError(f"inception={inception}: {reason}")
    return reason


def _weights_file(inception: str | None) -> Path:
    return Path(inception).expanduser() if inception else Path(torch.hub.get_dir(), "checkpoints", WEIGHTS)


def _generated(stage: Stage, count: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    for first in range(0, count, _AT_ONCE):
        yield generated_images(stage, min(_AT_ONCE, count - first), steps, seed, first)
