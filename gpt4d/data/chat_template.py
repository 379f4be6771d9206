"""Chat templates: conversations as tokens, and the mask of the tokens that have a loss."""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gpt4d.config import ConfigError
from gpt4d.data import tokenizers
from gpt4d.data.conversations import ASSISTANT, Conversation, has_loss
from gpt4d.runtime.errors import one_line

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # begin and end of a part of a text, in characters


def find(files: Mapping[str, bytes]) -> str | None:
    """Return the chat template among the files of a tokenizer, which transformers reads in this order; else None.

    Raises ConfigError for a file with invalid JSON.
    """
    if tokenizers.TEMPLATE in files:
        return files[tokenizers.TEMPLATE].decode()
    for name in ("chat_template.json", tokenizers.SETTINGS):
        try:
            found = dict(json.loads(files.get(name, b"{}"))).get("chat_template")
            if isinstance(found, list):  # several templates with names
                found = {each["name"]: each["template"] for each in found}.get("default")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{name}: invalid ({one_line(error)}); restore the file") from None
        if found:
            return found
    return None


class ChatEncoder:
    """Encoder of conversations with a chat template.

    Args:
        tokenizer: the tokenizer. Names of special tokens in the rendered text become these tokens, as in transformers.
        files: the files next to its tokenizer.json, with the template.
        train_on: ``assistant``: only the assistant's messages have a loss; ``all``: all tokens but the first.
    """

    def __init__(self, tokenizer: Tokenizer, files: Mapping[str, bytes], train_on: str):
        template = find(files)
        assert template is not None
        self.template, self.train_on, self.tokenizer = template, train_on, tokenizer
        tokenizer.encode_special_tokens = False
        end = tokenizer.id_to_token(tokenizers.end_of_text(tokenizer, files))
        self.special_tokens = {"eos_token": end, **tokenizers.special_tokens(files)}

    def encode(self, conversation: Conversation, location: str) -> tuple[list[int], np.ndarray]:
        """Return the token ids of a conversation, and the mask of the tokens that have a loss.

        The first token has no loss, because no token predicts it. Raises ConfigError, which names the ``location``, if
        the template cannot render the conversation or has no tokens with a loss.
        """
        text, spans = self._rendered(conversation, location)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        begins, ends = np.array(encoding.offsets or [(0, 0)]).T
        mask = np.zeros(len(begins), bool)
        for begin, end in spans:
            mask |= (begins < end) & (ends > begin)
        mask[0] = False
        if not mask.any():
            raise ConfigError(f"{location}: the chat template renders no token to train on; correct or remove the line")
        return encoding.ids, mask

    def _rendered(self, conversation: Conversation, location: str) -> tuple[str, list[Span]]:
        """Return the rendered conversation, and the parts of it that have a loss."""
        messages, first, tools = conversation
        trained = conversation.trained(self.train_on)
        marked = self.train_on == "assistant" and bool(_GENERATION.search(self.template))
        text, answers = self._render(messages, tools, location, marked=marked)
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
                self._span(conversation, index, text, location)
                for index in range(len(messages))
                if index not in trained
            ]
            ends = [0, *itertools.chain(*without), len(text)]
            return text, [*zip(ends[::2], ends[1::2], strict=True)]
        return text, [self._span(conversation, index, text, location, True) for index in trained]

    def _span(
        self, conversation: Conversation, index: int, text: str, location: str, after_prompt: bool = False
    ) -> Span:
        """Return the part of the rendered conversation that a message adds, or adds to the generation prompt."""
        messages, _, tools = conversation
        before = ""
        if index or after_prompt:  # many templates cannot render a conversation without messages
            before, _ = self._render(messages[:index], tools, location, add_generation_prompt=after_prompt)
        until, _ = self._render(messages[: index + 1], tools, location)
        if not (text.startswith(until) and until.startswith(before)):
            raise ConfigError(
                f"{location}: the chat template renders message {index} differently if more messages follow; set "
                "data.chat_template to a file that marks answers with {% generation %} and {% endgeneration %}, or "
                "use data.train_on=all"
            )
        return len(before), len(until)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list | None,
        location: str,
        add_generation_prompt: bool = False,
        marked: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the rendered messages, and the answers that a ``marked`` template marks."""
        from transformers.utils import chat_template_utils  # Text needs no library that takes a second to import.

        render: Any = chat_template_utils.render_jinja_template  # its annotations are wrong
        try:
            (text,), answers = render(
                [messages],
                tools,
                chat_template=self.template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=marked,
                **self.special_tokens,
            )
        except Exception as error:  # exceptions of jinja2, and any exception of an operation in the template
            raise ConfigError(
                f"{location}: the chat template cannot render the conversation ({one_line(error)}); correct the line, "
                "or set data.chat_template"
            ) from None
        return text, answers[0] if marked else []
