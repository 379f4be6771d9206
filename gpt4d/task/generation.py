"""Text generation: a prompt continued token by token."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer

from gpt4d.data.tokenizers import end_of_text
from gpt4d.model import registry
from gpt4d.model.description import STREAM
from gpt4d.model.edges import edges, whole_batch
from gpt4d.parallel import collectives
from gpt4d.parallel.pipeline.exchange import Exchange
from gpt4d.parallel.pipeline.runtime import forward_over_stages
from gpt4d.parallel.stage import Stage


def continuation(
    stage: Stage,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    documents: Callable[[torch.Tensor], torch.Tensor | None] = lambda ids: None,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Return ``prompt`` and the model's continuation of it. Every rank of the grid calls it and gets the same text.

    The full text is computed again for each token: simple, and right on every grid. The model always sees the same
    number of tokens, since GPUs prepare kernels for each length: a shorter text is padded with end-of-text on the
    right, where causal attention does not look. ``documents`` returns the index of each token's document, for models
    whose attention stays inside one.
    """
    model, grid, device = stage.module, stage.grid, stage.weights.device
    settings: Any = model.config
    end = end_of_text(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    generator = torch.Generator().manual_seed(seed)
    length = min(settings.max_positions, len(ids) + tokens)
    sample_ids = torch.zeros(1, dtype=torch.int64, device=device)
    exchange = exchange_of_all(stage, 1, length)
    model.eval()
    for _ in range(tokens):
        text = ids[-length:]
        window = torch.tensor([text + [end] * (length - len(text))], device=device)

        def compute(part, received, window=window):
            out = model(window, sample_ids, documents(window), part, received)
            return {"logits" if part.ends else STREAM: out}

        with torch.no_grad():
            result = forward_over_stages(stage, exchange, compute)
        drawn = -1
        if result is not None:
            whole = collectives.all_gather(result["logits"][0, len(text) - 1], grid.x)[: settings.vocab_size]
            drawn = _draw(whole.float().cpu(), temperature, top_k, generator)
        # One rank's draw counts, so that ranks that round differently still end together.
        choice = torch.full((), drawn if grid.stage.index == 0 else -1, dtype=torch.int64, device=device)
        token = int(collectives.all_reduce(choice, grid.world, dist.ReduceOp.MAX))
        if token == end:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def exchange_of_all(stage: Stage, samples: int, length: int) -> Exchange | None:
    """Return the exchange of what crosses for some samples, which all ranks that split a batch have."""
    if stage.exchange is None:
        return None
    model: Any = stage.module
    description, dtype = registry.describe(model.config), stage.weights.compute_dtype
    return stage.exchange.without_gradients(edges(description, stage.crossing, samples, length, dtype, whole_batch))


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
