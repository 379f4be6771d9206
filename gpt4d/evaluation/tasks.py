"""Tasks of lm-evaluation-harness: found by name or in local files, and evaluated with a model."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from gpt4d.config import ConfigError
from gpt4d.runtime.errors import one_line

if TYPE_CHECKING:
    from gpt4d.evaluation.shared_model import SharedModel

_YAML = (".yaml", ".yml")
_EXAMPLES_SEED = 1234  # of few-shot examples, the harness's default


@dataclass(frozen=True)
class Result:
    """The value of one metric on one task or group of tasks, and its standard error if it is known."""

    task: str
    metric: str
    value: float
    error: float | None = None


class Tasks:
    """Tasks with their data, on the rank that evaluates them.

    Args:
        names: names of tasks and groups in the harness, YAML files of tasks, and directories of such files.
        limit: number of documents of each task; None for all.
        examples: number of examples before each question; None for each task's own number.
        chat: questions are messages of a conversation.
        allow_code: local files may name functions of Python.

    Raises ConfigError for a task that cannot be loaded.
    """

    def __init__(
        self,
        names: Sequence[str],
        limit: int | None = None,
        examples: int | None = None,
        chat: bool = False,
        allow_code: bool = False,
    ):
        from lm_eval.tasks import TaskManager

        from gpt4d.evaluation.harness import render_in_sandbox, without_code

        render_in_sandbox()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.names, self.limit, self.chat = names, limit, chat
        directories = [name for name in names if Path(name).is_dir()]
        local = [name for name in names if name in directories or Path(name).suffix in _YAML]
        # The harness's own tasks take seconds.
        manager = TaskManager(include_path=directories or None, include_defaults=len(local) < len(names))
        specs: list[str] = []
        for name in names:
            specs += sorted(map(str, Path(name).glob("*.yaml"))) if name in directories else _matches(name, manager)
        with self._one_line("loaded"), without_code(allow_code, bool(local)):
            self.loaded = manager.load(specs)
        for task in self.loaded["tasks"].values():
            if examples is not None:
                task.set_config(key="num_fewshot", value=examples)

    def evaluate(self, model: "SharedModel", errors: bool = True) -> list[Result]:
        """Return the results of all tasks. It is the program of ``SharedModel.run``.

        Args:
            model: the model on all ranks.
            errors: also estimate standard errors, by repeated sampling where there is no formula.
        """
        from lm_eval.evaluator import evaluate

        from gpt4d.evaluation.harness import Harness

        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(seed=_EXAMPLES_SEED)
        with self._one_line("evaluated"):
            found = evaluate(
                Harness(model),
                self.loaded,
                limit=self.limit,
                bootstrap_iters=100_000 if errors else 0,
                log_samples=False,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=self.chat,
            )
            assert found is not None
            return _results(found["results"])

    @contextmanager
    def _one_line(self, done: str) -> Iterator[None]:
        """Raise a ConfigError for any exception of the body: the harness and its tasks raise all kinds.

        They include SystemExit, because a task can call sys.exit.
        """
        try:
            yield
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            reason = one_line(error)
            remedy = "correct the task"
            if isinstance(error, IndexError):  # the harness looks at the first character of each answer
                remedy += "; the first document may have an empty answer"
            if isinstance(error, ConnectionError):
                remedy = "run the command once where there is a network, to fill the cache in HF_HOME"
            raise ConfigError(f"tasks={','.join(self.names)}: cannot be {done} ({reason}); {remedy}") from error


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError if the harness is not installed or a file of tasks does not exist."""
    if find_spec("lm_eval") is None:
        raise ConfigError("tasks=…: they need lm-evaluation-harness; install it with pip install 'gpt4d[evaluate]'")
    for name in names:
        if not name:
            raise ConfigError(f"tasks={','.join(names)}: a name is empty; write names with one comma between them")
        if Path(name).suffix in _YAML and not Path(name).is_file():
            raise ConfigError(f"tasks={name}: no such file; use an existing file or the name of a task")


@contextmanager
def named_as_in_training() -> Iterator[None]:
    """Name the key in the body's errors as the configuration of a run does: ``evaluate.tasks``."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"evaluate.{error}") from None


def _matches(name: str, manager: Any) -> list[str]:
    """Return the names in the harness that a name or pattern selects, or the path of a file."""
    if Path(name).suffix in _YAML:
        return [str(Path(name).absolute())]
    found = manager.match_tasks([name])
    if not found:
        raise ConfigError(
            f"tasks={name}: lm-evaluation-harness has no such task; lm-eval ls tasks lists its "
            f"{len(manager.all_tasks):,} names"
        )
    return found


def _results(found: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    results = []
    for task, values in found.items():
        for key, value in values.items():
            metric, _, answers = key.partition(",")
            if not answers or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{answers}")
            name = metric if answers == "none" else f"{metric} ({answers})"
            results.append(Result(task, name, float(value), error if isinstance(error, float) else None))
    return results


def results_table(results: Sequence[Result]) -> Table:
    """Return a table with a line for each metric of each task."""
    found = Table("task", "metric")
    for title in ("value", "± error"):
        found.add_column(title, justify="right")
    for result in results:
        error = "" if result.error is None else f"{result.error:.4f}"
        found.add_row(result.task, result.metric, f"{result.value:.4f}", error)
    return found


def result_values(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Return the values by task and metric; the standard error of a metric is at ``metric ± error``."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        of_task = found.setdefault(result.task, {})
        of_task[result.metric] = result.value
        if result.error is not None:
            of_task[f"{result.metric} ± error"] = result.error
    return found
