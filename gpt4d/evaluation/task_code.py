"""No code from the files of tasks: a sandbox for their templates, and a check before Python functions are imported."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from lm_eval import tasks, utils
from lm_eval.api import registry, task
from lm_eval.tasks import _yaml_loader

from gpt4d.config import ConfigError

_CHARACTERS = 10_000_000  # maximum length of a rendered template
_SECONDS = 60.0  # maximum time to render a template
_LIBRARY = Path(tasks.__file__).parent


class _LimitedTemplate(Template):
    """A template of limited length and time."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        environment, parts, characters = self.environment, list[str](), 0
        assert isinstance(environment, _Sandbox)
        environment.deadline = time.monotonic() + _SECONDS
        for part in self.generate(*args, **kwargs):
            parts.append(part)
            characters += len(part)
            if characters > _CHARACTERS:
                raise SecurityError(f"the template renders more than {_CHARACTERS:,} characters")
            environment.check_time()
        return "".join(parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Renders templates that can neither call functions of Python nor change a document."""

    template_class = _LimitedTemplate
    deadline = 0.0

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise SecurityError(f"the template takes more than {_SECONDS:.0f} s")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.check_time()  # a loop without output calls range
        return super().call(*args, **kwargs)


def render_in_sandbox() -> None:
    """Replace the harness's environment of templates, which executes any method, by a sandbox with equal settings."""
    theirs = utils.env
    if not isinstance(theirs, _Sandbox):
        sandbox = _Sandbox(undefined=theirs.undefined, keep_trailing_newline=theirs.keep_trailing_newline)
        sandbox.filters.update(theirs.filters)
        utils.env = sandbox


@contextmanager
def without_code(allowed: bool, local: bool) -> Iterator[None]:
    """Raise ConfigError if a task that the body loads imports a function of Python from outside the harness.

    Args:
        allowed: ``allow_code``; the body may import everything.
        local: the tasks are in files of the user. Their metrics must be the harness's own, because the library
            ``evaluate`` executes metrics of other names.
    """
    import_function, get_metric = _yaml_loader._import_func_in_yml, registry.get_metric

    def checked_import(name: str, directory: Path) -> Any:
        if not directory.is_relative_to(_LIBRARY):
            raise _refusal(f"a file in {directory} executes the function {name}")
        return import_function(name, directory)

    def checked_metric(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in registry.metric_registry:
            raise _refusal(f"the library evaluate executes code for the metric {name}")
        return get_metric(name, hf_evaluate_metric)

    if allowed:
        yield
        return
    _yaml_loader._import_func_in_yml, task.get_metric = checked_import, checked_metric if local else get_metric
    try:
        yield
    finally:
        _yaml_loader._import_func_in_yml, task.get_metric = import_function, get_metric


def _refusal(problem: str) -> ConfigError:
    return ConfigError(f"allow_code=false: {problem}; read this code, and set it to true if you trust the code")
