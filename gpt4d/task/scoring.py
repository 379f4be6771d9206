"""Log-likelihoods of given tokens under a text model, on any plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from gpt4d.model.parts import STREAM
from gpt4d.parallel import compile
from gpt4d.parallel.layers.loss import log_likelihoods
from gpt4d.parallel.pipeline.runtime import forward_over_stages
from gpt4d.parallel.pipeline.stage_links import Exchange
from gpt4d.parallel.stage import Stage
from gpt4d.step import mask_replicas
from gpt4d.task.generation import exchange_for, rounded_up


class Continuation(NamedTuple):
    """Tokens after a context, whose log-likelihood is asked. The context has at least one token."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]


class Score(NamedTuple):
    """The log-likelihood of a continuation, and whether greedy decoding produces it."""

    log_likelihood: float
    greedy: bool


@dataclass
class _Sequence:
    """The inputs of a forward, and the continuations that it scores."""

    inputs: list[int]
    continuations: list[tuple[int, list[int]]] = field(default_factory=list)  # index of the request, and its tokens


class Scorer:
    """Computes log-likelihoods with the model of ``stage``. Every rank calls it with the same requests.

    Args:
        stage: this rank's part of the model.
        batch_size: sequences of a batch; it is rounded up to a multiple of the batch shards of each stage.
    """

    def __init__(self, stage: Stage, batch_size: int):
        self.stage, self.together = stage, rounded_up(batch_size, stage.batch_shards)
        model: Any = stage.module
        self.settings = model.spec.config

    def scores(self, requests: Sequence[Continuation]) -> list[Score]:
        """Return the score of each request. Every rank gets the same scores.

        Batches consist of sequences of similar length, the longest first. The ranks of data and z compute different
        sequences. Requests with equal inputs, such as answers of one token to a question, share one sequence. A context
        is truncated from its beginning if the model's maximum length requires it.
        """
        sequences = sorted(self._sequences(requests), key=lambda each: (-len(each.inputs), each.inputs))
        totals = torch.zeros(2, len(requests), dtype=torch.float64, device=self.stage.weights.device)
        exchanges: dict[tuple[int, int], Exchange | None] = {}
        with torch.no_grad(), compile.disabled():
            for start in range(0, len(sequences), self.together):
                self._add(sequences[start : start + self.together], totals, exchanges)
        # Ranks with the same values count once, so that the sum over all ranks contains each value once.
        log_likelihood, differing = self.stage.grid.world.all_reduce(mask_replicas(totals, self.stage.grid)).tolist()
        return [Score(total, not wrong) for total, wrong in zip(log_likelihood, differing, strict=True)]

    def _sequences(self, requests: Sequence[Continuation]) -> list[_Sequence]:
        by_inputs: dict[tuple[int, ...], _Sequence] = {}
        for index, (context, tokens) in enumerate(requests):
            inputs = (context + tokens)[:-1][-self.settings.max_positions :]
            found = by_inputs.setdefault(inputs, _Sequence(list(inputs)))
            found.continuations.append((index, list(tokens[-len(inputs) :])))
        return list(by_inputs.values())

    def _add(self, sequences: list[_Sequence], totals: torch.Tensor, exchanges: dict) -> None:
        """Add the log-likelihoods of this rank's share of ``sequences``, and the numbers of tokens that differ."""
        stage, device, length = self.stage, self.stage.weights.device, len(sequences[0].inputs)
        samples = rounded_up(len(sequences), stage.batch_shards)
        share = samples // stage.grid.sizes.batch_shards
        own = sequences[share * stage.grid.batch_shard :][:share]
        rows = [each.inputs + [0] * (length - len(each.inputs)) for each in own]
        rows += [[0] * length] * (share - len(rows))
        ids, sample_ids = torch.tensor(rows, device=device), torch.arange(share, device=device)
        model: Any = stage.module

        def compute(part: Any, received: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return {"logits" if part.ends else STREAM: model(ids, sample_ids, None, part, received)}

        shape = samples, length
        if shape not in exchanges:
            exchanges[shape] = exchange_for(stage, *shape)
        result = forward_over_stages(stage, exchanges[shape], compute)
        if result is None or not own:
            return
        places: list[int] = []
        targets: list[int] = []
        requests: list[int] = []
        for row, each in enumerate(own):
            for request, tokens in each.continuations:
                end = row * length + len(each.inputs)
                places += range(end - len(tokens), end)
                targets += tokens
                requests += [request] * len(tokens)
        logits = result["logits"].flatten(0, 1)[torch.tensor(places, device=device)]
        targets_T, requests_T = torch.tensor(targets, device=device), torch.tensor(requests, device=device)
        found, greedy = log_likelihoods(logits, targets_T, self.settings.vocab_size, stage.grid.x)
        totals[0].index_add_(0, requests_T, found.double())
        totals[1].index_add_(0, requests_T, (~greedy).double())
