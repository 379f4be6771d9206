"""The costs of kernels without torch.compile, which gpt4d/parallel/eager.json records, and the shapes of their results.

``python -m tests.parallel.test_eager_costs`` records the costs again.
"""

import json
from importlib import import_module

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory import allocated_peak
from benchmarks.virtual_operations import Operations, has_kernel, nbytes, tensors_in
from gpt4d.parallel.function import EAGER_COSTS, Kernel
from gpt4d.parallel.layers import (
    activations,
    conv,
    dropout,
    embedding,
    group_norm,
    linear,
    loss,
    norm,
    product,
    rotary,
)
from gpt4d.parallel.layers.group_norm_kernels import Groups
from gpt4d.parallel.symbolic import SymbolicTensor

ROWS, FEATURES = 2048, 512  # so many that statistics of rows and parameters do not count
DTYPES = torch.float32, torch.bfloat16


def examples(dtype: torch.dtype) -> list[tuple[Kernel, tuple]]:
    """Return kernels with arguments: features of ``dtype``, statistics and parameters in float32."""
    x, branch, d_out, d_stream = torch.randn(4, ROWS, FEATURES).to(dtype)
    mean, rstd, weight, bias = torch.randn(ROWS, 1), torch.rand(ROWS, 1), torch.randn(FEATURES), torch.randn(FEATURES)
    sums = torch.randn(2, ROWS, 1)
    pair, heads = torch.randn(ROWS, 2, FEATURES).to(dtype), torch.randn(1, ROWS, 8, FEATURES // 8).to(dtype)
    cos, sin = torch.randn(2, 1, ROWS, 1, FEATURES // 16)
    found: list[tuple[Kernel, tuple]] = []
    for added in (None, branch):
        found += [
            (norm.layer_norm, (x, added, weight, bias, 1e-5)),
            (norm.mean_and_variance, (x, added)),
            (norm.rms_norm, (x, added, weight, 1e-5)),
            (norm.sum_of_squares, (x, added)),
        ]
    for added in (None, d_stream):
        found += [
            (norm.layer_norm_gradients, (d_out, added, x, weight, bias, mean, rstd)),
            (norm.split_layer_norm_gradients, (d_out, added, x, mean, rstd, weight, sums)),
            (norm.rms_norm_gradients, (d_out, added, x, rstd, weight)),
            (norm.split_rms_norm_gradients, (d_out, added, x, rstd, weight, sums[0])),
        ]
    return [
        *found,
        (norm.combined_statistics, (torch.rand(4, 2, ROWS), 1e-5)),
        (norm.reciprocal_root, (torch.rand(ROWS), FEATURES, 1e-5)),
        (norm.mean_of, (torch.rand(2, ROWS), FEATURES)),
        (loss.largest_logits, (x, FEATURES)),
        (norm.normalized, (x, mean, rstd, weight, bias)),
        (norm.sums_of_gradient, (d_out, x, mean, rstd, weight)),
        (norm.scaled, (x, rstd, weight)),
        (norm.sum_of_rms_gradient, (d_out, x, rstd, weight)),
        (activations.gelu_gradients, (d_out, x, bias)),
        (activations.swiglu, (pair,)),
        (activations.swiglu_gradient, (d_out, pair)),
        (rotary.rotated, (heads, cos, sin, 1)),
        (loss.sums_of_exponentials, (x, sums[0, :, 0], FEATURES)),
        (loss.softmax_, (x.clone(), sums[0, :, 0], sums[1, :, 0], FEATURES)),
    ]


def further_examples() -> list[tuple[Kernel, tuple]]:
    """Return kernels with arguments whose costs the planner does not take from their shapes."""
    x, d_out, bias = torch.randn(6, 8), torch.randn(6, 4), torch.randn(2, 4)
    table, ids, elsewhere = torch.randn(10, 8), torch.arange(6), torch.arange(6) > 3
    image, channels = torch.randn(2, 6, 6, 3), torch.randn(4, 3, 3, 3)
    settings = conv.Convolution((2, 2), (1, 1), 1, in_first=False)
    halved = torch.randn(2, 3, 3, 4)
    groups = Groups([0, 0, 1], 2)
    of_groups, of_channels, parameter = torch.rand(2, 2), torch.rand(2, 3), torch.rand(3)
    logits, row, targets = torch.randn(6, 8), torch.rand(6), torch.arange(6)
    return [
        (activations.gelu, (x,)),
        (dropout.row_keys, (ids, ids, 3)),
        (dropout.dropped, (x, ids, 0, 0.5)),
        (rotary.rotations, (ids.view(2, 3), x, (1.0, 0.5), 1.0)),
        (product.cast, (x, bias.bfloat16())),
        (product.add_bias_, (x.clone(), torch.randn(8))),
        (product.add_bias, (x, torch.randn(8))),
        (product.bias_gradient, (x, bias)),
        (product.local_bias, (bias, x, 2, 1)),
        (product.parts_first, (x, 2)),
        (product.parts_last, (torch.randn(2, 6, 4),)),
        (product.placeholder, (x, (3, 5))),
        (linear.linear, (x, torch.randn(8, 2, 4), bias, False)),
        (linear.linear_input_gradient, (d_out, torch.randn(8, 4), x, False)),
        (linear.linear_weight_gradient, (d_out, x, torch.randn(4, 4), None, False)),
        (conv.convolution, (image, channels, None, settings)),
        (conv.convolution_input_gradient, (halved, channels, image, settings)),
        (conv.convolution_weight_gradient, (halved, image, channels, None, settings)),
        (embedding.look_up, (table, ids, 0)),
        (embedding.clear_, (x.clone(), elsewhere)),
        (embedding.cleared, (x, elsewhere, table)),
        (embedding.table_gradient, (x, ids, 10, None)),
        (embedding.add_positions, (x, table, 3)),
        (embedding.positions_gradient, (x, table, 3)),
        (embedding.add_rows_at, (x, table, ids)),
        (embedding.rows_at_gradient, (x, table, ids)),
        (group_norm.widened, (image.bfloat16(),)),
        (group_norm.moments, (image, groups)),
        (group_norm.with_counts, (of_groups, of_groups, groups)),
        (group_norm.combined_moments, (torch.rand(4, 3, 2, 2), 3, 36)),
        (group_norm.variance_of, (of_groups, 3)),
        (group_norm.normalized_groups, (image, image, of_groups, of_groups, parameter, parameter, groups, 1e-5)),
        (group_norm.sums_of_channels, (image, image, of_channels, of_channels)),
        (group_norm.sums_of_groups, (torch.rand(2, 2, 3), parameter, groups)),
        (
            group_norm.group_norm_gradients,
            (image, image, image, parameter, of_channels, torch.rand(2, 2, 3), torch.rand(2, 2, 2), groups, 36),
        ),
        (loss.local_targets, (targets, 0, 8)),
        (loss.target_logits, (logits, row, targets, elsewhere)),
        (loss.stacked, (row, row)),
        (loss.total_loss, (torch.rand(2, 6),)),
        (loss.target_gradients, (logits, torch.ones(()), row, row, targets, elsewhere)),
        (loss.write_targets_, (logits.clone(), row, targets, 8)),
        (loss.zero_, (logits.clone(),)),
    ]


def symbolic(value):
    if not isinstance(value, torch.Tensor):
        return value
    return SymbolicTensor(None, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def test_the_declared_shapes_and_dtypes_are_those_of_the_results():
    checked = set()
    for kernel, arguments in [*examples(torch.float32), *examples(torch.bfloat16), *further_examples()]:
        declared = kernel.shapes(*map(symbolic, arguments))
        results = function_of(kernel)(*arguments)
        as_tuple = [value if isinstance(value, tuple) else (value,) for value in (declared, results)]
        for one, other in zip(*as_tuple, strict=True):
            assert (one is None) == (other is None), kernel.name
            assert one is None or (one.shape, one.dtype) == (symbolic(other).shape, symbolic(other).dtype), kernel.name
        checked.add(kernel.name)
    layers = [activations, conv, dropout, embedding, group_norm, linear, loss, norm, product, rotary]
    assert checked == {value.name for layer in layers for value in vars(layer).values() if isinstance(value, Kernel)}


def function_of(kernel: Kernel):
    """Return a kernel's function on torch's tensors, which is not compiled."""
    return getattr(import_module(f"{kernel.__module__}_kernels"), kernel.__name__)


class Counter(TorchDispatchMode):
    """Counts operations and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        # Products take no time, a byte takes a second.
        self.costs, self.operations, self.moved = Operations(float("inf"), 1e-9, 0.0, 0), 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if has_kernel(func, list(tensors_in((args, kwargs))), kwargs):
            self.operations += 1
            self.moved += self.costs.cost(func, args, kwargs).seconds
        return func(*args, **kwargs)


def measure(kernel: Kernel, arguments: tuple) -> tuple[float, int, float]:
    """Return the bytes moved, relative to those of arguments and results, the operations, and temporary bytes."""
    function = function_of(kernel)
    with Counter() as counter:
        results = function(*arguments)
    needed = sum(map(nbytes, tensors_in((arguments, results))))
    new = sum(map(nbytes, tensors_in(results)))
    del results
    temporary = allocated_peak(lambda: function(*arguments)) - new
    return round(counter.moved / needed, 3), counter.operations, round(max(0, temporary) / needed, 3)


def measured() -> dict[str, tuple[float, int, float]]:
    costs = {}
    for dtype in DTYPES:
        for kernel, arguments in examples(dtype):
            first, *others = tensors_in(arguments)
            costs[f"{kernel.name} {symbolic(first).dtype} {1 + len(others)}"] = measure(kernel, arguments)
    return costs


@pytest.mark.slow
def test_the_recorded_costs_are_those_of_the_kernels():
    recorded = json.loads(EAGER_COSTS.read_text())
    found = measured()
    assert recorded.keys() == found.keys()
    for name, cost in found.items():
        assert recorded[name] == pytest.approx(cost, abs=2e-3), name


if __name__ == "__main__":
    lines = (f'  "{name}": {json.dumps(cost)}' for name, cost in measured().items())
    EAGER_COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
