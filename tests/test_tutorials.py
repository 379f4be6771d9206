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

from tests.support.checkpoint_sources import MODEL, save
from tests.support.environment import REPOSITORY
from tests.support.grids import metric_lines
from tests.support.jobs import run_command
from tests.support.pages import commands_of, modules_of, overridden

TUTORIALS = {path.stem: path for path in sorted((REPOSITORY / "docs/tutorials").glob("*.md"))}
PAGES = TUTORIALS | {"long_context": REPOSITORY / "docs/guides/long_context.md"}
_NODE_GPUS = 4  # of Perlmutter, and of the options of generic.sh on the page

# Overrides that make the training of a page small. They replace overrides of the page with the same key.
_TEXT = [
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab_size=300", "model.max_positions=32",
    "model.vocab_multiple=4", "train.batch_size=8", "train.seq_len=16", "logging.sample_tokens=4",
]  # fmt: skip
_IMAGES = [
    "model.image_size=8", "model.channels=8", "model.groups=4", "model.head_size=4", "model.attention_at=[4]",
    "model.multipliers=[1,2]", "model.blocks_per_level=1", "train.batch_size=8", "logging.sample_images=2",
    "logging.sample_steps=2",
]  # fmt: skip
_DOCS = ["data=text", "data.path=docs/**/*.md"]
SMALLER = {
    "own_text": _TEXT,
    "pretrained_model": ["train.batch_size=8", "train.seq_len=16"],
    "slurm_job": [*_TEXT, *_DOCS],
    "which_grid": [*_TEXT, *_DOCS],
    "model_family": ["model.vocab_size=300", "train.batch_size=8", "train.seq_len=16", *_DOCS],
    "images": _IMAGES,
    "long_context": ["data.processes=1"],
}  # fmt: skip
_SEARCH = ["model=gpt_125m", "parallel.pipeline.stages=1"]  # a search of the planner takes a second with them
_ALWAYS = ["train.validation_batches=1", "optim.warmup_steps=0", "cluster=local"]


@pytest.fixture
def directory(tmp_path) -> Path:
    """Return a clone in miniature: links to the programs, a page as text, photos, and a model under its hub name."""
    for name in ("train.py", "scripts"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    text = (REPOSITORY / "docs/guides/data.md").read_text(encoding="utf-8")
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
    for name, code in modules_of(REPOSITORY / "docs/guides/extending.md").items():
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
        words, ranks = shlex.split(command), 1
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
        """Return a training of a few steps on a small model. ``…`` stands for settings that an import has printed."""
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


def check(name: str, directory: Path, printed: list[str]) -> None:
    """Check the files that the commands of a page have written, and the texts that they have printed."""

    def starts(run):
        return [json.loads(line) for line in (directory / "runs" / run / "starts.jsonl").read_text().splitlines()]

    if name == "which_grid":  # the planner's command names a grid, and the run is on the planner's choice
        assert "python train.py" in printed[0] or "sbatch" in printed[0]
        assert "parallel.mode=auto on" in printed[-1]
    elif name == "own_text":  # the second training continues the first, and the export is a model
        assert "nothing was started" in printed[0]
        assert [start["step"] for start in starts("own-text")] == [0, 4]
        assert (directory / "exported/config.json").exists()
    elif name == "pretrained_model":  # the training began with the weights of the import
        (start,) = starts("smollm2-own")
        assert start["init"].startswith("runs/smollm2/")
    elif name == "slurm_job":  # the second grid resumes the first, and both batch scripts train on 8 GPUs
        assert [start["step"] for start in starts("first")] == [0, 2]
        assert sum("on 8 device(s) of" in text for text in printed) == 3
    elif name == "model_family":  # the losses on two processes are the losses on one
        one, two = ([x["loss"] for x in metric_lines(directory / f"runs/mixer-on-{ranks}")] for ranks in (1, 2))
        assert one and two == pytest.approx(one, rel=1e-5)
    elif name == "long_context":
        configs = [json.loads((directory / length / "config.json").read_text()) for length in ("short", "long")]
        assert [config["max_position_embeddings"] for config in configs] == [256, 1024]
    else:
        assert name == "images"
        for image in ("earth.png", "photos.png", "runs/earth/samples.png"):
            assert Image.open(directory / image).size[0] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", SMALLER)
def test_the_commands_of_a_tutorial_run_in_order(ranks, directory, name):
    tutorial = Tutorial(ranks.context, name, directory)
    for command in commands_of(PAGES[name]):
        tutorial.run(command)
    check(name, directory, tutorial.printed)


def test_every_page_is_short_has_commands_and_is_executed():
    assert PAGES.keys() == SMALLER.keys()
    for page in TUTORIALS.values():
        assert len(page.read_text(encoding="utf-8").splitlines()) <= 80, page
    assert all(map(commands_of, PAGES.values()))
