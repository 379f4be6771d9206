"""``python -m gpt4d.generate checkpoint=runs/NAME prompt="…"``: text from a trained GPT."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import MISSING
from tokenizers import Tokenizer

from gpt4d.checkpoint import checkpoint_dir, sharded
from gpt4d.config import ConfigError, from_arguments
from gpt4d.data.tokenizers import end_of_text
from gpt4d.model.gpt import GPT
from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream, compute_dtype
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


@dataclass
class GenerateConfig:
    checkpoint: str = MISSING  # a checkpoint, or a run: then its newest
    prompt: str = MISSING
    tokens: int = 200  # to add at the most; it ends at an end-of-text
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 50  # only the k likeliest tokens; 0: all
    seed: int = 0


def continuation(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """``prompt`` and what the model adds to it. Every rank of the grid calls it, and gets the same text.

    The whole text is computed again for each token: simple, and right on every grid.
    """
    grid, device = model.weights.grid, model.weights.device
    end = end_of_text(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.max_positions :]], device=device)
        with torch.no_grad():
            logits = model(window, torch.zeros(1, dtype=torch.int64, device=device))[0, -1]
        logits = collectives.all_gather(logits, grid.x)[: model.config.vocab_size]
        choice = _draw(logits.float().cpu(), temperature, top_k, generator)
        # Rank 0's draw: should ranks ever round differently, they still end together.
        choice = torch.tensor(choice if grid.world.index == 0 else -1, device=device)
        choice = int(collectives.all_reduce(choice, grid.world, dist.ReduceOp.MAX))
        if choice == end:
            break
        ids.append(choice)
    return tokenizer.decode(ids)


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def main(arguments: list[str]) -> None:
    config = from_arguments(GenerateConfig, arguments)
    for key in ("tokens", "temperature", "top_k"):
        if getattr(config, key) < 0:
            raise ConfigError(f"{key}={getattr(config, key)}: use a value of at least 0")
    directory = checkpoint_dir.located(Path(config.checkpoint))
    with process_group(Launch()) as job:  # one process, whatever a launcher may say
        device = job.device
        weights = WeightStream(Grid(device_type=device.type), compute_dtype("auto", device), device=device)
        model = GPT(checkpoint_dir.Meta.read(directory).model, weights)
        sharded.load(directory, model, None, weights.grid)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        sampling = (config.tokens, config.temperature, config.top_k, config.seed)
        print(continuation(model, tokenizer, config.prompt, *sampling))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
