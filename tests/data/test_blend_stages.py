"""Weights of a blend that change with the progress of a run: the index of a sample decides its source and position."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpt4d.config import batch_size_at
from gpt4d.data.sampler import Sequences
from gpt4d.data.tokens import TokenFiles
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.support.data_files import blend, blend_of, documents_of, one_line, write
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure

SETTINGS = [
    "train.steps=10", "train.batch_size=8", "optim.warmup_steps=2", "optim.schedule_steps=10", "checkpoint.every=5",
    "checkpoint.keep=3",
]  # fmt: skip


def staged(sources):
    first, second, third = sources
    return blend((0, {first: 0.7, second: 0.3}), (0.35, {second: 1, third: 1}), (0.8, {first: 0.2, third: 0.8}))


def read_in_rank(config):
    """Return source and row of each of the first samples that this rank reads, by id, and the identity of the data."""
    trainer = Trainer(validate(config, dist.get_world_size()), torch.device("cpu"))
    task, first, found = trainer.task, 0, {}
    while first < 80:
        for batch in task.batches(first):
            rows = torch.cat((batch.inputs["ids"], batch.targets[:, -1:]), 1).tolist()
            found |= zip(batch.sample_ids.tolist(), zip(batch.sources.tolist(), rows, strict=True), strict=True)
        first += batch_size_at(config.train, first)
    task.close()
    trainer.checkpoints.close()
    return found, task.identity()["samples"]


@pytest.fixture
def read(ranks):
    """Return a function to the sources and the rows of the first 80 samples of a run, and the data's identity."""

    def of(config, world=1):
        parts = ranks.run(world, read_in_rank, config)
        found = {sample: value for part, _ in parts for sample, value in part.items()}
        chosen, rows = zip(*(found[sample] for sample in range(80)), strict=True)
        return list(chosen), np.array(rows), parts[0][1]

    return of


def test_stages_begin_at_their_fraction_of_the_run_and_each_source_is_read_in_order(read, tiny, sources):
    config = tiny(*staged(sources), *SETTINGS)
    chosen, rows, _ = read(config)
    for start, stop, shares in ((0, 28, (0.7, 0.3, 0)), (28, 64, (0, 0.5, 0.5)), (64, 80, (0.2, 0, 0.8))):
        for source, share in enumerate(shares):
            count = chosen[start:stop].count(source)
            assert abs(count - share * (stop - start)) < 1 and (count == 0) == (share == 0)
    for source, path in enumerate(sources):
        own = Sequences(TokenFiles.open(path).tokens("train"), config.train.seq_len, config.train.seed, shuffle=True)
        assert np.array_equal(rows[np.array(chosen) == source], own.rows(np.arange(chosen.count(source))))


def test_the_samples_do_not_depend_on_the_grid_the_microbatch_and_the_batch_ramp(read, tiny, sources):
    words = [*staged(sources), "train.batch_size=8", "train.tokens=1280", "train.steps=600", "optim.warmup_steps=2"]
    expected = read(tiny(*words))
    for world, more in (
        (2, ["parallel.gdata=2", "train.micro_batch_size=2"]),
        (1, ["train.batch_ramp=[[0,2],[30,8]]"]),
        (1, ["train.batch_size=16"]),
    ):
        found = read(tiny(*words, *more), world)
        assert (found[0], found[2]) == (expected[0], expected[2]) and np.array_equal(found[1], expected[1])


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


def test_blends_of_one_stage_and_of_megatrons_files_have_the_samples_of_a_blend_of_token_files(
    read, tiny, sources, tmp_path
):
    first, second, _ = sources
    words = blend_of({first: 3, second: 1}), blend((0, {first: 3, second: 1}))
    one, other = (read(tiny(*SETTINGS, *each)) for each in words)
    assert (one[0], one[2]) == (other[0], other[2]) and np.array_equal(one[1], other[1])
    prefixes = [
        write(tmp_path / f"megatron{number}", documents_of(TokenFiles.open(path), "train"))
        for number, path in enumerate(sources)
    ]
    shared = [*SETTINGS, "data.validation_fraction=0", f"data.tokenizer={first}"]
    own, megatron = read(tiny(*staged(sources), *SETTINGS)), read(tiny(*staged(prefixes), *shared))
    assert own[0] == megatron[0] and np.array_equal(own[1], megatron[1])


def test_stages_that_are_not_possible_are_one_line_before_a_process_group_exists(tiny, sources):
    config, (a, b, _) = tiny(*staged(sources)), map(str, sources)
    fractions, above_0, first = "is not a stage; use fractions of the run", "use weights above 0", {a: 1}
    for value, message in (
        ({0: first, 0.8: {"no/such": 1}}, "no/such is not a directory of token files; use directories that"),
        ({0: first, 0.8: {b: 1}, 0.5: first}, "a stage at 0.5 follows a stage at 0.8; use increasing"),
        ({0: first, 1: {b: 1}}, "a stage at 1 follows a stage at 0; use increasing fractions below 1"),
        ({0.1: first, 0.8: {b: 1}}, "the first stage begins at 0.1 of the run; let it begin at 0"),
        ({0: first, 0.8: {b: 0}}, f"the weight of {b} from 0.8 on is 0; {above_0}, and leave out"),
        ({0: first, 0.8: {b: -2}}, f"the weight of {b} from 0.8 on is -2; {above_0}"),
        ({0: first, 0.8: {b: True}}, f"the weight of {b} from 0.8 on is True; {above_0}"),
        ({0: first, b: 2}, f"{b}: 2 {fractions} and the weights from there on: 'data"),
        ({0: first, b: {a: 2}}, rf"{b}: \{{.*\}} {fractions}"),
        ({0: first, 0.8: {}}, rf"0.8: \{{\}} {fractions}"),
    ):
        with one_line(rf"^data\.blend=.*: {message}"):
            validate(replace(config, data=replace(config.data, blend=value)), 1)
    with one_line(r"^train\.epochs=2\.0: the stages of data\.blend begin at fractions of a run"):
        validate(tiny(*staged(sources), "train.epochs=2", "train.steps=600"), 1)
