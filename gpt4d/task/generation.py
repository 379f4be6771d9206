"""Text generation: prompts continued token by token."""

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer

from gpt4d.config import ConfigError
from gpt4d.model import registry
from gpt4d.model.edges import edges, plain
from gpt4d.model.parts import STREAM, EdgeTensor
from gpt4d.parallel import compile
from gpt4d.parallel.comm.pending import MAX
from gpt4d.parallel.layers.sequence import Documents, KeyValueCache, TokenIndex, own_segments
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.pipeline.runtime import forward_over_stages
from gpt4d.parallel.pipeline.stage_links import Exchange
from gpt4d.parallel.stage import Stage
from gpt4d.task.task import Sampling

# Returns the documents of ids [texts, tokens]. Arguments: the ids on the device, and in host memory.
DocumentsOf = Callable[[torch.Tensor, torch.Tensor], Documents | None]
DEFAULT, GREEDY = Sampling(), Sampling(temperature=0)
# Returns whether text i ends after the new ids. All ranks must return the same.
Ends = Callable[[int, list[int]], bool]


def prompt_lines(path: str) -> list[str]:
    """Return the lines of the file ``prompts``, which end at a newline or a Windows line ending, and nowhere else.

    Raises ConfigError if the file cannot be read or is not UTF-8.
    """
    try:
        lines = Path(path).read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"prompts={path}: {reason}; use a text file in UTF-8") from None
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def continuations(
    stage: Stage,
    tokenizer: Tokenizer,
    end: int,
    prompts: Sequence[str],
    tokens: int,
    documents: DocumentsOf = lambda ids, on_host: None,
    sampling: Sampling = DEFAULT,
    begins: bool = True,
) -> list[str]:
    """Return each prompt and the model's continuation of it. Every rank calls it and gets the same texts.

    Args:
        stage: this rank's part of the model.
        tokenizer: the model's tokenizer.
        end: id of the token that ends a text.
        prompts: texts to continue.
        tokens: maximum number of new tokens per text; a text ends earlier at an end-of-text token.
        documents: returns the documents of ids, for models whose attention stays inside a document.
        sampling: how tokens are drawn.
        begins: whether the tokenizer adds its first tokens to a prompt.
    """
    ids = [tokenizer.encode(prompt, add_special_tokens=begins).ids or [end] for prompt in prompts]
    new = continued(stage, ids, tokens, {end}, documents, sampling)
    return [tokenizer.decode(before + after) for before, after in zip(ids, new, strict=True)]


