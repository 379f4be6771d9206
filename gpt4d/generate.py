"""``python -m gpt4d.generate checkpoint=runs/NAME prompt="…"``: text from a trained model."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import MISSING
from tokenizers import Tokenizer

from gpt4d.checkpoint import checkpoint_dir, sharded
from gpt4d.config import Config, ConfigError, from_arguments
from gpt4d.data.tokenizers import end_of_text
from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage import Stage
from gpt4d.runtime.errors import one_line_errors
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage


@dataclass
class GenerateConfig:
    checkpoint: str = MISSING  # a checkpoint, or a run directory for its newest one
    prompt: str = MISSING
    tokens: int = 200  # most tokens to add; the text ends earlier at an end-of-text token
    temperature: float = 0.8  # 0: always the most likely token
    top_k: int = 50  # only the k most likely tokens; 0: all
    seed: int = 0


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
    """Return ``prompt`` and what the model adds to it. Every rank of the grid calls it and gets the same text.

    The full text is computed again for each token: simple, and right on every grid. ``documents`` returns the index of
    each token's document, for models whose attention stays inside one.
    """
    model, grid, device = stage.module, stage.grid, stage.weights.device
    end = end_of_text(tokenizer)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.max_positions :]], device=device)
        with torch.no_grad():
            logits = model(window, torch.zeros(1, dtype=torch.int64, device=device), documents(window))[0, -1]
        logits = collectives.all_gather(logits, grid.x)[: model.config.vocab_size]
        choice = _draw(logits.float().cpu(), temperature, top_k, generator)
        # The first rank's draw counts: ranks that round differently still end together.
        choice = torch.tensor(choice if grid.stage.index == 0 else -1, device=device)
        choice = int(collectives.all_reduce(choice, grid.stage, dist.ReduceOp.MAX))
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
        run = Config(model=checkpoint_dir.Meta.read(directory).model)
        stage = build_stage(run, Grid(device_type=job.device.type), job.device)
        sharded.load(directory, stage.module, None, stage.grid)
        tokenizer = Tokenizer.from_file(str(directory / checkpoint_dir.TOKENIZER))
        sampling = {"temperature": config.temperature, "top_k": config.top_k, "seed": config.seed}
        print(continuation(stage, tokenizer, config.prompt, config.tokens, **sampling))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
