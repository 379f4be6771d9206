"""Our model in lm-evaluation-harness equals the harness's own model, on every plan.

With GPT4D_MODEL=DIR, a directory of transformers such as HuggingFaceTB/SmolLM2-135M-Instruct, that model is compared.
"""

import math
import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gpt4d.checkpoint.importer import import_model
from gpt4d.config import ConfigError
from gpt4d.evaluation import harness
from gpt4d.evaluation.harness import Harness
from gpt4d.evaluation.tasks import Tasks, result_values
from tests.evaluation.offline_tasks import write_tasks
from tests.support.data_files import one_line
from tests.support.evaluation_models import TEXT, imported, shared_model
from tests.support.grids import full

PAIRS = [
    ("", "The union"),
    ("The union of", " the states"),
    ("The union of ", "the people"),
    ("The union of the", " a"),
    ("The union of the", " p"),
    (TEXT * 3, "government of the people, by the people, for the people"),
    ("laws", TEXT[:60]),
]
PROMPTS = [
    ("The union", {"until": ["e"], "max_gen_toks": 8}),
    ("The people of the states", {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False}),
    (TEXT * 2, {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False}),
    ("laws", {"until": [], "max_gen_toks": 5, "temperature": 0}),
]
OWN = os.environ.get("GPT4D_MODEL")
FAMILIES = {"gpt2": None, "llama": "<s>"}  # and the first token of a text


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return, by family, a directory of transformers and the run that it was imported into."""
    if not OWN:
        return {family: imported(family, tmp_path_factory.mktemp(family), first) for family, first in FAMILIES.items()}
    import_model(OWN, run := tmp_path_factory.mktemp("own") / "run")
    return {"own": (OWN, run)}


def harness_answers(lm):
    """Return the log-likelihoods, greedy flags and texts of a model in the harness."""

    def requests(all_arguments):
        return [SimpleNamespace(args=arguments) for arguments in all_arguments]

    scores = lm.loglikelihood(requests(PAIRS), disable_tqdm=True)
    rolling = lm.loglikelihood_rolling(requests([(TEXT,), (TEXT * 4,)]), disable_tqdm=True)
    return (
        [float(score) for score, _ in scores] + [float(score) for score in rolling],
        [bool(greedy) for _, greedy in scores],
        lm.generate_until(requests(PROMPTS), disable_tqdm=True),
    )


def answers_on_rank(runs, settings):
    found = []
    for run in runs:
        with shared_model(run, **settings) as model:
            found.append(model.run(lambda model=model: harness_answers(Harness(model))))
    return found


@pytest.fixture(scope="module")
def expected(directories):
    from lm_eval.models.huggingface import HFLM

    def of(source):
        # With its cache, HFLM mistakes an answer of one token for a longer one after the same tokens.
        lm = HFLM(pretrained=str(source), device="cpu", dtype="float32", batch_size=2, logits_cache=False)
        return harness_answers(lm)

    return [of(source) for source, _ in directories.values()]


PLANS = [
    full({}),
    {"gx": 3} if OWN else {"gx": 2, "gy": 2},  # SmolLM2 has nine heads
    {"gz": 2, "stages": 2},
    full({"gx": 2, "gz": 2}),
    full({"gy": 2, "gdata": 2}),
    full({"gx": 2, "gy": 2, "gz": 2}),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_log_likelihoods_and_texts_equal_those_of_the_harness(ranks, directories, expected, plan):
    found, *_ = ranks.run(math.prod(plan.values()), answers_on_rank, [run for _, run in directories.values()], plan)
    for (scores, greedy, texts), (their_scores, their_greedy, their_texts) in zip(found, expected, strict=True):
        assert scores == pytest.approx(their_scores, abs=1e-5, rel=1e-5)
        assert greedy == their_greedy
        assert texts == their_texts and len(set(texts)) == len(texts)


def results_on_rank(run, names):
    tasks = Tasks(names) if dist.get_rank() == 0 else None
    with shared_model(run, gx=2) as model:
        return model.run(lambda: tasks.evaluate(model))


def test_results_of_tasks_equal_those_of_the_harness(ranks, directories, tmp_path):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    source, run = directories["llama"]
    files = write_tasks(tmp_path)
    found, other = ranks.run(2, results_on_rank, run, [*map(str, files.values())])
    assert other is None
    lm = HFLM(pretrained=str(source), device="cpu", dtype="float32", batch_size=2)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    theirs = simple_evaluate(lm, tasks=[*files], task_manager=manager, log_samples=False)["results"]
    ours = result_values(found)
    assert ours.keys() == theirs.keys() == files.keys()
    for task, values in ours.items():
        for metric, value in values.items():
            key = f"{metric},none" if "±" not in metric else f"{metric.removesuffix(' ± error')}_stderr,none"
            assert value == pytest.approx(theirs[task][key], rel=1e-5), (task, metric)
    assert {"acc", "acc_norm"} <= ours["choices"].keys() and "exact_match" in ours["answers"]


def failing_on_rank(run):
    def program():
        raise ConfigError("tasks=a: a mistake")

    with shared_model(run, gx=2) as model:
        try:
            model.run(program)
        except ConfigError as error:
            return str(error)


def test_an_error_of_a_task_is_raised_on_all_ranks(ranks, directories):
    _, run = directories["gpt2"]
    assert ranks.run(2, failing_on_rank, run) == ["tasks=a: a mistake"] * 2


def test_unusable_tasks_are_reported_in_one_line(tmp_path, monkeypatch):
    from lm_eval import tasks

    of_harness = tasks.TaskManager  # it takes many seconds to list the harness's own tasks
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: of_harness(**{**options, "include_defaults": False}))
    broken, remote, empty = tmp_path / "broken.yaml", tmp_path / "remote.yaml", write_tasks(tmp_path)["choices"]
    (tmp_path / "questions.jsonl").write_text('{"question": "a", "choices": ["", "b"], "label": 0}')
    broken.write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: none.jsonl}\n")
    remote.write_text("task: remote\ndataset_path: nobody/nothing\n")
    for name, message in (
        ("no_such_task", "tasks=no_such_task: lm-evaluation-harness has no such task"),
        (empty, "choices.yaml: cannot be loaded .* the first document may have an empty answer"),
        (broken, "cannot be loaded .*; correct the task"),
        (remote, "cannot be loaded .*; run the command once where there is a network"),
    ):
        with one_line(message):
            Tasks([str(name)])


SHELL = "popen('touch executed').read()"
REFUSED = "^allow_code=false: a file in .* executes the function"
CODE = [  # the rest of a task's file, and the line
    (f'doc_to_text: "{{{{ cycler.__init__.__globals__.os.{SHELL} }}}}"', "to attribute '__init__' .* is unsafe"),
    (f"doc_to_text: \"{{{{ lipsum.__globals__['os'].{SHELL} }}}}\"", "to attribute '__globals__' .* is unsafe"),
    ("doc_to_text: \"{{ choices.append('a') }}\"", "access to attribute 'append' .* is unsafe"),
    (
        'doc_to_text: "{% for a in range(99999) %}aaaaaaaaaa{% endfor %}"',
        "renders more than",
    ),
    ('doc_to_text: "{{ range(2) }}"', "takes more than"),
    ("process_docs: !function code.f", f"{REFUSED} code.f; read"),
    ("doc_to_text: !function os.getcwd", f"{REFUSED} os.getcwd; read"),
    ("include: included.yaml", f"{REFUSED} code.f; read"),
    (
        "metric_list: [{metric: code}]",
        "^allow_code=false: .* executes code for the metric code; read",
    ),
    ("metric_list: [{metric: bleu, hf_evaluate: true}]", "^allow_code=false: .* code for the metric bleu; read"),
]


@pytest.mark.parametrize(("line", "message"), CODE)
def test_files_of_tasks_execute_no_code(tmp_path, monkeypatch, line, message):
    monkeypatch.chdir(tmp_path)
    if message == "takes more than":
        monkeypatch.setattr(harness, "_SECONDS", -1.0)
    monkeypatch.setattr(harness, "_CHARACTERS", 10_000)
    path = write_tasks(tmp_path)["choices"]
    kept = [each for each in path.read_text().splitlines() if not each.startswith(line.split(":")[0])]
    path.write_text("\n".join([*kept, line]))
    (tmp_path / "included.yaml").write_text("process_docs: !function code.f")
    (tmp_path / "code.py").write_text("open('executed', 'w')")
    with one_line(message):
        Tasks([str(path)])
    assert not (tmp_path / "executed").exists()


def test_functions_of_the_harness_need_no_permission():
    from lm_eval.tasks import _yaml_loader

    with harness.without_code(allowed=False, local=True):
        assert callable(_yaml_loader._import_func_in_yml("utils.process_docs", harness._LIBRARY / "hellaswag"))
