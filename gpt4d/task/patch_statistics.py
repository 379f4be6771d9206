"""Fréchet distance between two sets of images on statistics of their patches.

It is the Fréchet inception distance (Heusel et al.) with the pixels of small patches in place of the features of a
network. It compares local structure and color, is exact, and needs no weights to download.
"""

from dataclasses import dataclass

import numpy as np

PATCH = 4
IMAGES_AT_ONCE = 1024  # bounds the memory of the patches in float64


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean [d] and covariance [d, d] of features, float64."""

    mean: np.ndarray
    covariance: np.ndarray


@dataclass(frozen=True)
class PatchStatistics(FeatureStatistics):
    """The statistics of patches [PATCH, PATCH, channels] with d values from -1 to 1."""

    def of_noise(self, channels: int) -> "PatchStatistics":
        """Return the statistics of Gaussian noise whose channels have the mean and the variance of these images."""
        means = self.mean.reshape(-1, channels)
        variances = np.diag(self.covariance).reshape(-1, channels)
        channel_variances = variances.mean(0) + means.var(0)
        repeats = len(means)
        return PatchStatistics(np.tile(means.mean(0), repeats), np.diag(np.tile(channel_variances, repeats)))


def patch_statistics(images: np.ndarray) -> PatchStatistics:
    """Return the statistics of all disjoint patches of uint8 images [n, height, width, channels].

    Rows and columns beyond a multiple of ``PATCH`` are left out. Sums of integers are exact, so the statistics do not
    depend on the order of the images.
    """
    count, height, width, channels = images.shape
    rows, columns, size = height // PATCH, width // PATCH, PATCH * PATCH * channels
    total = count * rows * columns
    assert images.dtype == np.uint8 and total
    sums, products = np.zeros(size), np.zeros((size, size))
    for start in range(0, count, IMAGES_AT_ONCE):
        part = images[start : start + IMAGES_AT_ONCE, : rows * PATCH, : columns * PATCH]
        patches = part.reshape(-1, rows, PATCH, columns, PATCH, channels).swapaxes(2, 3).reshape(-1, size)
        values = patches.astype(np.float64)
        sums += values.sum(0)
        products += values.T @ values
    mean = sums / total
    covariance = products / total - np.outer(mean, mean)
    return PatchStatistics(mean / 127.5 - 1, covariance / 127.5**2)


def frechet_distance(one: FeatureStatistics, other: FeatureStatistics) -> float:
    """Return |m₁ - m₂|² + tr(C₁ + C₂ - 2·(C₁C₂)^½), which is 0 for equal statistics (Heusel et al., eq. 6).

    The trace of (C₁C₂)^½ is the sum of the singular values of C₁^½·C₂^½, which is defined for singular covariances.
    """
    offset = one.mean - other.mean
    trace = np.trace(one.covariance) + np.trace(other.covariance)
    joint = np.linalg.svd(_root(one.covariance) @ _root(other.covariance), compute_uv=False).sum()
    return float(offset @ offset + trace - 2 * joint)


def _root(covariance: np.ndarray) -> np.ndarray:
    """Return the symmetric square root. Eigenvalues that differ from 0 by rounding only count as 0."""
    values, vectors = np.linalg.eigh(covariance)
    rounding = np.finfo(np.float64).eps * len(values) * values[-1]
    return vectors * np.sqrt(np.where(values > rounding, values, 0)) @ vectors.T
