"""Evaluation during training: results equal the results of the checkpoint, and no loss of the training changes."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from gpt4d.config import ConfigError
from gpt4d.evaluation import during_training
from gpt4d.evaluation.harness import Harness
from gpt4d.evaluation.tasks import Tasks, result_values
from gpt4d.training.trainer import Trainer
from gpt4d.validation import validate
from tests.evaluation.offline_tasks import write_tasks
from tests.support.data_files import one_line
from tests.support.evaluation_models import shared_model
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.run_files import events
from tests.support.settings import configured

DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1", "train.deterministic=true")
PLANS = [
    full(1, ["optim.ema_decay=0.9"]),
    full(2, ["parallel.gz=2", "optim.ema_decay=0.9"]),
    (3, ["parallel.pipeline.stages=2", "parallel.pipeline.stage_grids=[1x1x2x1,1x1x1x1]", "optim.ema_decay=0.9"]),
    full(2, ["parallel.gdata=2", "optim.shard_states=true", "optim.ema_decay=0.9"]),
    full(2, ["parallel.pipeline.stages=2", "parallel.pipeline.microbatches=4"]),
    full(2, ["parallel.gx=2", "parallel.sequence_parallel=true", "parallel.chunks=2"]),
    full(2, ["parallel.gz=2", "parallel.cache_layers=all", "parallel.cache_scope=step"]),
]


def results_of(checkpoint, names, limit):
    """Return the results of a checkpoint on one rank, as gpt4d evaluate computes them."""
    with shared_model(checkpoint, batch_size=2) as model:
        return result_values(model.run(lambda: Tasks(names, limit).evaluate(model, errors=False)))


@pytest.mark.parametrize(("world", "overrides"), PLANS, ids=str)
def test_results_equal_those_of_the_checkpoint_and_no_loss_changes_a_bit(ranks, tiny, tmp_path, world, overrides):
    tasks = [*map(str, write_tasks(tmp_path).values())]
    common = [*DROPOUT, *overrides, "train.steps=3", "checkpoint.every=2", "checkpoint.keep=9"]
    evaluated = [f"evaluate.tasks=[{','.join(tasks)}]", "evaluate.every=2", "evaluate.limit=4", "evaluate.batch_size=3"]
    found = []
    for name, words in (("plain", []), ("evaluated", evaluated)):
        ranks.run(world, train_in_rank, tiny(*common, *words, f"run.dir={tmp_path / name}"))
        found.append([(line["loss"], line["grad_norm"]) for line in metric_lines(tmp_path / name)])
    assert found[0] == found[1] and len(found[0]) == 3
    lines = [json.loads(line) for line in (tmp_path / "evaluated" / "metrics.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event") == "evaluation"]
    assert [line["step"] for line in events] == [2, 3]
    assert [line["tokens"] for line in events] == [step * 16 * 16 for step in (2, 3)]
    assert events[0]["limit"] == 4
    for event in events:
        checkpoint = tmp_path / "evaluated" / "checkpoints" / f"step_{event['step']:08}"
        (expected,) = ranks.run(1, results_of, checkpoint, tasks, 4)
        assert event["tasks"].keys() == {"choices", "answers", "rolling"} == expected.keys()
        for task, values in expected.items():
            assert event["tasks"][task] == pytest.approx(values, rel=1e-5)


def test_an_evaluation_restores_random_states_and_shows_no_bar(capsys):
    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draws() for _ in range(2)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = [draws()]
    with during_training.without_effects():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        draws()
        assert list(tqdm(range(3), disable=False)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert [*found, draws()] == expected
    list(tqdm(range(3)))
    assert "3/3" in capsys.readouterr().err


def test_mistakes_are_found_before_a_run_starts():
    for words, message in (
        ("evaluate.every=5", r"^evaluate\.every=5: no task is named; set evaluate\.tasks=\[hellaswag\]"),
        ("evaluate.every=5 evaluate.tasks=[none.yaml]", r"^evaluate\.tasks=none\.yaml: no such file"),
        ("evaluate.every=5 evaluate.tasks=['']", r"^evaluate\.tasks=: a name is empty"),
        ("evaluate.tasks=[arc_easy]", r"^evaluate\.tasks=\['arc_easy'\]: evaluate\.every=0 does not read it"),
        ("model=unet_tiny evaluate.every=5 evaluate.tasks=[a]", r"^evaluate\.every=5: .* is trained on images"),
    ):
        with one_line(message):
            validate(configured(words.split()), 1)


def error_of_a_run(config):
    try:
        Trainer(validate(config, dist.get_world_size()), torch.device("cpu")).run()
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [("dataset_kwargs: {data_files: none.jsonl}", "cannot be loaded"), ("output_type: no_such_type", "cannot be")],
)
def test_unusable_tasks_end_the_run_on_all_ranks_with_one_line(ranks, tiny, tmp_path, settings, message):
    task = tmp_path / "broken.yaml"
    task.write_text(f"task: broken\ndataset_path: json\n{settings}\n")
    config = tiny("parallel.gx=2", "evaluate.every=1", f"evaluate.tasks=[{task}]")
    first, second = ranks.run(2, error_of_a_run, config)
    assert first == second and first.startswith(f"evaluate.tasks={task}: {message}") and "\n" not in first


METRIC = """
calls = 0

def count(doc, results):
    global calls
    calls += 1
    if calls > 4:
        {}
    return {{"acc": 1.0}}
"""


@pytest.mark.parametrize("failure", ["raise ValueError('metric broke')", full("raise SystemExit"), full("1 / 0")])
def test_a_metric_that_fails_costs_an_evaluation_and_no_step_of_the_run(ranks, tiny, tmp_path, failure):
    """It fails at the second evaluation, in a step that is also saved."""
    task = write_tasks(tmp_path)["choices"]
    task.write_text(task.read_text() + "process_results: !function metric.count\n")
    (tmp_path / "metric.py").write_text(METRIC.format(failure))
    common = ["parallel.gx=2", "train.steps=6", "checkpoint.every=2"]
    evaluated = [f"evaluate.tasks=[{task}]", "evaluate.every=2", "evaluate.limit=4", "evaluate.allow_code=true"]
    found = []
    for name, words in (("plain", []), ("evaluated", evaluated)):
        ranks.run(2, train_in_rank, tiny(*common, *words, f"run.dir={tmp_path / name}"))
        found.append([line["loss"] for line in metric_lines(tmp_path / name)])
    assert found[0] == found[1] and len(found[0]) == 6
    of_run = events(tmp_path / "evaluated", "evaluation", "evaluation_failed", "checkpoint", "done")
    kinds = [(line["event"], line["step"]) for line in of_run if line["event"] != "checkpoint"]
    assert kinds == [("evaluation", 2), ("evaluation_failed", 4), ("evaluation_failed", 6), ("done", 6)]
    assert all("evaluate.tasks=" in line["problem"] for line in of_run if line["event"] == "evaluation_failed")
    assert (tmp_path / "evaluated/checkpoints/step_00000004").is_dir()


def test_an_answer_without_tokens_is_one_line_with_task_and_document():
    model = SimpleNamespace(tokenizer=SimpleNamespace(), scores=None)
    requests = [SimpleNamespace(args=("a", answer), task_name="t", doc_id=doc) for doc, answer in enumerate(("b", ""))]
    lm = Harness(model)
    lm.tok_encode = lambda text, **_: list(text.encode())
    with one_line("^tasks=t: document 1 has a question or an answer without tokens"):
        lm.loglikelihood(requests)
