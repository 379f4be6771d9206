"""Evaluation of a model during its training, on the ranks that train it."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tqdm import tqdm

from gpt4d.config import ConfigError
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.evaluation.shared_model import SharedModel
from gpt4d.evaluation.tasks import Result, Tasks, named_as_in_training, result_values
from gpt4d.plan import ParallelPlan
from gpt4d.runs.logger import RunFiles
from gpt4d.runtime.consensus import run_on_rank0
from gpt4d.step import TrainStep
from gpt4d.task.task import Task

if TYPE_CHECKING:
    from gpt4d.checkpoint.checkpoint_dir import Progress


class TrainingEvaluation:
    """Evaluates the model that is being trained on ``evaluate.tasks``, without an effect on the training.

    Rank 0 loads the tasks and their data once. As in ``gpt4d evaluate``, attention is not limited to documents.

    Args:
        plan: the plan of the run.
        task: the task of the run, which has the tokenizer and the averaged weights.
        train_step: the step with this rank's stage.
        log: the log of the results.

    Raises ConfigError on every rank for a task that cannot be loaded.
    """

    def __init__(self, plan: ParallelPlan, task: Task, train_step: TrainStep, log: RunFiles):
        self.config, self.task, self.train_step, self.log = plan.config, task, train_step, log
        settings, model = plan.config.evaluate, cast(Any, plan.config.model)
        files = tokenizers.as_trained(task.documents(), task.identity(), plan.config.run.dir)
        tokenizer = transformers_tokenizer.load(files, plan.config.run.dir, model.max_positions)
        ends = transformers_tokenizer.end_tokens(tokenizer, files)
        self.model = SharedModel(train_step.stage, tokenizer, ends, settings.batch_size)
        self._tasks: list[Tasks] = []  # on rank 0
        run_on_rank0(self._load, "loading the tasks")

    def _load(self) -> None:
        settings = self.config.evaluate
        with named_as_in_training(), without_effects():
            tasks = Tasks(settings.tasks, settings.limit, settings.num_fewshot, allow_code=settings.allow_code)
            self._tasks.append(tasks)

    def report(self, progress: "Progress") -> None:
        """Evaluate the model after the step ``progress``, with the averaged weights if the run has them.

        Write the results to the log. A task that fails costs this evaluation and a warning. All ranks call it.
        """
        reached = progress.values(self.task.unit)
        self.train_step.release_graphs()
        self.train_step.before_update()  # the averaged weights replace the weights, which a save may copy
        try:
            with named_as_in_training(), without_effects(), self.task.averaged():
                results = self.model.run(lambda: self._tasks[0].evaluate(self.model, errors=False))
        except ConfigError as error:
            message = f"warning: {error}; the training continues without this evaluation"
            self.log.event("evaluation_failed", message, **reached, problem=str(error))
            return
        if results is not None:  # on rank 0
            message = f"step {progress.step}/{self.config.train.steps}  {_line(results)}"
            values = {"limit": self.config.evaluate.limit, "tasks": result_values(results)}
            self.log.event("evaluation", message, **reached, **values)


def _line(results: Sequence[Result]) -> str:
    """Return the values in one line: ``hellaswag acc 0.2914, acc_norm 0.3402; arc_easy acc 0.5100``."""
    texts: dict[str, list[str]] = {}
    for result in results:
        texts.setdefault(result.task, []).append(f"{result.metric} {result.value:.4f}")
    return "; ".join(f"{task} {', '.join(values)}" for task, values in texts.items())


@contextmanager
def without_effects() -> Iterator[None]:
    """Restore the global random states after the body, in which no progress bar is shown."""
    states, bar = (random.getstate(), np.random.get_state()), tqdm.__init__

    def disabled(self: tqdm, *arguments: Any, **settings: Any) -> None:
        bar(self, *arguments, **{**settings, "disable": True})

    with torch.random.fork_rng(devices=[]):
        tqdm.__init__ = disabled
        try:
            yield
        finally:
            tqdm.__init__ = bar
            random.setstate(states[0])
            np.random.set_state(states[1])
