"""The models that a machine can train: largest=true."""

import json
import threading

import pytest

from gpt4d.planner import __main__ as planner
from gpt4d.planner import largest
from gpt4d.planner.options import open_keys
from gpt4d.planner.search import rank
from tests.support.planner_runs import ask
from tests.support.settings import configured

QUERY = "largest=true", "cluster=rtx4090"
LORA = ["train.seq_len=2048", "lora.rank=16", "lora.targets=[qkv,output]"]


def test_the_models_that_fit_have_a_speed_for_each_kind_of_training_and_the_others_are_named(monkeypatch):
    monkeypatch.setattr(largest, "_MODELS", ["gpt_20b", "gpt_125m", "llama3_8b", "unet_50m"])
    answer = ask(*QUERY)
    speeds = {line.split()[0]: line.count("/s ") for line in answer.splitlines() if line.strip()}
    assert [speeds.get(name) for name in ("unet_50m", "gpt_125m", "llama3_8b", "gpt_20b")] == [1, 3, 1, None]
    assert "1 models do not fit: gpt_20b" in answer


def test_a_speed_is_that_of_the_planners_first_choice(monkeypatch):
    monkeypatch.setattr(largest, "_MODELS", ["gpt_125m", "llama3_8b"])
    small, large = json.loads(ask(*QUERY, "format=json"))
    assert {*small} == {"model", "parameters", *largest._KINDS} and {*large} == {"model", "parameters", "LoRA"}
    for found, kind, words in ((small, "pretrain", []), (large, "LoRA", LORA)):
        config = configured([f"model={found['model']}", "cluster=rtx4090", "train.batch_size=8", *words])
        (plan,) = rank(config, 1, 1, keys=open_keys(config)).plans
        answer = found[kind]
        assert answer["tokens_per_s"] == pytest.approx(8 * config.train.seq_len / plan.step_time_s)
        assert answer["overrides"] == plan.overrides and answer["memory_gib"] == plan.memory_gib


def test_a_terminal_shows_the_progress_of_a_long_search(monkeypatch, capsys):
    monkeypatch.setattr(planner, "_SILENT_S", 0.0)
    shown = threading.Event()
    with planner.long_search():
        assert not capsys.readouterr().err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with planner.long_search():
        while "planning for 0 s" not in capsys.readouterr().err:
            shown.wait(0.001)
    assert capsys.readouterr().err.endswith("\r\033[K")
