"""Every command for train.py, the planner and the benchmarks in README and docs is valid."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import driver
from gpt4d import dry_run
from gpt4d.data import tokenizers
from gpt4d.planner import __main__ as planner
from gpt4d.validation import validate
from tests.data.test_megatron import write
from tests.support.settings import configured

REPOSITORY = Path(__file__).parents[1]
_STARTERS = r"(?:python|torchrun|srun|sbatch) "
_NODE_GPUS = 4  # of Perlmutter


def documented_commands() -> list[str]:
    """Return all commands in code blocks and inline code, each in one line, without comments."""
    commands = []
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))):
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


def test_the_commands_are_found():
    assert len(TRAINING) >= 20 and len(PLANNING) >= 5 and len(BENCHMARKS) >= 20


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
    (directory / "megatron").mkdir()
    for name in ("crawl", "books"):
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
    config = configured([word for word in overrides if word != "cluster=mine"] + ["run.dry=true"])
    plan = validate(config, config.run.world_size or world_size_of(command))
    assert "nothing was started" in dry_run.report(plan, config)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_documented_benchmark_reads_its_arguments(command):
    name, *arguments = arguments_of(command, "benchmarks")
    driver.settings_of(import_module(f"benchmarks.experiments.{name}"), arguments)


@pytest.mark.full
@pytest.mark.parametrize("command", PLANNING)
def test_a_documented_question_has_an_answer(command, capsys):
    planner.main([word.replace("cluster=mine", "cluster=local") for word in arguments_of(command, "gpt4d.planner")])
    assert "error" not in capsys.readouterr().out
