"""Checkpoints of mixtures of experts: resumed on other grids, started from imports, exported, and killed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt4d.checkpoint import exporter, importer
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import GridSizes
from gpt4d.data.corpus import corpus as prepared
from gpt4d.model import registry
from tests.support.checkpoint_kills import RANKS, run_until_killed
from tests.support.checkpoint_sources import MIXTRAL, OLMOE, QWEN3_MOE, save
from tests.support.checkpoints import equal, tensors_of
from tests.support.data_files import documents_of
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.task_oracles import expected_metrics, validations

MOE = (
    "model=moe", "model.experts=8", "model.inner=16", "model.head_size=6", "model.key_value_heads=2",
    "model.max_positions=16", "model.balance_rate=0.05", "train.batch_size=8", "optim.ema_decay=0.8",
)  # fmt: skip
SPLIT = GridSizes(1, 1, 2, 2)


def assert_equal_runs(config, serial):
    """Assert that two runs have equal losses and checkpoints up to rounding."""
    losses = [[line["loss"] for line in metric_lines(run.run.dir)] for run in (config, serial)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    found, expected = tensors_of(config.run.dir), tensors_of(serial.run.dir)
    assert found.keys() == expected.keys() and "extra.average.blocks.0.mlp.experts.up" in found
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(("optimizer", "count"), [("muon", 3), full("muon", 5), full("adamw", 5)])
def test_a_mixture_continues_on_grids_with_other_numbers_of_experts_per_device(ranks, tiny, tmp_path, optimizer, count):
    settings = (*MOE, f"optim.algorithm={optimizer}", f"train.steps={count}", "optim.schedule_steps=5")
    serial = tiny(*settings, f"run.dir={tmp_path}/serial")
    ranks.run(1, train_in_rank, serial)
    parts = [
        (4, ("parallel.gz=4",)),
        (4, ("parallel.gz=2", "optim.shard_states=true")),
        (3, ("parallel.pipeline.stages=2", "parallel.pipeline.stage_grids=[1x1x2x1,1x1x1x1]")),
        (4, ("parallel.gx=2", "parallel.gy=2")),
        (1, ()),
    ]
    for steps, (world_size, plan) in enumerate(parts[:count], start=1):
        config = tiny(*settings, f"train.steps={steps}", *plan)
        ranks.run(world_size, train_in_rank, config)
    assert_equal_runs(config, serial)


@pytest.mark.parametrize("optimizer", ["adamw", full("muon")])
def test_the_states_of_the_only_expert_of_a_device_are_split_over_data(ranks, tiny, tmp_path, optimizer):
    settings = (
        *MOE, f"optim.algorithm={optimizer}", "model.experts=2", "model.experts_per_token=1",
        "model.normalized_weights=false", "train.steps=2", "train.validate_every=1", "optim.validate_averages=true",
    )  # fmt: skip
    serial = tiny(*settings, f"run.dir={tmp_path}/serial")
    ranks.run(1, train_in_rank, serial)
    config = tiny(*settings, "parallel.gz=2", "parallel.gdata=2", "optim.shard_states=true")
    spec = registry.describe_run(config, [SPLIT]).parameters["blocks.0.mlp.experts.up"]
    assert spec.optimized_elements(SPLIT, shard_states=True) == spec.local_elements(SPLIT) // 2
    ranks.run(4, train_in_rank, config)
    for key in ("loss", "average_loss"):
        values = [[line[key] for line in validations(run.run.dir)] for run in (config, serial)]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert_equal_runs(config, serial)


def test_a_mixture_that_is_killed_continues_with_equal_bits(ranks, tiny, tmp_path):
    settings = (*MOE, "parallel.gz=2", "checkpoint.every=2", "train.steps=4", "optim.algorithm=muon")
    straight = tiny(*settings, f"run.dir={tmp_path}/straight")
    ranks.run(RANKS, train_in_rank, straight)
    config = tiny(*settings)
    assert not run_until_killed(ranks.context, config, f"{tmp_path}/store", delay=0, hold=True)
    assert Checkpoint.open(Path(config.run.dir)).meta.progress.step == 2
    ranks.run(RANKS, train_in_rank, config)
    # Steps after the last checkpoint are logged twice.
    lines = [{(line["step"], line["loss"]) for line in metric_lines(run.run.dir)} for run in (config, straight)]
    assert lines[0] == lines[1] and len(lines[1]) == 4
    assert equal(tensors_of(config.run.dir), tensors_of(straight.run.dir))


@pytest.mark.parametrize("source", [OLMOE, full(QWEN3_MOE), full(MIXTRAL)], ids=lambda model: model.qk_norm)
def test_the_export_of_a_trained_import_has_its_validation_loss(ranks, tiny, tmp_path, source):
    from transformers import AutoModelForCausalLM

    save(tmp_path / "source", replace(source, vocab_size=300, experts=6))
    model = importer.import_model(str(tmp_path / "source"), tmp_path / "import", "none")
    command = next(iter(importer.commands(tmp_path / "import", model).values()))
    words = [word for word in command.split() if word.startswith(("model", "checkpoint.init="))]
    config = tiny(
        "model.vocab_multiple=1", *words, "train.batch_size=4", "train.steps=3", "train.validate_every=3",
        "train.validation_batches=3", "parallel.gz=2",
    )  # fmt: skip
    ranks.run(2, train_in_rank, config)
    exporter.export(Checkpoint.open(Path(config.run.dir)), tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    files = prepared(config.data).first
    held_out = [files.tokenizer().decode(ids.tolist()) for ids in documents_of(files, "validation")]
    expected, *_ = expected_metrics(theirs, files.tokenizer(), held_out, config)
    (found,) = validations(config.run.dir)
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    of_experts = sum(parameter.numel() for name, parameter in theirs.named_parameters() if ".experts." in name)
    active = theirs.num_parameters() - of_experts * (6 - source.experts_per_token) // 6
    assert f"| parameters | {theirs.num_parameters():,} |\n| active parameters | {active:,} |\n" in card
