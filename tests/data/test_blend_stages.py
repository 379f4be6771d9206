"""Weights of a blend that change with the progress of a run: the index of a sample decides its source and position."""

import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt4d.config import ConfigError
from gpt4d.data import prepare
from gpt4d.data.sampler import Sequences
from gpt4d.task.language import LanguageModeling
from gpt4d.task.source_losses import SourceLosses
from gpt4d.validation import validate
from tests.data.test_megatron import write
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure

SETTINGS = [
    "train.steps=10", "train.batch_size=8", "optim.warmup_steps=2", "optim.schedule_steps=10", "checkpoint.every=5",
    "checkpoint.keep=3",
]  # fmt: skip


@pytest.fixture
def sources(tiny, tmp_path):
    """Return the directories of three sources with one tokenizer."""
    own = prepare.corpus(tiny("data.validation_fraction=0").data).first.directory
    paths = [own]
    for name, words in (("other", "kappa iota theta eta zeta "), ("digits", "0123 456 ")):
        (tmp_path / f"{name}.txt").write_text(words * 300)
        settings = f"data.path={tmp_path / name}.txt", f"data.tokenizer={own}", "data.validation_fraction=0"
        paths.append(prepare.corpus(tiny(*settings, f"data.name={name}").data).first.directory)
    return paths


def blend(*stages):
    """Return the overrides of a blend of stages: the fraction at which each begins, and weights by path."""
    texts = [f"{at}: {{{', '.join(f'{path}: {w}' for path, w in weights.items())}}}" for at, weights in stages]
    return ["data=blend", f"data.blend={{{', '.join(texts)}}}"]


def staged(sources):
    first, second, third = sources
    return blend((0, {first: 0.7, second: 0.3}), (0.35, {second: 1, third: 1}), (0.8, {first: 0.2, third: 0.8}))


def read_in_rank(config, count):
    """Return sources and rows of the first samples, the first sample of each stage, and the identity of the data."""
    task = LanguageModeling(config)
    blend, ids = task._training, np.arange(count)
    losses = SourceLosses(blend, "abc", lambda *_: 0, SimpleNamespace(grid=None, weights=SimpleNamespace(device="cpu")))
    chosen = blend.choose(ids)[0].tolist()
    assert losses.sources(torch.from_numpy(ids)).tolist() == chosen
    return chosen, blend.rows(ids), task._firsts, task.identity()["samples"]


@pytest.fixture
def read(ranks):
    """Return a function that reads the first 80 samples of a run (``read_in_rank``)."""
    return lambda config: ranks.run(1, read_in_rank, config, 80)[0]


def test_stages_begin_at_their_fraction_of_the_run_and_each_source_is_read_in_order(read, tiny, sources):
    config = tiny(*staged(sources), *SETTINGS)
    chosen, rows, firsts, _ = read(config)
    assert firsts == [0, 28, 64]
    for start, stop, shares in ((0, 28, (0.7, 0.3, 0)), (28, 64, (0, 0.5, 0.5)), (64, 80, (0.2, 0, 0.8))):
        for source, share in enumerate(shares):
            count = chosen[start:stop].count(source)
            assert abs(count - share * (stop - start)) < 1 and (count == 0) == (share == 0)
    for source, path in enumerate(sources):
        tokens = prepare.corpus(tiny("data=tokens", f"data.path={path}").data).first.tokens("train")
        own = Sequences(tokens, config.train.seq_len, config.train.seed, shuffle=True)
        expected = own.rows(np.arange(chosen.count(source)))
        assert np.array_equal(rows[np.array(chosen) == source], expected)


def test_the_samples_do_not_depend_on_the_grid_the_microbatch_and_the_batch_ramp(read, tiny, sources):
    length = "train.tokens=1280"  # 80 sequences
    words = [*staged(sources), "train.batch_size=8", length, "train.steps=600", "optim.warmup_steps=2"]
    _, expected, firsts, identity = read(tiny(*words))
    for more in (
        ["parallel.gdata=2", "train.micro_batch_size=2"],
        ["train.batch_ramp=[[0,2],[30,8]]"],
        ["train.batch_size=16"],
    ):
        _, rows, others, other = read(tiny(*words, *more))
        assert np.array_equal(rows, expected) and (others, other) == (firsts, identity) == ([0, 28, 64], identity)


@pytest.fixture
def run(ranks, tiny, tmp_path):
    """Return a function that trains in a directory, and returns loss and losses of the sources of each step."""

    def train(name, *overrides, world=1):
        config = tiny(*SETTINGS, f"run.dir={tmp_path / name}", *overrides)
        ranks.run(world, train_in_rank, config)
        return {line["step"]: (line["loss"], line["sources"]) for line in metric_lines(config.run.dir)}

    return train


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["parallel.gx=2"], ["parallel.gdata=2", "train.micro_batch_size=2"]),
        full(["parallel.gy=2"], ["parallel.gz=2", "parallel.pipeline.stages=2"]),
    ],
)
def test_a_run_and_its_resume_on_other_grids_have_the_losses_of_one_device(run, sources, tmp_path, first, second):
    data = staged(sources)
    expected = run("straight", *data)
    names = [path.name for path in sources]
    assert [name for name in names if expected[3][1][name] is None] == names[2:]
    assert [name for name in names if expected[6][1][name] is None] == names[:1]
    found = run("first", *data, *first, world=2)
    resume = f"checkpoint.resume={tmp_path}/first/checkpoints/step_00000005"
    found |= run("second", *data, *second, resume, world=4 if "parallel.pipeline.stages=2" in second else 2)
    assert found.keys() == expected.keys() == {*range(1, 11)}
    for step, (loss, by_source) in expected.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-5)
        assert found[step][1] == {name: value and pytest.approx(value, rel=1e-5) for name, value in by_source.items()}


