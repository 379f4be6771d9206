"""The registry of tasks. No torch here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpt4d.config import Config, ConfigError, blend_stages
from gpt4d.data.checks import check_data, check_image_data
from gpt4d.data.completion import tokenizer_size
from gpt4d.task.task import GenerateConfig, Task

if TYPE_CHECKING:
    from gpt4d.parallel.stage import Stage


@dataclass(frozen=True)
class TaskEntry:
    """A task in the registry.

    ``generate`` produces something with the model of a stage and the files of the checkpoint's tokenizer, by name, and
    returns a message. All ranks call it. Raises ConfigError for missing settings.
    """

    name: str  # its name in model families and checkpoints
    check: Callable[[Config], None]  # raises ConfigError for unusable settings, without process group and torch
    create: Callable[[Config], Task]  # returns the task with its data opened; raises ConfigError on all ranks or none
    generate: "Callable[[GenerateConfig, Mapping[str, bytes], Stage], str] | None" = None  # None: nothing to generate
    data: str = "data"  # kind of its training data, text or images
    own_data: str = "data=…"  # settings that select such data, for messages


_tasks: dict[str, TaskEntry] = {}


def register(entry: TaskEntry) -> None:
    """Add a task, so that model families can name it."""
    _tasks[entry.name] = entry


def get(name: str) -> TaskEntry:
    """Return the task called ``name``. Raises ConfigError if it is not registered."""
    if name not in _tasks:
        raise ConfigError(f"task {name!r} is unknown; use one of {', '.join(sorted(_tasks))}")
    return _tasks[name]


def _check_language_modeling(config: Config) -> None:
    """Raise ConfigError unless the data can be read and its tokens fit the model."""
    model: Any = config.model  # of any family; all language models have a vocab_size
    check_data(config.data, model.name)
    if config.data.stream and config.train.epochs is not None:
        raise ConfigError(
            f"train.epochs={config.train.epochs}: data.stream=true does not know the length of an epoch; set "
            "train.steps or train.tokens"
        )
    if config.data.source == "blend" and len(blend_stages(config.data.blend)) > 1 and config.train.epochs is not None:
        raise ConfigError(
            f"train.epochs={config.train.epochs}: the stages of data.blend begin at fractions of a run, whose length "
            "must be known; set train.steps or train.tokens"
        )
    size = tokenizer_size(config.data, download=False)
    if size and size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size}: the tokenizer of data={config.data.name} has {size} tokens, and the "
            f"model needs a row for each; set model.vocab_size={size} or more, or use another tokenizer"
        )
    vocabulary = config.data.tokenizer_vocab
    if vocabulary is not None and vocabulary > model.vocab_size:
        raise ConfigError(
            f"data.tokenizer_vocab={vocabulary}: more than model.vocab_size={model.vocab_size}; "
            "the model needs a row for every token, so lower data.tokenizer_vocab or raise model.vocab_size"
        )


def _check_diffusion(config: Config) -> None:
    """Raise ConfigError unless the data can be read and samples can be drawn."""
    model: Any = config.model  # any family; all diffusion models have settings of images and of the diffusion
    check_image_data(config.data, model.name)
    if config.logging.sample_steps > model.timesteps:
        raise ConfigError(
            f"logging.sample_steps={config.logging.sample_steps}: more than model.timesteps={model.timesteps}; lower it"
        )


def _when_called(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module that imports torch. The module is imported when the function is called."""
    return lambda *arguments: getattr(import_module(module), name)(*arguments)


register(
    TaskEntry(
        "language_modeling",
        _check_language_modeling,
        _when_called("gpt4d.task.language", "LanguageModeling"),
        _when_called("gpt4d.task.language", "generate"),
        "text",
        "data=text data.path='…'",
    )
)
register(
    TaskEntry(
        "diffusion",
        _check_diffusion,
        _when_called("gpt4d.task.diffusion", "Diffusion"),
        _when_called("gpt4d.task.diffusion", "generate"),
        "images",
        "data=pictures data.path='…'",
    )
)
