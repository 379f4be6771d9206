"""lm-evaluation-harness: its interface to a model on any plan, and no code from the files of tasks.

A sandbox renders the templates of tasks, and a check precedes the import of Python functions.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from lm_eval import tasks, utils
from lm_eval.api import registry, task
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs
from lm_eval.tasks import _yaml_loader

from gpt4d.config import ConfigError, check_limits
from gpt4d.data import tokenizers
from gpt4d.data.chat_template import limits, template_for
from gpt4d.evaluation.shared_model import SharedModel
from gpt4d.task.scoring import Continuation
from gpt4d.task.task import Sampling

_NEW_TOKENS = 256  # maximum length of a generated answer, if the task sets none
_DRAWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # settings of tasks that draw tokens
_CHARACTERS = 10_000_000  # maximum length of a rendered template
_SECONDS = 60.0  # maximum time to render a template
_LIBRARY = Path(tasks.__file__).parent


class Harness(TemplateLM):
    """A model on all ranks as lm-evaluation-harness uses it, on rank 0. Texts become tokens as in its HFLM."""

    def __init__(self, model: SharedModel):
        super().__init__()
        self.model, self.tokenizer = model, model.tokenizer
        self._requests: list[Instance] = []  # whose log-likelihoods are asked

    @property
    def eot_token_id(self) -> int:
        return self.model.end[0]

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        settings = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        with tokenizers.library_errors("tasks=…: the tokenizer cannot encode a text (%s); leave out its task"):
            return self.tokenizer.encode(string, **settings)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        with limits("chat_template=true"):
            text = self.tokenizer.apply_chat_template(
                chat_history,
                chat_template=template_for(self.tokenizer),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        return str(text)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._requests = requests
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        for request, (_, context, tokens) in zip(self._requests, requests, strict=True):
            if not (context and tokens):
                raise ConfigError(
                    f"tasks={request.task_name}: document {request.doc_id} has a question or an answer without tokens "
                    f"({request.args[1]!r}); correct or remove the document"
                )
        asked = [Continuation(tuple(context), tuple(tokens)) for _, context, tokens in requests]
        return [(score.log_likelihood, score.greedy) for score in self.model.scores(asked)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = []
        for index, request in enumerate(requests):
            (text,) = request.args
            for window in utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.model.max_length, context_len=1
            ):
                context, tokens = utils.make_disjoint_window(window)
                windows.append((index, Continuation(tuple(context), tuple(tokens))))
        totals = [0.0] * len(requests)
        scores = self.model.scores([window for _, window in windows])
        for (index, _), score in zip(windows, scores, strict=True):
            totals[index] += score.log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = [""] * len(requests)
        by_settings: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_settings[repr(request.args[1])].append(index)
        for indices in by_settings.values():
            settings = normalize_gen_kwargs(requests[indices[0]].args[1], _NEW_TOKENS)
            tokens, stops, sampling = settings.pop("max_gen_toks"), settings.pop("until"), _sampling(settings)
            if not all(isinstance(stop, str) for stop in stops):
                raise ConfigError(f"generation_kwargs.until={stops}: not texts; quote them in the task")
            longest = max(1, self.model.max_length - tokens)
            contexts = {index: self.tok_encode(requests[index].args[0])[-longest:] for index in indices}
            indices = sorted(indices, key=lambda index: -len(contexts[index]))
            for start in range(0, len(indices), self.model.batch_size):
                together = indices[start : start + self.model.batch_size]
                texts = [contexts[index] or [self.prefix_token_id] for index in together]
                for index, answer in zip(together, self.model.continued(texts, tokens, stops, sampling), strict=True):
                    answers[index] = answer
        return answers


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Return how a task draws tokens. Raises ConfigError for settings without an equivalent."""
    draws = settings.pop("do_sample", False)
    known = {key: settings.pop(key) for key in _DRAWN if key in settings}
    if unknown := {key: value for key, value in settings.items() if value not in (None, False, 1)}:
        raise ConfigError(f"generation_kwargs={unknown}: gpt4d has no such settings; remove them from the task")
    if not draws:
        known = {"temperature": 0.0} | {key: known[key] for key in ("repetition_penalty",) if key in known}
    values: dict[str, Any] = {"top_k": 0, "temperature": 1.0} | known
    values = {key: int(value) if key == "top_k" else float(value) for key, value in values.items()}
    sampling = Sampling(**values)
    check_limits(sampling, "generation_kwargs.")  # here, because an error of the computation ends the run
    return sampling


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
