"""The commands of the tutorials run in order in an empty directory, with fewer steps and smaller models."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Whitespace

from tests.checkpoint.test_exporter_llama import MODEL, save
from tests.support.jobs import run_command
from tests.test_cli import ROOT

PAGES = {path.stem: path for path in sorted((ROOT / "docs/tutorials").glob("*.md"))}
_NODE_GPUS = 4  # of Perlmutter, and of the options of generic.sh on the page

# Overrides that make the training of a page small. They replace overrides of the page with the same key.
_TEXT = [
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab_size=300", "model.max_positions=32",
    "model.vocab_multiple=4", "train.batch_size=8", "train.seq_len=16", "logging.sample_tokens=4",
]  # fmt: skip
_IMAGES = ["model.image_size=8", "model.channels=8", "model.groups=4", "model.head_size=4", "model.attention_at=[4]",
           "model.multipliers=[1,2]", "model.blocks_per_level=1", "train.batch_size=8", "logging.sample_images=2",
           "logging.sample_steps=2"]  # fmt: skip
SMALLER = {
    "own_text": _TEXT,
    "pretrained_model": ["train.batch_size=8", "train.seq_len=16"],
    "slurm_job": [*_TEXT, "data=text", "data.path=docs/**/*.md"],
    "which_grid": [*_TEXT, "data=text", "data.path=docs/**/*.md"],
    "model_family": [
        "model.vocab_size=300", "train.batch_size=8", "train.seq_len=16", "data=text", "data.path=docs/**/*.md",
    ],
    "images": _IMAGES,
}  # fmt: skip
_SEARCH = ["model=gpt_125m", "parallel.pipeline.stages=1"]  # a search of the planner takes a second with them
_ALWAYS = ["train.validation_batches=1", "optim.warmup_steps=0", "cluster=local"]


def commands_of(page: Path) -> list[str]:
    """Return the commands in the page's code blocks, in order and in one line each, without comments."""
    blocks = page.read_text(encoding="utf-8").split("```")[1::2]
    commands = "".join(block.removeprefix("\n") for block in blocks if block.startswith("\n"))
    lines = commands.replace("\\\n", " ").splitlines()
    return [" ".join(line.partition("  #")[0].split()) for line in lines]


def modules_of(page: Path) -> dict[str, str]:
    """Return the Python files that a page shows, by name."""
    text = page.read_text(encoding="utf-8")
    return dict(re.findall(r"\(`(\w+\.py)`\):\n\n```python\n(.*?)```", text, re.DOTALL))


def overridden(words: list[str], overrides: list[str]) -> list[str]:
    """Return a command whose overrides are replaced by ``overrides`` of the same key, and extended by the rest."""
    keys = {override.partition("=")[0] for override in overrides}
    return [word for word in words if word.partition("=")[0] not in keys] + overrides


@pytest.fixture
def directory(tmp_path) -> Path:
    """Return a clone in miniature: links to the programs, a page as text, photos, and a model under its hub name."""
    for name in ("train.py", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "docs/guides/data.md").read_text(encoding="utf-8")
    for number, paragraphs in enumerate(text.split("\n## ")):
        path = tmp_path / f"docs/guides/{number}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(paragraphs, encoding="utf-8")
    (tmp_path / "photos").mkdir()
    for number in range(12):
        photo = np.full((12, 16, 3), 20 * number, np.uint8)
        Image.fromarray(photo).save(tmp_path / f"photos/{number}.png")
    source = tmp_path / "HuggingFaceTB/SmolLM2-135M"
    source.mkdir(parents=True)
    save(source, replace(MODEL, vocab_size=300))
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.pre_tokenizer = Whitespace()  # otherwise, a document is one token
    tokenizer.save(str(source / "tokenizer.json"))
    for name, code in modules_of(ROOT / "docs/guides/extending.md").items():
        (tmp_path / name).write_text(code)
    return tmp_path


