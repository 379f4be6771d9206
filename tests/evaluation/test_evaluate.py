"""The command gpt4d evaluate: results on the console, in a file and in metrics.jsonl, and mistakes in one line."""

import json

import pytest

from gpt4d import evaluate
from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.importer import import_model
from tests.evaluation.offline_tasks import write_tasks
from tests.support.data_files import one_line
from tests.support.evaluation_models import imported, random_model
from tests.support.grids import train_in_rank
from tests.support.jobs import run_command


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("without_tokenizer")
    random_model("gpt2").save_pretrained(directory / "source")
    import_model(str(directory / "source"), directory / "run", "none")
    return directory / "run"


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_results_go_to_the_console_a_file_and_the_metrics_of_the_run(ranks, tiny, files, tmp_path, capsys):
    config, run_dir = tiny("train.steps=3"), tmp_path / "run"
    ranks.run(1, train_in_rank, config)
    before = lines_of(run_dir)
    arguments = [f"checkpoint={run_dir}", f"tasks={files['choices']},{files['answers']}", "limit=4"]
    outs = [tmp_path / f"results-{number}.json" for number in range(2)]
    evaluate.main([*arguments, f"out={outs[0]}"])
    done = run_command(ranks.context, "-m", "gpt4d", "evaluate", *arguments, f"out={outs[1]}", "gx=2", ranks=2)
    assert done.returncode == 0, done.stderr
    for printed in (capsys.readouterr().out, done.stdout):
        assert "acc_norm" in printed and "exact_match" in printed
    first, second = (json.loads(out.read_text()) for out in outs)
    assert first["checkpoint"] == str(run_dir / "checkpoints" / "step_00000003") and first["limit"] == 4
    assert {"acc", "acc ± error", "acc_norm"} <= first["tasks"]["choices"].keys()
    for task, values in first["tasks"].items():
        assert second["tasks"][task] == pytest.approx(values, rel=1e-5)
    *earlier, one, other = lines_of(run_dir)
    assert earlier == before
    for line, results in ((one, first), (other, second)):
        assert (line["event"], line["step"], line["elapsed_s"]) == ("evaluation", 3, before[-1]["elapsed_s"])
        assert line["tasks"] == results["tasks"] and line["checkpoint"] == results["checkpoint"]


def test_an_imported_model_is_evaluated_without_metrics_of_a_run(files, tmp_path):
    _, run = imported("gpt2", tmp_path)
    out = tmp_path / "results.json"
    evaluate.main([f"checkpoint={run}", f"tasks={files['choices']}", "limit=2", f"out={out}"])
    assert json.loads(out.read_text())["tasks"]["choices"] and not (run / "metrics.jsonl").exists()


def test_mistakes_are_found_before_a_process_group_exists(without_tokenizer, files, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "trained_model", None)  # a command that starts fails with another error
    model, task = f"checkpoint={without_tokenizer}", f"tasks={files['choices']}"
    for arguments, message in (
        ([task], r"checkpoint=… is missing"),
        ([model], r"^tasks=…: .* has a model of text; set tasks=hellaswag$"),
        ([model, task, "images=3"], r"^images=3: only for models of images, not for .*; leave it out"),
        ([model, task, "examples=3"], r"^examples: there is no such key"),
        ([model, task, "limit=0"], r"^limit=0: use a value of at least 1"),
        ([model, "tasks=none.yaml"], r"^tasks=none\.yaml: no such file"),
        ([model, f"{task},"], r"a name is empty"),
        ([f"checkpoint={tmp_path}", task], r"neither a checkpoint nor a run"),
        ([model, task, "gx=2"], r"^gx·gy·gz·gdata·stages=2·1·1·1·1: not a plan for 1 process"),
        ([model, task], r"it has no tokenizer; import the model with tokenizer"),
    ):
        with one_line(message):
            evaluate.main(arguments)


def test_a_model_of_images_has_no_tasks(without_tokenizer, files, monkeypatch):
    checkpoint = Checkpoint.open(without_tokenizer)
    checkpoint.meta.task = "diffusion"
    monkeypatch.setattr(Checkpoint, "open", lambda path: checkpoint)
    for words, message in (
        ([], r"^metrics=…: .* has a model of images; set metrics=fid$"),
        (["metrics=fid", f"tasks={files['choices']}"], r"^tasks=.*: only for models of text, not for .*; leave it out"),
    ):
        with one_line(message):
            evaluate.main([f"checkpoint={without_tokenizer}", *words])