def test_a_resume_refuses_stages_that_begin_with_other_samples(run, sources, tmp_path):
    first, second, _ = sources
    run("a", *blend((0, {first: 1}), (0.5, {second: 1})))
    resume = f"checkpoint.resume={tmp_path}/a/checkpoints/step_00000005"
    for name, words in (
        ("b", blend((0, {first: 1}), (0.6, {second: 1}))),
        ("c", blend((0, {first: 1}), (0.5, {first: 1, second: 9}))),
        ("d", [*blend((0, {first: 1}), (0.5, {second: 1})), "train.steps=12"]),
    ):
        with pytest.raises(RankFailure, match=r"data=blend: .* was trained with other samples; use data with the same"):
            run(name, *words, resume)
    longer = [*blend((0, {first: 1}), (0.25, {second: 1})), "train.steps=20"]  # the same first samples
    assert [*run("e", *longer, resume, "optim.schedule_steps=10")] == [*range(6, 21)]


def test_a_blend_with_one_stage_has_the_identity_of_a_blend_of_weights(read, tiny, sources):
    first, second, _ = sources
    words = tiny("data=blend", f"data.blend={{{first}: 3, {second}: 1}}"), tiny(*blend((0, {first: 3, second: 1})))
    (chosen, rows, firsts, identity), other = map(read, words)
    assert (chosen, firsts, identity) == (other[0], other[2], other[3]) and np.array_equal(rows, other[1])


def test_stages_of_megatrons_files_have_the_samples_of_token_files(read, tiny, sources, tmp_path):
    prefixes = []
    for number, directory in enumerate(sources):
        files = prepare.opened(str(directory), None)
        ends = files.document_ends("train").tolist()
        documents = [files.tokens("train")[start:stop] for start, stop in pairwise([0, *ends])]
        prefixes.append(write(tmp_path / f"megatron{number}", documents))
    shared = [*SETTINGS, "data.validation_fraction=0", f"data.tokenizer={sources[0]}"]
    own, megatron = read(tiny(*staged(sources), *SETTINGS)), read(tiny(*staged(prefixes), *shared))
    assert own[0] == megatron[0] and np.array_equal(own[1], megatron[1]) and own[2] == megatron[2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{0: {A: 1}, 0.8: {no/such: 1}}", r"no/such is not a directory of token files; use directories that python"),
        ("{0: {A: 1}, 0.8: {B: 1}, 0.5: {A: 1}}", r"a stage at 0\.5 follows a stage at 0\.8; use increasing fractions"),
        ("{0: {A: 1}, 1: {B: 1}}", r"a stage at 1 follows a stage at 0; use increasing fractions below 1"),
        ("{0.1: {A: 1}, 0.8: {B: 1}}", r"the first stage begins at 0\.1 of the run; let it begin at 0"),
        ("{0: {A: 1}, 0.8: {B: 0}}", r"the weight of B from 0\.8 on is 0; use weights above 0, and leave out"),
        ("{0: {A: 1}, 0.8: {B: -2}}", r"the weight of B from 0\.8 on is -2; use weights above 0"),
        ("{0: {A: 1}, 0.8: {B: true}}", r"the weight of B from 0\.8 on is True; use weights above 0"),
        ("{0: {A: 1}, B: 2}", r"B: 2 is not a stage; use fractions of the run and the weights from there on: 'data"),
        ("{0: {A: 1}, B: {A: 2}}", r"B: \{.*\} is not a stage; use fractions of the run"),
        ("{0: {A: 1}, 0.8: {}}", r"0\.8: \{\} is not a stage; use fractions of the run"),
    ],
)
def test_stages_that_are_not_possible_are_one_line_before_a_process_group_exists(tiny, sources, value, message):
    paths = dict(zip("AB", map(str, sources), strict=False))
    value = re.sub("[AB]", lambda match: paths[match[0]], value)
    message = re.sub(r"\b[AB]\b", lambda match: re.escape(paths[match[0]]), message)
    with pytest.raises(ConfigError, match=rf"^data\.blend=.*: {message}") as raised:
        validate(tiny("data=blend", f"data.blend={value}"), 1)
    assert "\n" not in str(raised.value)


def test_stages_need_a_length_in_steps_or_tokens(tiny, sources):
    with pytest.raises(
        ConfigError, match=r"^train\.epochs=2\.0: the stages of data\.blend begin at fractions of a run"
    ):
        validate(tiny(*staged(sources), "train.epochs=2", "train.steps=600"), 1)
