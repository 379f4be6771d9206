"""Text generation: prompts continued token by token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

from gpt4d.model import registry
from gpt4d.model.description import STREAM
from gpt4d.model.edges import edges, unsharded_batch
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.layers.key_value_cache import KeyValueCache
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.pipeline.runtime import forward_over_stages
from gpt4d.parallel.pipeline.stage_links import Exchange
from gpt4d.parallel.stage import Stage
from gpt4d.parallel.symbolic.kernels import MAX

# Returns the documents of ids [texts, tokens]. Arguments: the ids on the device, and in host memory.
DocumentsOf = Callable[[torch.Tensor, torch.Tensor], Documents | None]


def continuations(
    stage: Stage,
    tokenizer: Tokenizer,
    end: int,
    prompts: Sequence[str],
    tokens: int,
    documents: DocumentsOf = lambda ids, on_host: None,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> list[str]:
    """Return each prompt and the model's continuation of it. Every rank calls it and gets the same texts.

    Keys and values of earlier tokens are cached: after the prompts, each forward computes one token of each text. Once
    a text exceeds the model's maximum length, each new token changes the positions of its context, which is recomputed.
    Every rank of data and z computes all texts. Text i is drawn with the seed ``seed + i``, independently of all
    further texts.

    Args:
        stage: this rank's part of the model.
        tokenizer: the model's tokenizer.
        end: id of the token that ends a text.
        prompts: texts to continue.
        tokens: maximum number of new tokens per text; a text ends earlier at an end-of-text token.
        documents: returns the documents of ids, for models whose attention stays inside a document.
        temperature: divides the logits; 0 for greedy decoding.
        top_k: draw among the k most likely tokens; 0 for all.
        seed: seed of the sampling.
    """
    model, grid, device = stage.module, stage.grid, stage.weights.device
    spec: Any = model.spec
    settings = spec.config
    texts = [tokenizer.encode(prompt, add_special_tokens=False).ids or [end] for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(texts))]
    capacity = min(settings.max_positions, max(map(len, texts)) + tokens)
    reader = _Reader(stage, capacity, end, documents)
    growing = [True] * len(texts)
    model.eval()
    for _ in range(tokens):
        drawn = [-1] * len(texts)
        logits = reader.read(texts)
        if logits is not None:
            whole = grid.x.all_gather(logits.t().contiguous()).t()[:, : settings.vocab_size].float().cpu()
            drawn = [_draw(row, temperature, top_k, source) for row, source in zip(whole, generators, strict=True)]
        # All ranks use one rank's draws, so that ranks that round differently still end together.
        own = torch.tensor(drawn if grid.index == 0 else [-1] * len(texts), device=device)
        choices = grid.world.all_reduce(own, MAX).tolist()
        growing = [grows and token != end for grows, token in zip(growing, choices, strict=True)]
        texts = [[*text, token] if grows else text for text, token, grows in zip(texts, choices, growing, strict=True)]
        if not any(growing):
            break
    return [tokenizer.decode(text) for text in texts]


class _Reader:
    """Computes the logits of the tokens that follow growing texts."""

    def __init__(self, stage: Stage, capacity: int, end: int, documents: DocumentsOf):
        self.stage, self.capacity, self.end, self.documents = stage, capacity, end, documents
        self._cache: KeyValueCache | None = None
        self._exchanges: dict[int, Exchange | None] = {}  # by the tokens of each text in a forward

    def read(self, texts: Sequence[list[int]]) -> torch.Tensor | None:
        """Return the logits [texts, vocabulary over x] after each text; None on stages that have no head.

        A text may grow by at most one token between two calls.
        """
        slides = any(len(text) > self.capacity for text in texts)
        texts = [text[-self.capacity :] for text in texts]
        first, count = [len(text) - 1 for text in texts], 1
        if slides or self._cache is None:
            self._cache = KeyValueCache(self.capacity)
            first, count = [0] * len(texts), max(map(len, texts))
        device = self.stage.weights.device
        on_host = torch.tensor([text + [self.end] * (self.capacity - len(text)) for text in texts])
        ids = on_host.to(device)
        places = torch.tensor(first, device=device)[:, None] + torch.arange(count, device=device)
        sample_ids, documents = torch.arange(len(texts), device=device), self.documents(ids, on_host)
        positions = TokenIndex(sample_ids, self.capacity, self.stage.grid.axis(None), documents).positions.gather(
            1, places
        )
        self._cache.begin(places, positions, documents)
        model, window, cache = self.stage.module, ids.gather(1, places), self._cache

        def compute(part, received):
            out = model(window, sample_ids, None, part, received, cache)
            return {"logits" if part.ends else STREAM: out}

        if count not in self._exchanges:
            self._exchanges[count] = exchange_of_all(self.stage, len(texts), count)
        with torch.no_grad():
            result = forward_over_stages(self.stage, self._exchanges[count], compute)
        if result is None:
            return None
        last = torch.tensor([len(text) - 1 for text in texts], device=device) - places[:, 0]
        return result["logits"][sample_ids, last]


def exchange_of_all(stage: Stage, samples: int, length: int) -> Exchange | None:
    """Return the exchange between pipeline stages for samples that are replicated on all ranks of data and z."""
    if stage.exchange is None:
        return None
    model: Any = stage.module
    description, dtype = registry.describe(model.spec.config), stage.weights.context.compute_dtype
    return stage.exchange.without_gradients(edges(description, stage.crossing, samples, length, dtype, unsharded_batch))


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
