"""The choice of the next token, by the processors of transformers."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from gpt4d.task.task import Sampling

GREEDY = Sampling(temperature=0)


class Sampler:
    """Draws tokens for some texts. The order of the processors is transformers' own."""

    def __init__(self, sampling: Sampling, texts: int):
        from transformers.generation import logits_process  # takes a second to import

        self._greedy = sampling.temperature == 0
        self._generators = [torch.Generator().manual_seed(sampling.seed + index) for index in range(texts)]
        self._processors = logits_process.LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._processors.append(logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if self._greedy:
            return
        self._processors.append(logits_process.TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            self._processors.append(logits_process.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._processors.append(logits_process.TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._processors.append(logits_process.MinPLogitsWarper(sampling.min_p))

    def draw(self, index: int, ids: Sequence[int], logits: torch.Tensor) -> int:
        """Return the token after text ``index``, whose ids are ``ids``. ``logits`` [vocabulary], on the host."""
        before: Any = torch.tensor([ids])
        (scores,) = self._processors(before, cast(Any, logits[None]))
        if self._greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generators[index]))
