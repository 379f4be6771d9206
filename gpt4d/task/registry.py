"""The registry of tasks. No torch here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt4d.config import Config, ConfigError
from gpt4d.task import diffusion_config, language_config
from gpt4d.task.task import GenerateConfig, Task

if TYPE_CHECKING:
    from gpt4d.parallel.stage import Stage


@dataclass(frozen=True)
class TaskEntry:
    """A task in the registry.

    Attributes:
        name: its name in model families and checkpoints.
        check: raises ConfigError for settings that the task cannot use. It needs no process group and no torch.
        create: returns the task with its data opened. All ranks call it, and it raises ConfigError on all or none.
        generate: produces something with the model of a stage and the files of the checkpoint's tokenizer, by name,
            and returns a message; None if the task has nothing to generate. All ranks call it. Raises ConfigError for
            missing settings.
        data: kind of its training data, ``text`` or ``images``.
        own_data: settings that select such data, for messages.
    """

    name: str
    check: Callable[[Config], None]
    create: Callable[[Config], Task]
    generate: "Callable[[GenerateConfig, Mapping[str, bytes], Stage], str] | None" = None
    data: str = "data"
    own_data: str = "data=…"


_tasks: dict[str, TaskEntry] = {}


def register(entry: TaskEntry) -> None:
    """Add a task, so that model families can name it."""
    _tasks[entry.name] = entry


def get(name: str) -> TaskEntry:
    """Return the task called ``name``. Raises ConfigError if it is not registered."""
    if name not in _tasks:
        raise ConfigError(f"task {name!r} is unknown; use one of {', '.join(sorted(_tasks))}")
    return _tasks[name]


# The modules of tasks import torch.


def _create_language_modeling(config: Config) -> Task:
    from gpt4d.task.language import LanguageModeling

    return LanguageModeling(config)


def _generate_text(config: GenerateConfig, files: Mapping[str, bytes], stage: "Stage") -> str:
    from gpt4d.task.language import generate

    return generate(config, files, stage)


def _create_diffusion(config: Config) -> Task:
    from gpt4d.task.diffusion import Diffusion

    return Diffusion(config)


def _generate_images(config: GenerateConfig, files: Mapping[str, bytes], stage: "Stage") -> str:
    from gpt4d.task.diffusion import generate

    return generate(config, files, stage)


register(
    TaskEntry(
        "language_modeling",
        language_config.check,
        _create_language_modeling,
        _generate_text,
        "text",
        "data=text data.path='…'",
    )
)
register(
    TaskEntry(
        "diffusion",
        diffusion_config.check,
        _create_diffusion,
        _generate_images,
        "images",
        "data=pictures data.path='…'",
    )
)
