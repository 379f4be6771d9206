"""The Fréchet distance of patches is exact, and smaller between images than between images and noise."""

import numpy as np
import pytest

from gpt4d.config import DataConfig
from gpt4d.data.images import image_files
from gpt4d.task import patch_statistics as module
from gpt4d.task.patch_statistics import PatchStatistics, frechet_distance, patch_statistics


def random_pictures(count, seed=0, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 12, channels), np.uint8)


def test_statistics_are_those_of_the_patches_one_by_one(monkeypatch):
    pictures = random_pictures(5)
    patches = [
        picture[top : top + 4, left : left + 4].ravel() / 127.5 - 1
        for picture in pictures
        for top in (0, 4)
        for left in (0, 4, 8)
    ]
    whole = patch_statistics(pictures)
    np.testing.assert_allclose(whole.mean, np.mean(patches, 0), atol=1e-12)
    np.testing.assert_allclose(whole.covariance, np.cov(np.transpose(patches), bias=True), atol=1e-12)
    monkeypatch.setattr(module, "IMAGES_AT_ONCE", 2)
    in_parts = patch_statistics(pictures[::-1])
    assert np.array_equal(in_parts.mean, whole.mean) and np.array_equal(in_parts.covariance, whole.covariance)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_equal_pictures_have_distance_zero(count):
    """One or three images have fewer patches than a patch has values: the covariance is singular."""
    pictures = random_pictures(count)
    statistics = patch_statistics(pictures)
    assert frechet_distance(statistics, patch_statistics(pictures[::-1])) == pytest.approx(0, abs=1e-10)


def test_commuting_covariances_have_the_distance_of_the_closed_form():
    """Their roots have the same eigenvectors: |m₁ - m₂|² + Σ (√λ₁ - √λ₂)²."""
    random = np.random.default_rng(0)
    basis, _ = np.linalg.qr(random.normal(size=(12, 12)))
    means, values = random.normal(size=(2, 12)), random.uniform(0, 4, (2, 12))
    values[0, :3] = values[1, 2:5] = 0  # singular
    one, other = (PatchStatistics(mean, basis * value @ basis.T) for mean, value in zip(means, values, strict=True))
    expected = ((means[0] - means[1]) ** 2).sum() + ((values[0] ** 0.5 - values[1] ** 0.5) ** 2).sum()
    assert frechet_distance(one, other) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(other, one) == pytest.approx(expected, rel=1e-10)


def test_noise_has_the_mean_and_the_variance_of_every_channel():
    pictures = random_pictures(400)
    pictures[..., 1] //= 2
    pictures[:, ::4, :, 2] = 9  # rows of patches differ
    values = pictures / 127.5 - 1
    noise = patch_statistics(pictures).of_noise(3)
    np.testing.assert_allclose(noise.mean.reshape(-1, 3), np.tile(values.mean((0, 1, 2)), (16, 1)), atol=1e-12)
    np.testing.assert_allclose(noise.covariance, np.diag(np.tile(values.var((0, 1, 2)), 16)), atol=1e-12)


def test_halves_of_real_pictures_are_nearer_to_each_other_than_to_noise(tmp_path):
    pictures = image_files(DataConfig("earth", "blue_marble", cache_dir=str(tmp_path)), 32, 3).array("train")
    one, other = patch_statistics(pictures[::2]), patch_statistics(pictures[1::2])
    halves, noise = frechet_distance(one, other), frechet_distance(one, other.of_noise(3))
    print(f"distance of the halves {halves:.5f}, to noise {noise:.3f}")
    assert 0 < halves < noise / 100
