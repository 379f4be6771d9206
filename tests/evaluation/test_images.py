"""FID equals its formula in float64 on every plan, and patches replace it without the network's weights."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import ConfigError, GridSizes
from gpt4d.data.images import image_files
from gpt4d.evaluation import images as module
from gpt4d.evaluation.images import evaluate, fid, inception_features, training_images
from gpt4d.parallel.grid import Grid
from gpt4d.task.diffusion import generated_images
from gpt4d.task.patch_statistics import frechet_distance, patch_statistics
from tests.support.checkpoints import meta
from tests.support.grids import full, on_grid
from tests.support.settings import configured
from tests.support.stages import own_stage

UNET = [
    "model=unet_tiny", "model.image_size=8", "model.channels=16", "model.multipliers=[1,2]", "model.blocks_per_level=1",
    "model.attention_at=[4]", "model.head_size=8", "model.groups=4", "model.timesteps=50", "train.batch_size=8",
    "train.precision=fp32",
]  # fmt: skip


def random_images(count, seed, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (count, 8, 8, channels), np.uint8)


def features(images):
    """Return 9 features of images, uint8 [n, 3, 8, 8], in place of the network's."""
    assert images.dtype == torch.uint8 and images.shape[1:] == (3, 8, 8)
    weight = torch.randn(192, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (images.flatten(1).double() / 255 @ weight).square().float()


def expected_distance(one, other):
    """Return the distance by the formula of the paper."""
    values = [features(torch.from_numpy(each.transpose(0, 3, 1, 2))).double().numpy() for each in (one, other)]
    (m1, m2), (c1, c2) = (each.mean(0) for each in values), (np.cov(each, rowvar=False) for each in values)
    return ((m1 - m2) ** 2).sum() + np.trace(c1 + c2 - 2 * scipy.linalg.sqrtm(c1 @ c2).real)


def distance_in_rank(sizes):
    stage = SimpleNamespace(grid=Grid(sizes), weights=SimpleNamespace(device=torch.device("cpu")))
    batches = ([each[first : first + 20] for first in range(0, len(each), 20)] for each in (A, B))
    return fid(features, *map(iter, batches), stage)


A, B = random_images(101, 0), random_images(62, 1) // 2  # the last batches are smaller than the number of ranks


@pytest.mark.parametrize("sizes", [GridSizes(), GridSizes(2, 1, 2, 1), full(GridSizes(1, 2, 2, 2))])
def test_the_distance_of_features_equals_the_formula_in_float64(ranks, sizes):
    found = ranks.run(sizes.devices, distance_in_rank, sizes)
    assert found == [pytest.approx(expected_distance(A, B), rel=1e-9)] * sizes.devices


def evaluated(config, real, count, with_network):
    """Return, on a rank, the evaluation of a model with initial weights, and its images."""
    _, stage = own_stage(config, dist.get_world_size(), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        if with_network:
            package = ModuleType("torch_fidelity")
            package.__spec__ = ModuleSpec("torch_fidelity", None)
            patch.setitem(sys.modules, "torch_fidelity", package)
            patch.setattr(module, "inception_features", lambda *_: features)
        result = evaluate(stage, real, count, steps=2, seed=3, inception=__file__ if with_network else None)
    images = generated_images(stage, count, 2, 3)
    if stage.exchange:
        stage.exchange.close()
    return result, images


@pytest.mark.parametrize(
    ("sizes", "settings"), [(GridSizes(), ()), (GridSizes(1, 1, 2), ("parallel.pipeline.stages=2",))]
)
def test_generated_images_are_compared_with_real_images_on_every_plan(ranks, sizes, settings):
    config, real = configured([*UNET, "cluster=local", *on_grid(sizes), *settings]), random_images(70, 2)
    world_size = sizes.devices * (config.parallel.pipeline.stages or 1)
    for result, images in ranks.run(world_size, evaluated, config, real, 66, True):
        distance = pytest.approx(expected_distance(images, real), rel=1e-6)
        assert result.values == {"fid": distance, "images": 66, "real_images": 70}
        assert "FID between 66 generated images and 70 real images: " in result.message
        assert "fewer images than 2,048 features" in result.message


def test_patches_replace_the_network_without_its_weights(ranks, tmp_path, monkeypatch):
    config, real = configured([*UNET, "cluster=local"]), random_images(30, 2)
    ((result, images),) = ranks.run(1, evaluated, config, real, 12, False)
    distance = frechet_distance(patch_statistics(images), patch_statistics(real))
    assert result.values == {"frechet": pytest.approx(distance, rel=1e-9), "images": 12, "real_images": 30}
    assert f"no FID: {Path(torch.hub.get_dir()) / 'checkpoints' / module.WEIGHTS}: no such file; download https://" in (
        result.message
    )


def test_images_of_one_channel_are_gray():
    gray = random_images(40, 4, channels=1)
    stage = SimpleNamespace(grid=Grid.single_device(), weights=SimpleNamespace(device=torch.device("cpu")))
    assert fid(features, iter([gray]), iter([np.repeat(gray, 3, -1)]), stage) == pytest.approx(0, abs=1e-9)


class FakeNetwork(torch.nn.Module):
    """Stands for torch_fidelity's network."""

    def __init__(self, name, names, path):
        super().__init__()
        assert names == ["2048"]
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.load_state_dict(torch.load(path, weights_only=False))

    def forward(self, images):
        return (images.flatten(1) * self.scale,)


@pytest.fixture
def package(monkeypatch):
    """Install a stand-in of torch_fidelity."""
    fake = ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    fake.FeatureExtractorInceptionV3 = FakeNetwork
    monkeypatch.setitem(sys.modules, "torch_fidelity", ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)


class Code:
    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_weights_are_read_without_executing_code(package, tmp_path):
    good, other, code = (tmp_path / name for name in ("good.pth", "other.pth", "code.pth"))
    torch.save({"scale": torch.full((), 2.0)}, good)
    images = torch.from_numpy(random_images(2, 0).transpose(0, 3, 1, 2))
    computed = inception_features(good, torch.device("cpu"))(images)
    assert torch.equal(computed, images.flatten(1) * 2.0)
    torch.save({"other": torch.zeros(())}, other)
    evil = Code()
    evil.path = str(tmp_path / "executed")
    torch.save(evil, code)
    (tmp_path / "text.pth").write_text("no weights")
    for path in (other, code, tmp_path / "text.pth"):
        with pytest.raises(ConfigError, match=r"inception=.*pth: not these weights \(.*\); download https://github"):
            inception_features(path, torch.device("cpu"))
    assert not (tmp_path / "executed").exists()


def error_in_rank(inception):
    """Return, on a rank without the package, the error of an evaluation with these weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.importlib.util, "find_spec", lambda name: None)
        try:
            evaluate(None, A, 2, inception=inception)
        except ConfigError as error:
            return str(error)


def test_the_error_for_weights_that_do_not_exist_or_a_missing_package_names_the_remedy(ranks, tmp_path):
    (tmp_path / "w.pth").touch()
    for path, message in (
        ("a/b.pth", "a/b.pth: no such file; download https://"),
        (str(tmp_path / "w.pth"), "the package torch-fidelity is not installed; run pip"),
    ):
        (found,) = ranks.run(1, error_in_rank, path)
        assert found.startswith(f"inception={path}: {message}")


def images_in_rank(directory):
    return training_images(Checkpoint(directory))


def test_the_training_images_of_a_run_are_found_by_its_configuration(ranks, tmp_path):
    words = "data=blue_marble", "model.image_size=32", "model.attention_at=[16]"
    config = configured([*UNET, *words, f"data.cache_dir={tmp_path / 'cache'}"])
    directory = tmp_path / "run" / "checkpoints" / "step_00000001"
    directory.mkdir(parents=True)
    (directory / "meta.json").write_bytes(meta(1, config.model).to_json())
    with pytest.raises(ConfigError, match=r"config\.yaml is missing, which names the images; use"):
        training_images(Checkpoint(directory))
    OmegaConf.save(OmegaConf.structured(config), tmp_path / "run" / "config.yaml")
    (found,) = ranks.run(1, images_in_rank, directory)
    assert np.array_equal(found, image_files(config.data, 32, 3).array("train"))
