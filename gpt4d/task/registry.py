"""The registry of tasks. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass

from gpt4d.config import Config, ConfigError
from gpt4d.task import diffusion_config, language_config
from gpt4d.task.task import Task


@dataclass(frozen=True)
class TaskEntry:
    """A task in the registry.

    Attributes:
        name: its name in model families and checkpoints.
        check: raises ConfigError for settings that the task cannot use. It needs no process group and no torch.
        create: returns the task, its data opened. All ranks call it, and it raises ConfigError on all or none.
    """

    name: str
    check: Callable[[Config], None]
    create: Callable[[Config], Task]


_tasks: dict[str, TaskEntry] = {}


def register(entry: TaskEntry) -> None:
    """Add a task, which model families then may name."""
    _tasks[entry.name] = entry


def get(name: str) -> TaskEntry:
    """Return the task called ``name``. Raises ConfigError if there is none."""
    if name not in _tasks:
        raise ConfigError(f"task {name!r} is unknown; use one of {', '.join(sorted(_tasks))}")
    return _tasks[name]


def _create_language_modeling(config: Config) -> Task:
    from gpt4d.task.language import LanguageModeling  # imports torch

    return LanguageModeling(config)


def _create_diffusion(config: Config) -> Task:
    from gpt4d.task.diffusion import Diffusion  # imports torch

    return Diffusion(config)


register(TaskEntry("diffusion", diffusion_config.check, _create_diffusion))
register(TaskEntry("language_modeling", language_config.check, _create_language_modeling))
