"""Evaluate a trained model: a text model on tasks of lm-evaluation-harness, an image model by the FID of its images.

python -m gpt4d.evaluate checkpoint=runs/NAME tasks=hellaswag,arc_easy limit=200
python -m gpt4d.evaluate checkpoint=runs/NAME tasks=my_task.yaml out=results.json
torchrun --nproc-per-node 4 -m gpt4d.evaluate checkpoint=runs/NAME tasks=hellaswag gx=2 gdata=2
python -m gpt4d.evaluate checkpoint=runs/NAME metrics=fid images=2000
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.trained_model import inference_plan, trained_model
from gpt4d.config import ConfigError, asks_for_help, from_arguments, setting
from gpt4d.config.commands import one_line_errors
from gpt4d.data import transformers_tokenizer
from gpt4d.evaluation import images
from gpt4d.evaluation.shared_model import SharedModel
from gpt4d.evaluation.tasks import Tasks, check_names, result_values, results_table
from gpt4d.plan import ParallelPlan
from gpt4d.runs.logger import last_elapsed_s
from gpt4d.runtime.consensus import run_on_rank0
from gpt4d.runtime.files import LineLog, read_json_lines, replace_file, required_file
from gpt4d.runtime.launch import Launch
from gpt4d.task import registry as tasks
from gpt4d.task.task import InferenceConfig


@dataclass
class EvaluateConfig(InferenceConfig):
    """Settings of ``gpt4d evaluate``."""

    tasks: str | None = setting(None, "text: tasks of the harness, YAML files or their directories, with commas")
    metrics: str | None = setting(None, "images: fid, the Fréchet distance to the training images", choices=("fid",))
    limit: int | None = setting(None, "number of documents of each task; null: all", at_least=1)
    num_fewshot: int | None = setting(None, "examples before each question; null: each task's number", at_least=0)
    chat_template: bool = setting(False, "questions are messages in the model's chat template")
    batch_size: int = setting(16, "sequences that all processes compute together", at_least=1)
    allow_code: bool = setting(False, "tasks in local files may execute functions of Python")
    images: int = setting(2048, "images: number of generated images", at_least=2)
    steps: int = setting(50, "images: DDIM steps for each image", at_least=1)
    seed: int = setting(0, "images: seed of the images")
    inception: str | None = setting(None, "images: file of Inception-v3's weights; null: the file in torch's cache")
    out: str | None = setting(None, "JSON file to write")


# Keys for each kind of model; the first one is required.
_KEYS = {
    "text": ("tasks", "limit", "num_fewshot", "chat_template", "batch_size", "allow_code"),
    "images": ("metrics", "images", "steps", "seed", "inception"),
}
_EXAMPLES = {"text": "tasks=hellaswag", "images": "metrics=fid"}


def main(arguments: list[str]) -> None:
    """Evaluate the checkpoint that ``arguments`` name, and print the results on rank 0."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    config, launch = from_arguments(EvaluateConfig, arguments), Launch.from_environment()
    checkpoint = Checkpoint.open(Path(config.checkpoint))
    kind = tasks.get(checkpoint.meta.task).data
    _check_keys(config, kind, checkpoint.path)
    plan = inference_plan(checkpoint.meta.model, config, launch.world_size)
    if config.out:
        with required_file(Path(config.out)):
            Path(config.out).touch()
    evaluate = {"text": _evaluate_text, "images": _evaluate_images}[kind]
    evaluate(config, checkpoint, plan, launch)


def _check_keys(config: EvaluateConfig, kind: str, checkpoint: Path) -> None:
    """Raise ConfigError if the first key of the kind of model is missing, or if a key of another kind is set."""
    main, *_ = _KEYS[kind]
    if getattr(config, main) is None:
        raise ConfigError(f"{main}=…: {checkpoint} has a model of {kind}; set {_EXAMPLES[kind]}")
    default = EvaluateConfig(config.checkpoint)
    for other, keys in _KEYS.items():
        for key in keys:
            value = getattr(config, key)
            if other != kind and value != getattr(default, key):
                raise ConfigError(f"{key}={value}: only for models of {other}, not for {checkpoint}; leave it out")


def _evaluate_text(config: EvaluateConfig, checkpoint: Checkpoint, plan: ParallelPlan, launch: Launch) -> None:
    assert config.tasks is not None
    names, files, settings = config.tasks.split(","), checkpoint.model_files(), cast(Any, checkpoint.meta.model)
    check_names(names)
    tokenizer = transformers_tokenizer.load(files, checkpoint.path, settings.max_positions)
    if config.chat_template and not tokenizer.chat_template:
        raise ConfigError("chat_template=true: the checkpoint's tokenizer has no chat template; leave it out")
    with trained_model(checkpoint, plan, launch) as stage:
        loaded: list[Tasks] = []  # on rank 0
        limits = config.limit, config.num_fewshot, config.chat_template, config.allow_code
        run_on_rank0(lambda: loaded.append(Tasks(names, *limits)), "loading the tasks")
        ends = transformers_tokenizer.end_tokens(tokenizer, files)
        shared = SharedModel(stage, tokenizer, ends, config.batch_size)
        began = time.monotonic()
        results = shared.run(lambda: loaded[0].evaluate(shared))
        if results is not None:
            Console().print(results_table(results))
            values = {"limit": config.limit, "tasks": result_values(results)}
            _report(config, checkpoint, values, time.monotonic() - began)


def _evaluate_images(config: EvaluateConfig, checkpoint: Checkpoint, plan: ParallelPlan, launch: Launch) -> None:
    with trained_model(checkpoint, plan, launch) as stage:
        began, real = time.monotonic(), images.training_images(checkpoint)
        result = images.evaluate(stage, real, config.images, config.steps, config.seed, config.inception)
        if launch.rank == 0:
            print(result.message)
            _report(config, checkpoint, result.values, time.monotonic() - began)


def _report(config: EvaluateConfig, checkpoint: Checkpoint, found: dict[str, Any], seconds: float) -> None:
    """Write the results to ``out``, and add them to the metrics of the checkpoint's run."""
    values = {"checkpoint": str(checkpoint.path), **found}
    if config.out:
        with required_file(Path(config.out)):
            replace_file(
                Path(config.out), json.dumps({**values, "seconds": seconds}, indent=2, ensure_ascii=False) + "\n"
            )
    log = checkpoint.path.parent.parent / "metrics.jsonl"
    if log.is_file() and (earlier := read_json_lines(log)):
        step = {"step": checkpoint.meta.progress.step}
        line = {"event": "evaluation", **step, **values, "time": time.time(), "elapsed_s": last_elapsed_s(earlier)}
        file = LineLog(log)
        file.append(json.dumps(line))
        file.close()


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