def continued(
    stage: Stage,
    texts: Sequence[list[int]],
    tokens: int,
    end: Container[int],
    documents: DocumentsOf = lambda ids, on_host: None,
    sampling: Sampling = DEFAULT,
    ends: Ends = lambda index, new: False,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """Return the new ids of each text, without the id that ends it. Every rank calls it and gets the same ids.

    Keys and values of earlier tokens are cached: after the prompts, each forward computes one token of each text. Once
    a text exceeds the model's maximum length, each new token changes the positions of its context, which is recomputed.
    The ranks of data and z compute different texts. If there are too few texts, the ranks of ``parallel.context`` have
    the same text: each computes segments of the prompt, and then all compute the new tokens.

    Args:
        stage: this rank's part of the model.
        texts: ids of the texts to continue, each at least one.
        tokens: maximum number of new tokens per text.
        end: ids of the tokens that end a text.
        documents: returns the documents of ids, for models whose attention stays inside a document.
        sampling: how tokens are drawn.
        ends: called after each new token of a text.
        interrupted: called on every rank for each token; all texts end if it returns true on any rank.
    """
    grid, device = stage.grid, stage.weights.device
    model: Any = stage.module
    settings = model.spec.config
    ranks = grid.context.size if len(texts) <= grid.sample_shards else 1  # number of ranks with the same text
    longest = max(map(len, texts)) + tokens
    capacity = min(settings.max_positions, rounded_up(longest, 2 * ranks) if ranks > 1 else longest)
    samples = rounded_up(len(texts) * ranks, stage.batch_shards)
    share, shard = samples // grid.sizes.batch_shards, grid.batch_shard // ranks
    own = range(share * shard, min(share * (shard + 1), len(texts)))
    reader, sampler = _Reader(stage, samples, own, share, capacity, documents, ranks), Sampler(sampling, len(texts))
    new: list[list[int]] = [[] for _ in texts]
    growing = [True] * len(texts)
    for _ in range(tokens):
        drawn = [-1] * len(texts)
        grown = [[*text, *after] for text, after in zip(texts, new, strict=True)]
        logits = reader.read(grown)
        if logits is not None:
            complete = grid.x.all_gather(logits.t().contiguous()).t()[:, : settings.vocab_size].float().cpu()
            for index, row in zip(own, complete, strict=True):
                drawn[index] = sampler.draw(index, grown[index], row)
        # All ranks use the draws of one rank per text, so that ranks that round differently end together.
        draws = grid.x.index == grid.y.index == grid.batch_shard % ranks == 0
        proposed = torch.tensor([*(drawn if draws else [-1] * len(texts)), int(interrupted())], device=device)
        *choices, stop = grid.world.all_reduce(proposed, MAX).tolist()
        if stop:
            break
        for index, token in enumerate(choices):
            growing[index] = growing[index] and token not in end
            if growing[index]:
                new[index].append(token)
                growing[index] = not ends(index, new[index])
        if not any(growing):
            break
    return new


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


def rounded_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple


class _Reader:
    """Computes the logits of the tokens that follow growing texts.

    Args:
        stage: this rank's part of the model.
        samples: number of texts of all ranks together, rounded up.
        own: indices of this rank's texts.
        share: number of texts that each rank computes; some may be empty.
        capacity: maximum number of tokens of a forward.
        documents: as for ``continued``.
        ranks: number of ranks of the axis ``context`` that have the same texts; 1, or all.
    """

    def __init__(
        self, stage: Stage, samples: int, own: range, share: int, capacity: int, documents: DocumentsOf, ranks: int
    ):
        self.stage, self.samples, self.own, self.share = stage, samples, own, share
        self.capacity, self.documents, self.ranks = capacity, documents, ranks
        self._cache: KeyValueCache | None = None
        self._exchanges: dict[int, Exchange | None] = {}  # by this rank's tokens of each text in a forward

    def read(self, texts: Sequence[list[int]]) -> torch.Tensor | None:
        """Return the logits [own texts, vocabulary over x] after each own text; None on stages that have no head.

        A text may grow by at most one token between two calls. All ranks compute the same number of tokens of each
        text.
        """
        fresh = self._cache is None or any(len(text) > self.capacity for text in texts)
        count = min(self.capacity, max(map(len, texts))) if fresh else 1
        splits = fresh and self.ranks > 1 and rounded_up(count, 2 * self.ranks) <= self.capacity
        rows = [texts[index][-self.capacity :] for index in self.own]
        rows += [[0]] * (self.share - len(rows))
        if fresh:
            self._cache = KeyValueCache(self.capacity)
        device = self.stage.weights.device
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        first = torch.zeros_like(last) if fresh else last
        on_host = torch.tensor([row + [0] * (self.capacity - len(row)) for row in rows])
        ids = on_host.to(device)
        if splits:
            complete = torch.arange(rounded_up(count, 2 * self.ranks), device=device).expand(len(rows), -1)
            context = self.stage.grid.context
            places = own_segments(complete, context.size, context.index)
        else:
            complete, places = None, first[:, None] + torch.arange(count, device=device)
        sample_ids, documents = torch.arange(len(rows), device=device), self.documents(ids, on_host)
        tokens = TokenIndex(sample_ids, self.capacity, self.stage.grid.axis(None), documents)
        positions = tokens.positions.gather(1, places)
        assert self._cache is not None
        self._cache.begin(places, positions, documents, complete)
        model, window, cache = self.stage.module, ids.gather(1, places), self._cache

        def compute(part, received):
            out = model(window, sample_ids, None, part, received, cache)
            return {"logits" if part.ends else STREAM: out}

        length = places.shape[1]
        if length not in self._exchanges:
            self._exchanges[length] = exchange_for(self.stage, self.samples, length)
        with torch.no_grad(), compile.disabled():
            result = forward_over_stages(self.stage, self._exchanges[length], compute)
        if result is None:
            return None
        logits = result["logits"]
        if not splits:
            return logits[sample_ids, last - first][: len(self.own)]
        found = logits.new_zeros(len(rows), logits.shape[-1])
        texts_here, columns = (places == last[:, None]).nonzero(as_tuple=True)
        found[texts_here] = logits[texts_here, columns]
        return self.stage.grid.context.all_reduce(found)[: len(self.own)]


def exchange_for(
    stage: Stage, samples: int, length: int, layout_of: Callable[[EdgeTensor], Layout] = plain
) -> Exchange | None:
    """Return the exchange between pipeline stages for ``samples`` on all ranks; None for a single stage.

    Arguments as for ``gpt4d.model.edges.edges``. With ``unsharded_batch``, ranks of data and z have the same samples.
    """
    if stage.exchange is None:
        return None
    model: Any = stage.module
    description, dtype = registry.describe(model.spec.config), stage.weights.context.compute_dtype
    return stage.exchange.without_gradients(edges(description, stage.crossing, samples, length, dtype, layout_of))
