"""Results of an evaluation: a table, and values for files."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from gpt4d.evaluation.tasks import Result


def table(results: Sequence[Result]) -> Table:
    """Return a table with a line for each metric of each task."""
    found = Table("task", "metric")
    for title in ("value", "± error"):
        found.add_column(title, justify="right")
    for result in results:
        error = "" if result.error is None else f"{result.error:.4f}"
        found.add_row(result.task, result.metric, f"{result.value:.4f}", error)
    return found


def values(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Return the values by task and metric; the standard error of a metric is at ``metric ± error``."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        of_task = found.setdefault(result.task, {})
        of_task[result.metric] = result.value
        if result.error is not None:
            of_task[f"{result.metric} ± error"] = result.error
    return found
