"""Chat templates: conversations as tokens, and the mask of the tokens that have a loss."""

import ctypes
import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from gpt4d.config import ConfigError
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.data.conversations import ASSISTANT, Conversation, has_loss
from gpt4d.runtime.errors import one_line

TIME_LIMIT_S = 10.0  # maximum time of a template for a conversation
MOST_CHARACTERS = 1 << 24
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # begin and end of a part of a text, in characters


class _TooSlowError(Exception):
    """Error of a template that exceeds its time."""


@contextmanager
def limits(location: str) -> Iterator[None]:
    """Raise ConfigError, which names the ``location``, if templates in the body fail or exceed their time."""
    thread, lock, ended = threading.get_ident(), threading.Lock(), False

    def end_template() -> None:
        with lock:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooSlowError))

    timer = threading.Timer(TIME_LIMIT_S, end_template)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                ended = True
            timer.cancel()
    except ConfigError:
        raise
    except Exception as error:  # exceptions of jinja2, and any exception of an operation in the template
        problem = f"it takes more than {TIME_LIMIT_S:g} s" if isinstance(error, _TooSlowError) else one_line(error)
        raise ConfigError(
            f"{location}: the chat template cannot render the conversation ({problem}); correct the line, or "
            "set data.chat_template"
        ) from None


def template_for(tokenizer: Any, tools: list | None = None) -> str:
    """Return the template that transformers chooses for ``tools``. Its text has a limited length."""
    template = tokenizer.get_chat_template(tools=tools)
    _limit_length(template)
    return template


def all_templates(tokenizer: Any) -> str:
    """Return the texts of a tokenizer's templates. transformers chooses one of them for each conversation."""
    found = tokenizer.chat_template
    return "\n".join(found.values()) if isinstance(found, dict) else found or ""


@cache
def _limit_length(template: str) -> None:
    from transformers.utils import chat_template_utils

    compiled: Any = chat_template_utils._compile_jinja_template(template)  # transformers renders this cached object
    render = compiled.root_render_func

    def limited(context: Any) -> Iterator[str]:
        length = 0
        for text in render(context):
            length += len(text)
            if length > MOST_CHARACTERS:
                raise ValueError(f"more than {MOST_CHARACTERS:,} characters")
            yield text

    compiled.root_render_func = limited


class ChatEncoder:
    """Encoder of conversations with a chat template.

    Args:
        files: the files of the tokenizer, with the template. Names of special tokens in the rendered text become these
            tokens, as in transformers.
        where: the directory of the files, for messages.
        train_on: ``assistant``: only the assistant's messages have a loss; ``all``: all tokens but the first.
    """

    def __init__(self, files: Mapping[str, bytes], where: object, train_on: str):
        self.tokenizer, self.train_on = transformers_tokenizer.load(files, where), train_on
        self._unknown = tokenizers.unknown_counter(self.tokenizer.backend_tokenizer)

    def encode(self, conversation: Conversation, location: str) -> tuple[list[int], np.ndarray, int]:
        """Return the token ids of a conversation, the mask of the tokens that have a loss, and a number.

        The number counts the characters and words that are not in the vocabulary (``tokenizers.unknown_counter``). The
        first token has no loss, because no token predicts it. Raises ConfigError, which names the ``location``, if
        the template cannot render the conversation or has no tokens with a loss.
        """
        with limits(location):
            text, spans = self._rendered(conversation, location)
        with tokenizers.library_errors(f"{location}: the tokenizer cannot encode the rendered conversation (%s)"):
            text.encode()  # The library's error for half of a surrogate pair does not name it.
            encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            unknown = self._unknown(text, encoding.ids)
        begins, ends = np.array(encoding.offsets or [(0, 0)]).T
        mask = np.zeros(len(begins), bool)
        for begin, end in spans:
            mask |= (begins < end) & (ends > begin)
        mask[0] = False
        if not mask.any():
            raise ConfigError(f"{location}: the chat template renders no token to train on; correct or remove the line")
        return encoding.ids, mask, unknown

    def _rendered(self, conversation: Conversation, location: str) -> tuple[str, list[Span]]:
        """Return the rendered conversation, and the parts of it that have a loss."""
        messages, first, tools = conversation
        template, trained = template_for(self.tokenizer, tools), conversation.trained(self.train_on)
        marked = self.train_on == "assistant" and bool(_GENERATION.search(template))
        text, answers = self._render(template, messages, tools, marked=marked)
        if marked:
            before = [message for message in messages[:first] if message["role"] == ASSISTANT]
            have_loss = [has_loss(message) for message in messages[first:] if message["role"] == ASSISTANT]
            answers = answers[len(before) :]
            if all(have_loss):
                return text, answers
            if len(answers) != len(have_loss):
                raise ConfigError(
                    f"{location}: some answers have no loss, and the chat template marks {len(answers)} parts of "
                    f"{len(have_loss)} answers; mark each answer once"
                )
            return text, [*itertools.compress(answers, have_loss)]
        if self.train_on == "all":  # all but the messages without a loss
            without = [
                self._span(template, conversation, index, text, location)
                for index in range(len(messages))
                if index not in trained
            ]
            ends = [0, *itertools.chain(*without), len(text)]
            return text, [*zip(ends[::2], ends[1::2], strict=True)]
        return text, [self._span(template, conversation, index, text, location, True) for index in trained]

    def _span(
        self,
        template: str,
        conversation: Conversation,
        index: int,
        text: str,
        location: str,
        after_prompt: bool = False,
    ) -> Span:
        """Return the part of the rendered conversation that a message adds, or adds to the generation prompt."""
        messages, _, tools = conversation
        before = ""
        if index or after_prompt:  # many templates cannot render a conversation without messages
            before, _ = self._render(template, messages[:index], tools, add_generation_prompt=after_prompt)
        until, _ = self._render(template, messages[: index + 1], tools)
        if not (text.startswith(until) and until.startswith(before)):
            raise ConfigError(
                f"{location}: the chat template renders message {index} differently if more messages follow; set "
                "data.chat_template to a file that marks answers with {% generation %} and {% endgeneration %}, or "
                "use data.train_on=all"
            )
        return len(before), len(until)

    def _render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        tools: list | None,
        add_generation_prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the rendered messages, and the answers that a ``marked`` template marks."""
        from transformers.utils import chat_template_utils  # Text needs no library that takes a second to import.

        render: Any = chat_template_utils.render_jinja_template  # its annotations are wrong
        (text,), answers = render(
            [messages],
            tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            return_assistant_tokens_mask=marked,
            **self.tokenizer.special_tokens_map,
        )
        return text, answers[0] if marked else []