class Tutorial:
    """The commands of one page, with what earlier commands have printed."""

    def __init__(self, context, name: str, directory: Path):
        self.context, self.name, self.directory = context, name, directory
        self.printed: list[str] = []
        for file, code in modules_of(PAGES[name]).items():
            (directory / file).write_text(code)

    def run(self, command: str) -> None:
        words = shlex.split(command)
        ranks = 1
        if words[0] == ".":
            return  # the tests' environment is active
        if words[0] == "sbatch":
            words = self._dry_run_of_batch(words)
        elif words[0] == "torchrun":
            ranks = int(words[2])
            words = ["python", *words[3:]]
        assert words.pop(0) == "python", command
        if "gpt4d.planner" in words or {"parallel.mode=auto", "--dry-run"} <= {*words}:
            words = overridden(words, _SEARCH)
        elif words[0].startswith("train") and "--dry-run" not in words:
            words = self._smaller(words)
        done = run_command(self.context, *words, ranks=ranks, directory=self.directory)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        self.printed.append(done.stdout)

    def _smaller(self, words: list[str]) -> list[str]:
        """Return a training command of a few steps on a small model.

        ``…`` stands for settings that an import has printed.
        """
        if "…" in words:
            index = words.index("…")
            printed = next(line for line in "".join(self.printed).splitlines() if "python train.py" in line)
            words[index : index + 1] = re.findall(r"model(?:\.\w+)?=\S+", printed)
        asked = next(int(word.partition("=")[2]) for word in words if word.startswith("train.steps="))
        steps = f"train.steps={max(2, asked // 25)}"
        return overridden(words, [*SMALLER[self.name], *_ALWAYS, steps])

    def _dry_run_of_batch(self, words: list[str]) -> list[str]:
        """Return the dry run of the training that a batch script starts."""
        script = next(index for index, word in enumerate(words) if word.startswith("scripts/slurm/"))
        assert (self.directory / words[script]).exists()
        nodes = next(int(word.partition("=")[2]) for word in words if word.startswith("--nodes="))
        size = f"run.world_size={nodes * _NODE_GPUS}"
        return ["python", "train.py", *words[script + 1 :], "cluster=perlmutter", size, "--dry-run"]


def check_which_grid(tutorial: Tutorial) -> None:
    """Check that the planner's command names a grid, and that the run is on the planner's choice."""
    assert "python train.py" in tutorial.printed[0] or "sbatch" in tutorial.printed[0]
    assert "parallel.mode=auto on" in tutorial.printed[-1]


def check_own_text(tutorial: Tutorial) -> None:
    """Check that the dry run starts nothing, the second training continues the first, and the export is a model."""
    assert "nothing was started" in tutorial.printed[0]
    starts = (tutorial.directory / "runs/own-text/starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, 4]
    assert (tutorial.directory / "exported/config.json").exists()


def check_pretrained_model(tutorial: Tutorial) -> None:
    """Check that the training began with the weights of the import."""
    (start,) = (tutorial.directory / "runs/smollm2-own/starts.jsonl").read_text().splitlines()
    assert json.loads(start)["init"].startswith("runs/smollm2/")


def check_slurm_job(tutorial: Tutorial) -> None:
    """Check that the second grid resumes the first, and both batch scripts train on 8 GPUs."""
    starts = (tutorial.directory / "runs/first/starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, 2]
    assert sum("on 8 device(s) of" in text for text in tutorial.printed) == 3


def check_model_family(tutorial: Tutorial) -> None:
    """Check that the losses on two processes are the losses on one."""
    found = []
    for name in ("mixer-on-1", "mixer-on-2"):
        lines = map(json.loads, (tutorial.directory / f"runs/{name}/metrics.jsonl").read_text().splitlines())
        found.append([line["loss"] for line in lines if "event" not in line])
    assert found[0] and found[1] == pytest.approx(found[0], rel=1e-5)


def check_images(tutorial: Tutorial) -> None:
    """Check that the images that the commands name are written."""
    for name in ("earth.png", "photos.png", "runs/earth/samples.png"):
        assert Image.open(tutorial.directory / name).size[0] > 0


CHECKS = {
    "own_text": check_own_text,
    "pretrained_model": check_pretrained_model,
    "slurm_job": check_slurm_job,
    "which_grid": check_which_grid,
    "model_family": check_model_family,
    "images": check_images,
}


@pytest.mark.full
@pytest.mark.parametrize("name", CHECKS)
def test_the_commands_of_a_tutorial_run_in_order(ranks, directory, name):
    tutorial = Tutorial(ranks.context, name, directory)
    for command in commands_of(PAGES[name]):
        tutorial.run(command)
    CHECKS[name](tutorial)


def test_every_page_is_short_has_commands_and_is_executed():
    assert PAGES.keys() == SMALLER.keys() == CHECKS.keys()
    for page in PAGES.values():
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 80, page
        assert commands_of(page)
