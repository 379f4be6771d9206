"""Runs that start from the weights of another run (``checkpoint.init``), on any grid; own checkpoints win."""

import shutil
from pathlib import Path

import pytest

from gpt4d import generate
from gpt4d.checkpoint import checkpoint_dir
from gpt4d.config import ConfigError
from gpt4d.runs import starts
from tests.support.checkpoints import equal, tensors_of
from tests.support.commands import wrong_messages
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.rank_pool import RankFailure


@pytest.fixture
def source(ranks, tiny, tmp_path):
    """Return the directory of a run with averaged weights."""
    ranks.run(1, train_in_rank, tiny("train.steps=3", "optim.ema_decay=0.5", f"run.dir={tmp_path / 'source'}"))
    return tmp_path / "source"


@pytest.mark.parametrize("plan", [("parallel.gx=2",), full(("parallel.gx=2", "parallel.pipeline.stages=2"))])
def test_a_run_starts_from_averaged_weights_on_any_grid_and_later_resumes_from_its_own(ranks, tiny, source, plan):
    # With a learning rate of 0, neither the weights nor their averages change.
    settings = [f"checkpoint.init={source}", "optim.lr=0", "optim.ema_decay=0.9", "train.batch_size=8"]
    config = tiny(*settings, "train.steps=2", *plan)
    ranks.run(2 * len(plan), train_in_rank, config)
    averages = tensors_of(source, "extra.average.")
    assert averages and not equal(averages, tensors_of(source, "model."))
    assert equal(tensors_of(config.run.dir, "model."), averages)
    assert equal(tensors_of(config.run.dir, "extra.average."), averages)
    assert [line["step"] for line in metric_lines(config.run.dir)] == [1, 2]
    assert all(moment.abs().max() < 1 for moment in tensors_of(config.run.dir, "optim.").values())

    shutil.rmtree(source)  # the run does not need it any more
    ranks.run(1, train_in_rank, tiny(*settings, "train.steps=3"))
    first, second = starts.read(Path(config.run.dir))
    assert (first["init"], first["step"]) == (f"{source}/checkpoints/step_00000003", 0)
    assert (second["init"], second["step"]) == (None, 2)
    with pytest.raises(ConfigError, match=r"checkpoint\.init=None: .* has .*source; restore the old value"):
        checkpoint_dir.check_run(tiny(*settings[1:], "train.steps=4"))


def test_weights_that_do_not_fit_are_rejected_before_anything_starts(ranks, tiny, source):
    unfit = "; use that value or set another checkpoint.init"
    cases = [
        (["model.hidden=48"], f"^model.hidden=48: the checkpoint {source}/checkpoints/step_00000003 has 24{unfit}"),
        (["checkpoint.init=/nowhere"], "/nowhere: neither a checkpoint nor a run with checkpoints"),
        (["model=llama_tiny"], f"^model=llama: the checkpoint {source}/checkpoints/step_00000003 is of family gpt2; "),
        (["model=llama_tiny"], " or set another checkpoint.init"),
    ]
    init = f"checkpoint.init={source}"
    assert not wrong_messages(cases, lambda overrides: checkpoint_dir.check_run(tiny(init, *overrides)))
    expected = rf"another tokenizer; .*, such as data\.tokenizer={source}/checkpoints/step_00000003/tokenizer\.json, or"
    with pytest.raises(RankFailure, match=expected):
        ranks.run(1, train_in_rank, tiny(init, "data.tokenizer_vocab=280"))


def test_an_exported_model_is_not_taken_for_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a model of transformers or diffusers; import it first with python -m gpt4d"):
        generate.main([f"checkpoint={tmp_path}", "prompt=a"])
