"""Layers on this rank's parts of global tensors, compared with plain torch in float64."""

import torch

from gpt4d.parallel.context import Context
from gpt4d.parallel.gradient_reducer import GradientReducer
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


def close(ours, theirs, bound=1e-13):
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= bound * theirs.norm()


def filled(weights, layers, scale=1.0):
    """Give the parameters of layers random values. Return the parameters and the global values, by name."""
    parameters = dict(layers.named_parameters())
    wholes = {name: scale * normal(*p.spec.shape, seed=50 + i) for i, (name, p) in enumerate(parameters.items())}
    for name, parameter in parameters.items():
        fill(parameter, wholes[name], weights)
    return parameters, wholes


def check(weights, layers, ours, theirs, inputs, outputs, bound=1e-13, scale=1.0):
    """Compare outputs and gradients of ``ours(*parts)`` with those of ``theirs(parameters, *inputs)``.

    ``layers`` is the module of ``ours``. Its parameters get random values times ``scale``. ``theirs`` takes the global
    parameters by name. ``inputs`` are pairs of a global tensor and its layout, ``outputs`` are the outputs' layouts.
    """
    parameters, wholes = filled(weights, layers, scale)
    reducer = GradientReducer(weights, parameters)
    mine = [part(whole, weights, layout).clone().requires_grad_() for whole, layout in inputs]
    leaves = [whole.clone().requires_grad_() for whole in (*wholes.values(), *(whole for whole, _ in inputs))]
    found, expected = ours(*mine), theirs(dict(zip(wholes, leaves, strict=False)), *leaves[len(wholes) :])
    if len(outputs) == 1:
        found, expected = [found], [expected]
    upstream = [normal(*whole.shape, seed=90 + i) for i, whole in enumerate(expected)]
    torch.autograd.backward(found, [part(d, weights, layout) for d, layout in zip(upstream, outputs, strict=True)])
    torch.autograd.backward(expected, upstream)
    # Sharded weights reduce-scatter their gradients over z. The reducer handles the remaining axes.
    reducer.finish()
    layouts = [*outputs, *(p.spec.layout for p in parameters.values()), *(layout for _, layout in inputs)]
    gradients = [tensor.grad for tensor in (*parameters.values(), *mine)]
    wholes = [*expected, *(leaf.grad for leaf in leaves)]
    for one, whole, layout in zip([*found, *gradients], wholes, layouts, strict=True):
        close(one, part(whole, weights, layout), bound)


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
