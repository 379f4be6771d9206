"""Talk to a model that was trained on conversations.

python -m gpt4d.chat checkpoint=runs/NAME
python -m gpt4d.chat checkpoint=runs/NAME prompts=questions.txt out=answers.jsonl
torchrun --nproc-per-node 4 -m gpt4d.chat checkpoint=runs/NAME gx=4

In the terminal, /reset begins a new conversation, Ctrl-C stops an answer, and Ctrl-D ends.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import torch.distributed as dist

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.checkpoint.trained_model import inference_plan, trained_model
from gpt4d.config import ConfigError, asks_for_help, from_arguments, setting
from gpt4d.config.commands import one_line_errors
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.data.chat_template import all_templates, limits, template_for
from gpt4d.data.conversations import Conversation, Unread, parse, row_of, unread_keys
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.consensus import run_on_rank0
from gpt4d.runtime.errors import one_line, warn
from gpt4d.runtime.files import replace_file, required_file
from gpt4d.runtime.launch import Launch
from gpt4d.task import registry as tasks
from gpt4d.task.generation import continued, prompt_lines
from gpt4d.task.task import InferenceConfig, Sampling

Message = dict[str, Any]  # with role and content
_RESET = "/reset"


@dataclass
class ChatConfig(Sampling, InferenceConfig):
    """Settings of ``gpt4d chat``."""

    system: str | None = setting(None, "message of the system at the beginning of each conversation")
    tokens: int = setting(512, "maximum number of tokens of an answer", at_least=1)
    prompts: str | None = setting(None, "file of messages to answer together: a text, or JSON with messages, in a line")
    out: str | None = setting(None, "file of JSON lines with the answers to prompts")
    batch_size: int = setting(16, "prompts that all processes answer together", at_least=1)


class Answer(NamedTuple):
    """An answer, and whether it is complete: whether the model has ended it."""

    text: str
    complete: bool


def ids_of(
    messages: Sequence[Message], tokenizer: Any, tools: list | None = None, location: str = "the conversation"
) -> list[int]:
    """Return the ids of a conversation, up to the beginning of the next answer. ``location`` begins an error."""
    with limits(location):
        template = template_for(tokenizer, tools)
        text = tokenizer.apply_chat_template(
            [*messages], tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    with tokenizers.library_errors(f"{location}: the tokenizer cannot encode it (%s); write other messages"):
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)  # without a warning about the length


@dataclass(frozen=True)
class Chat:
    """A model that answers messages, on all ranks.

    Attributes:
        stage: this rank's part of the model.
        tokenizer: the model's tokenizer, with a chat template.
        end: ids of the tokens that end an answer.
        config: the settings.
    """

    stage: Stage
    tokenizer: Any
    end: Sequence[int]
    config: ChatConfig

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a conversation with its last answer."""
        model: Any = self.stage.module
        return model.spec.config.max_positions

    def answers(
        self,
        conversations: Sequence[list[int]],
        show: Callable[[str], None] = lambda text: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> list[Answer]:
        """Return the answers to conversations. Every rank calls it and gets the same answers.

        An answer ends at the latest where its conversation has ``max_length`` tokens.

        Args:
            conversations: ids of each conversation, fewer than ``max_length``.
            show: called with each new part of the first answer.
            interrupted: as for ``gpt4d.task.generation.continued``.
        """
        shown = 0

        def show_new(text: str) -> None:
            nonlocal shown
            if len(text) > shown:
                show(text[shown:])
                shown = len(text)

        def ends(index: int, new: list[int]) -> bool:
            if index == 0:
                show_new(self._decoded(new))
            return len(conversations[index]) + len(new) >= self.max_length

        limit = self.config.tokens
        found = continued(
            self.stage, conversations, limit, self.end, sampling=self.config, ends=ends, interrupted=interrupted
        )
        complete = [
            len(new) < limit and len(before) + len(new) < self.max_length
            for before, new in zip(conversations, found, strict=True)
        ]
        return [Answer(self._decoded(new), ended) for new, ended in zip(found, complete, strict=True)]

    def _decoded(self, ids: Sequence[int]) -> str:
        """Return the text of ids without its last character if the ids end within that character."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).rstrip("\ufffd")

    def talk(self, read: Callable[[], str], write: Callable[[str], None]) -> None:
        """Answer the messages that ``read`` returns on rank 0 until it raises EOFError. All ranks must call this.

        Ctrl-C stops the answer of a single process. A launcher passes Ctrl-C to its processes to end them, so several
        processes end together.
        """
        messages, alone = self._beginning(), dist.get_world_size() == 1

        def next_turn() -> list[int] | None:
            while not (interrupts.pressed and not alone):
                interrupts.pressed = False
                try:
                    with interrupts.raised():
                        text = read().strip()
                except (EOFError, KeyboardInterrupt):
                    return None
                if text == _RESET:
                    messages[:] = self._beginning()
                elif text:
                    messages.append({"role": "user", "content": text})
                    if ids := self._fitting(messages, write):
                        return ids
            return None

        show = write if dist.get_rank() == 0 else lambda text: None
        with _Interrupts() as interrupts:
            while (ids := run_on_rank0(next_turn, "waiting for a message")) is not None:
                ((answer, complete),) = self.answers([ids], show, lambda: interrupts.pressed)
                if not complete:
                    show(f"\n(the answer is cut at {self._limit(ids)})")
                show("\n")
                messages.append({"role": "assistant", "content": answer})

    def _limit(self, ids: Sequence[int]) -> str:
        """Return which limit cuts an answer to a conversation."""
        room = self.max_length - len(ids)
        if self.config.tokens <= room:
            return f"tokens={self.config.tokens}"
        return f"{room} tokens: the conversation then has the model's maximum length of {self.max_length}"

    def _beginning(self) -> list[Message]:
        system = self.config.system
        return [] if system is None else [{"role": "system", "content": system}]

    def _fitting(self, messages: list[Message], write: Callable[[str], None]) -> list[int] | None:
        """Return the ids of a conversation, without its oldest turns if they leave no room for an answer.

        A last message that is too long by itself is removed; the result is then None.
        """
        first = len(self._beginning())
        last = ids_of([*messages[:first], messages[-1]], self.tokenizer)
        if len(last) >= self.max_length:
            messages.pop()
            write(
                f"(the message is ignored: with it, the conversation has {len(last)} tokens, and the model's maximum "
                f"length is {self.max_length}; shorten it)\n"
            )
            return None
        while len(ids := ids_of(messages, self.tokenizer)) >= self.max_length:
            del messages[first : first + 2]
            write("(the conversation exceeds the model's maximum length: its oldest turn is dropped)\n")
        return ids


class _Interrupts:
    """Records Ctrl-C inside a context instead of raising KeyboardInterrupt.

    Attributes:
        pressed: whether Ctrl-C was pressed.
    """

    def __init__(self) -> None:
        self.pressed = self._raises = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: object) -> None:
        self.pressed = True
        if self._raises:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt within the body, as usual."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False


def main(arguments: list[str]) -> None:
    """Talk to the checkpoint that ``arguments`` name, or answer a file of messages."""
    if asks_for_help(arguments):
        print(__doc__)
        return
    config, launch = from_arguments(ChatConfig, arguments), Launch.from_environment()
    if (config.prompts is None) != (config.out is None):
        raise ConfigError("prompts=… out=…: set both to answer a file of messages, or leave out both to talk")
    checkpoint = Checkpoint.open(Path(config.checkpoint))
    if (kind := tasks.get(checkpoint.meta.task).data) != "text":
        raise ConfigError(f"checkpoint={checkpoint.path}: its model makes {kind}; use a text model")
    plan = inference_plan(checkpoint.meta.model, config, launch.world_size)
    files, settings = checkpoint.model_files(), cast(Any, checkpoint.meta.model)
    tokenizer = transformers_tokenizer.load(files, checkpoint.path, settings.max_positions)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"checkpoint={checkpoint.path}: its tokenizer has no chat template; train it with data=chat and "
            "data.chat_template=FILE, or use gpt4d generate"
        )
    conversations = _conversations(config, all_templates(tokenizer), launch.rank) if config.prompts else []
    ids = []
    for number, (messages, _, tools) in enumerate(conversations, 1):
        location = f"prompts={config.prompts}: conversation {number}"
        ids.append(ids_of(messages, tokenizer, tools, location))
        if len(ids[-1]) >= settings.max_positions:
            raise ConfigError(
                f"{location} has {len(ids[-1])} tokens, which leave no room for an answer in the model's maximum "
                f"length of {settings.max_positions}; shorten it"
            )
    with trained_model(checkpoint, plan, launch) as stage:
        end = transformers_tokenizer.end_tokens(tokenizer, files)
        chat = Chat(stage, tokenizer, end, config)
        if config.prompts is None:
            chat.talk(lambda: input("> "), lambda text: print(text, end="", flush=True))
        else:
            _answer_file(chat, conversations, ids, launch)


def _conversations(config: ChatConfig, template: str, rank: int) -> list[Conversation]:
    """Return the conversations in the file ``prompts``. Raises ConfigError for a file that cannot be used.

    Rank 0 prints a warning of the keys that neither gpt4d nor the chat ``template`` reads.
    """
    unread = Unread()
    found = [
        _with_system(_conversation(line, f"prompts={config.prompts}: line {number}", unread), config.system)
        for number, line in enumerate(prompt_lines(str(config.prompts)), 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"prompts={config.prompts}: empty; write a message in each line")
    for keys in unread_keys(unread, template, "all") if rank == 0 else ():
        warn(f"prompts={config.prompts}: {keys}")
    return found


def _conversation(line: str, location: str, unread: Unread) -> Conversation:
    """Return the conversation in a line: a text, which is a message of the user, or JSON as in training."""
    if not line.startswith("{"):
        return Conversation([{"role": "user", "content": line}])
    try:
        row = row_of(line, unread)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{location}: invalid JSON ({one_line(error)}); use a text, or JSON with messages, in each line"
        ) from None
    conversation = parse(row, location, unread)
    if not conversation.messages:
        raise ConfigError(f"{location}: a conversation without messages; write one, or remove the line")
    return conversation


def _with_system(conversation: Conversation, system: str | None) -> Conversation:
    messages = conversation.messages
    if system is None or (messages and messages[0]["role"] == "system"):
        return conversation
    return conversation._replace(messages=[{"role": "system", "content": system}, *messages])


def _answer_file(chat: Chat, conversations: list[Conversation], ids: list[list[int]], launch: Launch) -> None:
    """Write the conversations with their answers to ``out``. Conversations of similar length are answered together."""
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), chat.config.batch_size):
        together = order[start : start + chat.config.batch_size]
        answers |= zip(together, chat.answers([ids[index] for index in together]), strict=True)
    if launch.rank == 0:
        complete = (
            {
                "messages": [*each.messages, {"role": "assistant", "content": answers[index].text}],
                **({"tools": each.tools} if each.tools else {}),
                "finish_reason": "stop" if answers[index].complete else "length",
            }
            for index, each in enumerate(conversations)
        )
        out = Path(str(chat.config.out))
        with required_file(out):
            replace_file(out, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in complete))
        cut = sum(not answer.complete for answer in answers.values())
        print(f"{len(answers)} answers in {out}" + (f"; {cut} are cut, with finish_reason length" if cut else ""))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
