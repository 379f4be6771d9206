"""Global tensors of the layers' tests, this rank's parts of them, and the comparison of both, in float64."""

import torch

from gpt4d.parallel.context import Context
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.sharded_weights import ShardedWeights


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights_on(sizes, **settings):
    return ShardedWeights(Context(Grid(sizes), torch.float64, **settings), torch.float64)


def part(whole, weights, layout):
    return whole[weights.context.grid.local_slices(whole.shape, layout)]


def fill(parameter, whole, weights):
    with torch.no_grad():
        parameter.copy_(part(whole.reshape(parameter.spec.shape), weights, parameter.spec.layout))


def close(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= 1e-13 * theirs.norm()


def check_cases(function, sizes, cases):
    """On a rank: call ``function(sizes, *case)`` for each case and return its results. An error names its case."""
    results = []
    for case in cases:
        try:
            results.append(function(sizes, *case))
        except Exception as error:
            error.add_note(f"in {function.__name__}{(sizes, *case)}")
            raise
    return results
