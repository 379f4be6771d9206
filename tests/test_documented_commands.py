"""The documentation's commands are valid, and every message that docs/troubleshooting.md quotes exists."""

import ast
import re
import shlex
from importlib import import_module

import numpy as np
import pytest
from PIL import Image

from benchmarks import driver
from gpt4d.config import CONFIG_DIR, compose, known_keys
from gpt4d.data import tokenizers
from gpt4d.data.completion import completion
from gpt4d.planner import __main__ as planner
from gpt4d.planner import largest
from gpt4d.training import dry_run
from gpt4d.validation import validate
from tests.support.data_files import write
from tests.support.environment import REPOSITORY
from tests.support.planner_runs import ask

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
_STARTERS = r"(?:python|torchrun|srun|sbatch) "
_NODE_GPUS = 4  # of Perlmutter


def documented_commands() -> list[str]:
    """Return all commands in code blocks and inline code, each in one line, without comments."""
    commands = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        commands += [line.strip() for line in text.splitlines() if re.match(_STARTERS, line)]
        commands += re.findall(rf"`({_STARTERS}[^`]*)`", text)
    return [" ".join(command.partition("  #")[0].split()) for command in commands]


def arguments_of(command: str, program: str) -> list[str]:
    words = shlex.split(command, comments=True)
    return words[words.index(program) + 1 :]


def world_size_of(command: str) -> int:
    """Return the number of processes that a launcher starts."""
    for pattern, factor in ((r"--nproc-per-node (\d+)", 1), (r"--ntasks (\d+)", 1), (r"--nodes=(\d+)", _NODE_GPUS)):
        if found := re.search(pattern, command):
            return factor * int(found[1])
    return 1


COMMANDS = [command for command in documented_commands() if "…" not in command and "benchmarks" not in command]
RUNS = [command for command in COMMANDS if "train.py" in command or "scripts/slurm/" in command]
TRAINING = [command for command in RUNS if not re.search(" -m | --help| --cfg", command)]
BENCHMARKS = sorted({c for c in documented_commands() if c.startswith("python -m benchmarks ") and "…" not in c})
PLANNING = [c for c in COMMANDS if c.startswith("python -m gpt4d.planner ")]


def test_the_commands_are_found_and_have_no_unknown_key():
    assert len(TRAINING) >= 20 and len(PLANNING) >= 5 and len(BENCHMARKS) >= 20
    known = {*known_keys(), *(path.name for path in CONFIG_DIR.iterdir())}
    text = "".join(page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES)
    commands = re.findall(r"train\.py ([^`|#\n]+)", text)
    keys = {key for command in commands for key in re.findall(r"(?:^|\s)([a-z_]+[\w.]*)=\S", command)}
    assert len(keys) > 40 and keys <= known, keys - known


def test_the_machine_of_the_planners_guide_can_be_planned_for(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/guides/planner.md").read_text(), re.DOTALL)
    path = tmp_path / "lab.yaml"
    path.write_text(text, encoding="utf-8")
    assert len(text.splitlines()) == 8
    answer = ask(f"cluster={path}", "world_size=8", "model=gpt_125m", "parallel.pipeline.stages=1", "top=1")
    assert "gpt_125m on 8 device(s) of lab" in answer and "--nodes=2 --ntasks-per-node=4" in answer and "MFU" in answer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory with the files that the documentation names."""
    directory = tmp_path_factory.mktemp("documented")
    names = "books/a.txt", "letters/a.txt", "code/a.py", "dialogs/a.jsonl", "docs/a/a.md"
    texts = dict.fromkeys(names, "text " * 1000)
    found = re.findall(r"data.tokenizer=(runs/\S+)", "\n".join(COMMANDS))
    texts |= dict.fromkeys(found, tokenizers.train(["text"], 258).to_str())
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("crawl", "books"):
        path = directory / "tokens" / name / "train_0000.tokens"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1000))
        (path.parent / "header.json").write_text("{}")
        (directory / "megatron").mkdir(exist_ok=True)
        write(directory / "megatron" / f"{name}_text_document", [[1, 2, 3]])
    for path in re.findall(r"checkpoint.resume=(\S+/step_\d+)", "\n".join(COMMANDS)):
        (directory / path).mkdir(parents=True)
    (directory / "photos").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(directory / "photos/a.jpg")
    return directory


@pytest.mark.full
@pytest.mark.parametrize("command", TRAINING)
def test_a_documented_run_has_a_dry_run(command, directory, monkeypatch):
    monkeypatch.chdir(directory)
    program = next(word for word in command.split() if word.endswith(("train.py", ".sh")))
    overrides = [word for word in arguments_of(command, program) if word != "--dry-run"]
    if not any(word.startswith("cluster=") for word in overrides) or "cluster=mine" in overrides:
        overrides += ["cluster=perlmutter"]
    config, origins = completion(compose([word for word in overrides if word != "cluster=mine"] + ["run.dry=true"]))
    plan = validate(config, config.run.world_size or world_size_of(command))
    assert "nothing was started" in dry_run.report(plan, config, origins)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_documented_benchmark_reads_its_arguments(command):
    name, *arguments = arguments_of(command, "benchmarks")
    driver.settings_of(import_module(f"benchmarks.experiments.{name}"), arguments)


@pytest.mark.full
@pytest.mark.parametrize("command", PLANNING)
def test_a_documented_question_has_an_answer(command, capsys, monkeypatch):
    monkeypatch.setattr(largest, "_MODELS", ["gpt_125m"])
    planner.main([word.replace("cluster=mine", "cluster=local") for word in arguments_of(command, "gpt4d.planner")])
    assert "error" not in capsys.readouterr().out


PAGE = REPOSITORY / "docs/troubleshooting.md"
_SHORTEST = 4  # letters of a message without its values


def quoted() -> list[str]:
    """Return the code in the first cell of each row of a table: messages and keys of metrics.jsonl."""
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [message for cell in rows for message in re.findall(r"`([^`]+)`", cell)]


def texts(source: str) -> list[str]:
    """Return the texts in a module other than docstrings; ``…`` stands for the values of f-strings."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if id(node) in statements | parts:
            continue
        if isinstance(node, ast.JoinedStr):
            values = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(map(str, values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.fixture
def sources() -> list[str]:
    return [text for path in (REPOSITORY / "gpt4d").rglob("*.py") for text in texts(path.read_text(encoding="utf-8"))]


def is_in(message: str, sources: list[str]) -> bool:
    """Return whether a text contains ``message``, in which each ``…`` stands for any characters."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))))
    return any(pattern.search(text) for text in sources)


def test_every_quoted_message_and_key_of_metrics_exists_in_the_source(sources):
    codes = {*quoted()}
    messages = {code for code in codes if " " in code}
    assert messages and codes - messages
    assert not [message for message in messages if len(re.findall(r"\w", message)) < _SHORTEST]
    assert not [message for message in messages if not is_in(message, sources)]
    assert not [key for key in codes - messages if not all(is_in(part, sources) for part in key.split("."))]


def test_the_texts_of_a_module_are_complete_and_contain_no_docstrings():
    assert texts('"""A."""\nx = f"b {c} d" "e"\ny = "f" "g"\n') == ["b … de", "fg"]
    assert is_in("b … de", ["a b … de"]) and not is_in("d … b", ["b … de"])
