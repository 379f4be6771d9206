"""A text model on all ranks that the program on rank 0 asks for log-likelihoods and texts."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from gpt4d.parallel.stage import Stage
from gpt4d.runtime import activity
from gpt4d.runtime.consensus import run_on_rank0
from gpt4d.task.generation import continued
from gpt4d.task.scoring import Continuation, Score, Scorer
from gpt4d.task.task import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class SharedModel:
    """The model of ``stage``, which all ranks compute together while rank 0 runs another program.

    Args:
        stage: this rank's part of the model.
        tokenizer: the model's tokenizer.
        end: ids of the tokens that end a text.
        batch_size: sequences that all ranks compute together.
    """

    def __init__(self, stage: Stage, tokenizer: "PreTrainedTokenizerBase", end: Sequence[int], batch_size: int):
        self.stage, self.tokenizer, self.end, self.batch_size = stage, tokenizer, end, batch_size
        model: Any = stage.module
        self.max_length: int = model.spec.config.max_positions
        self._scorer = Scorer(stage, batch_size)
        self._asked: SimpleQueue[dict[str, Any] | Exception | None] = SimpleQueue()  # None: the program has ended
        self._answers: SimpleQueue[Any] = SimpleQueue()

    def run(self, program: Callable[[], T]) -> T | None:
        """Run ``program`` on rank 0, which may call ``scores`` and ``continued``, and return its result there.

        All ranks must call this. Other ranks return None. An error of the program is raised on all ranks. The program
        runs in a thread of its own, while this thread waits for requests and computes them: the watchdog sees the same
        activities on all ranks, and does not limit the time between two requests.
        """
        results: list[T] = []

        def execute() -> None:
            try:
                results.append(program())
                self._asked.put(None)
            except Exception as error:
                self._asked.put(error)
            except BaseException as error:  # SystemExit ends only this thread
                self._asked.put(RuntimeError(repr(error)))

        if dist.get_rank() == 0:
            Thread(target=execute, name="evaluation", daemon=True).start()
        while (request := run_on_rank0(self._next, "waiting for the next requests")) is not None:
            answer = self._compute(request)
            if dist.get_rank() == 0:
                self._answers.put(answer)
        return results[0] if results else None

    def _next(self) -> dict[str, Any] | None:
        with activity.unlimited():
            request = self._asked.get()
        if isinstance(request, Exception):
            raise request
        return request

    def scores(self, requests: Sequence[Continuation]) -> list[Score]:
        """Return the score of each request (``Scorer.scores``)."""
        return self._ask({"scores": requests})

    def continued(self, texts: Sequence[list[int]], tokens: int, stops: Sequence[str], sampling: Sampling) -> list[str]:
        """Return the continuation of each text, of at most ``tokens`` tokens, up to the first of the ``stops``."""
        return self._ask({"texts": texts, "tokens": tokens, "stops": stops, "sampling": vars(sampling)})

    def _ask(self, request: dict[str, Any]) -> Any:
        self._asked.put(request)
        return self._answers.get()

    def _compute(self, request: dict[str, Any]) -> Any:
        if "scores" in request:
            return self._scorer.scores([Continuation(tuple(one), tuple(other)) for one, other in request["scores"]])
        ends = StopTexts(self.tokenizer, request["stops"])
        sampling, texts, tokens = Sampling(**request["sampling"]), request["texts"], request["tokens"]
        new = continued(self.stage, texts, tokens, self.end, sampling=sampling, ends=ends)
        return [ends.text(ids) for ids in new]


class StopTexts:
    """Ends texts that contain one of the ``stops`` (gpt4d.task.generation.Ends)."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stops: Sequence[str]):
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        # A token may have no visible character, and the first characters may be parts of one.
        self._longest = 8 + max((len(stop.encode()) for stop in self.stops), default=0)

    def __call__(self, index: int, new: Sequence[int]) -> bool:
        end = self._decoded(new[-self._longest :]) if self.stops else ""
        return any(stop in end for stop in self.stops)

    def text(self, new: Sequence[int]) -> str:
        """Return the text of ids up to the first stop."""
        text = self._decoded(new)
        return text[: min((text.index(stop) for stop in self.stops if stop in text), default=len(text))]

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
