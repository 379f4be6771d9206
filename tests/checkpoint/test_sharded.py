"""A checkpoint holds global tensors: what one grid wrote, any other reads, bit by bit."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from gpt4d import optim
from gpt4d.checkpoint import catalog, sharded
from gpt4d.config import ConfigError, GridSizes, ModelConfig, OptimConfig
from tests.grids import TINY_MODEL, build_model, grid_name

MODEL = replace(TINY_MODEL, layers=1, heads=12, vocab_size=37, vocab_multiple=12)  # splits over 2, 3 and 4

WRONG_FORMAT = json.dumps(asdict(catalog.Meta(catalog.Progress(), MODEL, {}, "d", "t", format=99)))
STATES = {"exp_avg": 2.0, "exp_avg_sq": 3.0}  # given values of their own, functions of the global place


def meta(step, model=MODEL):
    return catalog.Meta(catalog.Progress(step, 10 * step, 100 * step), model, {"x": 1}, "words", "abc")


def global_state(model, optimizer):
    state = sharded._state(model, optimizer, model.weights.grid)
    tensors = {f"model.{n}": t for n, t in state["model"].items()}
    tensors |= {f"optim.{n}.{k}": t for n, states in state["optim"].items() for k, t in states.items()}
    return {name: tensor.full_tensor() for name, tensor in tensors.items()}


def write(sizes, run_dir, tokenizer):
    model = build_model(MODEL, sizes, torch.float32, seed=7)
    optimizer = optim.build_optimizer(model.named_parameters(), OptimConfig())
    for parameter in model.parameters():
        for k, factor in STATES.items():
            optimizer.state[parameter][k].copy_(parameter.detach() * factor + 1)
    sharded.save(run_dir, meta(3), model, optimizer, model.weights.grid, tokenizer, keep=2)


def what_was_written():
    """Written out on one device, without a mesh: the global tensors of ``write``."""
    parameters = {n: p.detach() for n, p in build_model(MODEL, GridSizes(), torch.float32, seed=7).named_parameters()}
    states = {f"optim.{n}.{k}": p * factor + 1 for n, p in parameters.items() for k, factor in STATES.items()}
    return {f"model.{n}": p for n, p in parameters.items()} | states


def read(sizes, directory):
    model = build_model(MODEL, sizes, torch.float32, seed=8)
    optimizer = optim.build_optimizer(model.named_parameters(), OptimConfig())
    progress = sharded.load(directory, model, optimizer, model.weights.grid)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return progress, steps, global_state(model, optimizer)


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    return path


GRIDS = [GridSizes(1, 1, 1, 1), GridSizes(2, 2, 2, 1), GridSizes(3, 1, 2, 1), GridSizes(1, 4, 1, 2), GridSizes(2, 1, 3)]


@pytest.mark.parametrize("writer", GRIDS, ids=grid_name)
def test_what_one_grid_writes_every_other_reads_bit_by_bit(ranks, tmp_path, tokenizer, writer):
    ranks.run(writer.devices, write, writer, tmp_path, tokenizer)
    written = what_was_written()
    directory = catalog.chosen("auto", tmp_path)
    assert directory == tmp_path / "checkpoints" / "step_00000003"
    for reader in GRIDS:
        progress, steps, found = ranks.run(reader.devices, read, reader, directory)[0]
        assert progress == catalog.Progress(3, 30, 300) and steps == {3}
        assert found.keys() == written.keys()
        for name, tensor in written.items():
            assert torch.equal(found[name], tensor), (reader, name)


def names_on_disk(directory):
    import torch.distributed.checkpoint as dcp

    return set(dcp.FileSystemReader(directory).read_metadata().state_dict_metadata)


def test_names_on_disk_are_the_parameters_and_know_no_ranks(ranks, tmp_path, tokenizer):
    ranks.run(8, write, GridSizes(2, 2, 2), tmp_path, tokenizer)
    parameters = {n for n, _ in build_model(MODEL, GridSizes()).named_parameters()}
    expected = {f"model.{n}" for n in parameters}
    expected |= {f"optim.{n}.{k}" for n in parameters for k in ("exp_avg", "exp_avg_sq")}
    assert names_on_disk(tmp_path / "checkpoints" / "step_00000003") == expected


def save_many(run_dir, tokenizer):
    model = build_model(MODEL, GridSizes(), torch.float32)
    optimizer = optim.build_optimizer(model.named_parameters(), OptimConfig())
    for step in (1, 2, 2, 11):
        sharded.save(run_dir, meta(step), model, optimizer, model.weights.grid, tokenizer, keep=2)


def test_only_the_newest_are_kept_and_what_was_interrupted_is_never_chosen(ranks, tmp_path, tokenizer):
    ranks.run(1, save_many, tmp_path, tokenizer)
    assert [p.name for p in catalog.committed(tmp_path)] == ["step_00000002", "step_00000011"]
    (tmp_path / "checkpoints" / "step_00000012.partial").mkdir()
    (tmp_path / "checkpoints" / "step_00000013").mkdir()
    assert catalog.chosen("auto", tmp_path).name == "step_00000011"
    assert catalog.chosen("never", tmp_path / "elsewhere") is None
    assert catalog.chosen(str(tmp_path), tmp_path / "elsewhere").name == "step_00000011"
    older = str(tmp_path / "checkpoints" / "step_00000002")
    assert catalog.chosen(older, tmp_path / "elsewhere").name == "step_00000002"
    for resume in ("never", older):  # would write older steps beside newer ones, and lose them
        with pytest.raises(ConfigError, match=r"choose another run\.name"):
            catalog.chosen(resume, tmp_path)


def test_a_checkpoint_of_another_model_is_refused_by_name_and_value(tmp_path):
    meta(1).write(tmp_path)
    catalog.check_fits(tmp_path, replace(MODEL, dropout=0.5))
    with pytest.raises(ConfigError, match=r"model\.hidden=48: the checkpoint .* has 24"):
        catalog.check_fits(tmp_path, replace(MODEL, hidden=48))


@pytest.mark.parametrize("content", ["", "[]", '{"model": {}}', json.dumps({"format": 9}), WRONG_FORMAT])
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path, content):
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(ConfigError, match="not a checkpoint of gpt4d"):
        catalog.Meta.read(tmp_path)


def test_meta_survives_the_disk(tmp_path):
    meta(5, ModelConfig(dropout=0.25)).write(tmp_path)
    assert catalog.Meta.read(Path(tmp_path)) == meta(5, ModelConfig(dropout=0.25))
