"""The work of the overlaps' benchmark, the same for every team: transformer blocks, forward and backward."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from gpt4d.config import GridSizes, ModelConfig
from gpt4d.model.gpt import GPT
from gpt4d.model.init import initialize
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream

SIZES = GridSizes(2, 2, 2, 1)
BATCH, LENGTH = 8, 128
LAYERS, HIDDEN, HEADS = 4, 512, 8
# The rest of the model is built but takes no part: the vocabulary is as small as it may be.
MODEL = ModelConfig("blocks", LAYERS, HIDDEN, HEADS, vocab_size=8, vocab_multiple=8, max_positions=LENGTH)


def our_model(weights: WeightStream, **settings) -> GPT:
    model = GPT(MODEL, weights, **settings)
    initialize(model, 0, weights.grid)
    return model


def whole_weights() -> dict[str, torch.Tensor]:
    """The global tensors of ``our_model``. To be called before there is a process group."""
    return {name: p.detach() for name, p in our_model(WeightStream(Grid())).named_parameters()}


def ends(z: int, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes in at the blocks' beginning and what gradient comes in at their end.

    Both are the part [BATCH / 2, LENGTH, HIDDEN / 2] of the rank whose places along z and y these are.
    """
    share, part = BATCH // SIZES.batch_shards, HIDDEN // SIZES.y
    place = (slice(z * share, (z + 1) * share), slice(None), slice(y * part, (y + 1) * part))
    generator = torch.Generator().manual_seed(0)
    first, last = torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator)
    return first[place].contiguous().requires_grad_(), last[place].contiguous()


def take_gradient_norms(inputs: torch.Tensor, matrices: Iterable[torch.Tensor]) -> dict[str, float]:
    """The norms of the global gradients of the input and of all matrices, which show that teams compute the same.

    The ranks along x have the same part of the input, and no two ranks the same part of a matrix. ``inputs.grad`` is
    gone afterwards.
    """
    squares = torch.stack((inputs.grad.square().sum() / SIZES.x, sum(m.grad.square().sum() for m in matrices)))
    dist.all_reduce(squares)
    inputs.grad = None
    of_inputs, of_weights = squares.sqrt().tolist()
    return {"input_gradient": of_inputs, "weight_gradient": of_weights}
