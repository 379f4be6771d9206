"""The training losses of the sources of a blend equal separately computed sums on every plan, and change no bit."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import GridSizes
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.sampler import Blend, PackedSequences, Sequences
from tests.support.chat import chat_overrides
from tests.support.data_files import blend_of, three_sources
from tests.support.grids import build_model, full, hf_model, metric_lines, on_grid, train_in_rank
from tests.support.task_oracles import summed_loss
from tests.support.training import losses_and_norms, plain_torch_run

WEIGHTS = [0.6, 0.3, 0.1]
SETTINGS = ["train.steps=6", "train.batch_size=8", "logging.every=2", "train.validate_every=2", "optim.warmup_steps=2"]


def text_blend(tiny, directory):
    """Prepare three sources of text with one tokenizer, and return the overrides of a run on their blend."""
    return weighted(three_sources(tiny().data.path, directory))


def weighted(paths):
    return blend_of(dict(zip(paths, WEIGHTS, strict=False)))


def chat_blend(tiny, directory):
    """Prepare two sources of conversations with one tokenizer, and return the overrides of a run on their blend."""
    paths = []
    for name, count in (("first", 60), ("second", 30)):
        (directory / name).mkdir()
        overrides = chat_overrides(directory / name, count)
        paths.append(prepared(tiny(*overrides, f"data.name={name}").data).first.directory)
    return [*weighted(paths), *(word for word in overrides if word.startswith(("model.", "train.")))]


BLENDS = {"text": text_blend, "chat": chat_blend}


def losses(run_dir):
    return [line["sources"] for line in metric_lines(run_dir)]


@pytest.fixture(scope="module")
def serial(ranks, tmp_path_factory):
    """Return a function from ``tiny`` and the kind of data to the configuration of a finished run on one device."""
    made = {}

    def run(tiny, kind):
        if kind not in made:
            directory = tmp_path_factory.mktemp(kind)
            overrides = BLENDS[kind](tiny, directory)
            config = tiny(*overrides, *SETTINGS, "checkpoint.every=2", "checkpoint.keep=9", f"run.dir={directory}/run")
            ranks.run(1, train_in_rank, config)
            made[kind] = overrides, config
        return made[kind]

    return run


def plain_losses(config):
    """Return the losses of the sources in each interval of two steps, from plain torch and single samples."""
    train, files = config.train, prepared(config.data).files
    masked, order = files[0].masked, (train.seq_len, train.seed, True)
    sources = [
        PackedSequences(each, "train", *order) if masked else Sequences(each.tokens("train"), *order) for each in files
    ]
    blend = Blend(sources, [WEIGHTS[: len(sources)]])
    totals, counts = np.zeros((train.steps, len(sources))), np.zeros((train.steps, len(sources)), int)

    def of_sample(model, number, sample):
        if masked:
            position = int(sources[number].order.positions(np.array([sample]))[0])
            documents = sources[number].documents[slice(*sources[number].bounds[position : position + 2])]
            return summed_loss(model, files[number], "train", documents.tolist())
        row = torch.from_numpy(sources[number].rows(np.array([sample])).astype(np.int64))
        return F.cross_entropy(model(row[:, :-1]).logits[0], row[0, 1:], reduction="sum"), train.seq_len

    def loss_of(model, step):
        total, count = torch.zeros(()), 0
        chosen = blend.choose(np.arange(train.batch_size) + step * train.batch_size)
        for number, sample in zip(*map(np.ndarray.tolist, chosen), strict=True):
            loss, units = of_sample(model, number, sample)
            totals[step, number] += loss.item()
            counts[step, number] += units
            total, count = total + loss, count + units
        return total / count

    start = build_model(config.model, GridSizes(), torch.float32, seed=train.seed)
    plain_torch_run(config, hf_model(start), loss_of)
    pairs = totals.reshape(-1, 2, len(sources)).sum(1), counts.reshape(-1, 2, len(sources)).sum(1)
    return [
        [total / count if count else None for total, count in zip(*interval, strict=True)]
        for interval in zip(*(pair.tolist() for pair in pairs), strict=True)
    ]


@pytest.mark.parametrize("kind", BLENDS)
def test_the_losses_of_sources_equal_separately_computed_sums(serial, tiny, kind):
    _, config = serial(tiny, kind)
    found, expected = losses(config.run.dir), plain_losses(config)
    assert [list(each) for each in found] == [[Path(path).name for path in config.data.blend]] * 3
    for values, others in zip(found, expected, strict=True):
        assert [*values.values()] == [other and pytest.approx(other, rel=1e-5) for other in others]
    lines = metric_lines(config.run.dir)
    assert lines[-1]["loss"] != pytest.approx(next(iter(found[-1].values())), rel=1e-4)


PLANS = [
    full("text", GridSizes(2, 2, 2), ()),
    ("chat", GridSizes(), ("parallel.pipeline.stages=2", "parallel.pipeline.microbatches=4")),
    ("text", GridSizes(2, 1, 2), ("parallel.sequence_parallel=true", "train.loss_chunks=2", "parallel.chunks=2")),
    full("text", GridSizes(1, 1, 1, 2), ("train.micro_batch_size=1", "train.loss_chunks=4")),
    full("text", GridSizes(2), ("parallel.mode=atp", "parallel.d1=2", "parallel.d2=1", "parallel.chunks=2")),
    full("chat", GridSizes(2, 2, 2), ("train.activation_checkpointing=full",)),
    full("text", GridSizes(1, 1, 2), ("parallel.pipeline.stages=2", "train.loss_chunks=2")),
]


@pytest.mark.parametrize(("kind", "sizes", "settings"), PLANS)
def test_the_plan_does_not_change_the_losses_of_sources(ranks, serial, tiny, kind, sizes, settings):
    overrides, one_device = serial(tiny, kind)
    grid = () if any("atp" in setting for setting in settings) else on_grid(sizes)
    config = tiny(*overrides, *SETTINGS, *grid, *settings)
    ranks.run(sizes.devices * (config.parallel.pipeline.stages or 1), train_in_rank, config)
    for values, others in zip(losses(config.run.dir), losses(one_device.run.dir), strict=True):
        assert values == {name: other and pytest.approx(other, rel=1e-5) for name, other in others.items()}


def test_a_resumed_run_has_the_losses_of_sources_of_the_uninterrupted_run(ranks, serial, tiny):
    overrides, whole = serial(tiny, "text")
    resume = f"checkpoint.resume={whole.run.dir}/checkpoints/step_00000002"
    config = tiny(*overrides, *SETTINGS, resume)
    ranks.run(1, train_in_rank, config)
    assert losses(config.run.dir) == losses(whole.run.dir)[1:]


def train_without_sums(config):
    with mock.patch("gpt4d.task.language.SourceLosses", lambda *_: None):
        train_in_rank(config)


def test_the_losses_of_sources_change_no_bit_of_training(ranks, serial, tiny):
    overrides, one_device = serial(tiny, "text")
    config = tiny(*overrides, *SETTINGS)
    ranks.run(1, train_without_sums, config)
    assert all("sources" not in line for line in metric_lines(config.run.dir))
    assert losses_and_norms(config) == losses_and_norms(one_device)


def test_sources_with_one_directory_name_are_named_by_their_paths(ranks, tiny, tmp_path):
    own = prepared(tiny().data).first.directory
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens").symlink_to(own)
    paths = [tmp_path / name / "tokens" for name in ("a", "b")]
    config = tiny(*weighted(paths), "train.steps=1")
    ranks.run(1, train_in_rank, config)
    (found,) = losses(config.run.dir)
    assert list(found) == [str(path) for path in paths] and json.dumps(found)
