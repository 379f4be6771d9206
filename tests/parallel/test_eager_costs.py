"""What kernels cost without torch.compile is recorded in gpt4d/parallel/eager.json.

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
from gpt4d.parallel.layers import activations, loss, norm, rotary

ROWS, FEATURES = 2048, 512  # so many that statistics of rows and parameters do not count
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    function = getattr(import_module(f"{kernel.__module__}_kernels"), kernel.__name__)
    with Counter() as counter:
        results = function(*arguments)
    needed = sum(map(nbytes, tensors_in((arguments, results))))
    new = sum(map(nbytes, tensors_in(results)))
    del results
    temporary = allocated_peak(lambda: function(*arguments)) - new
    return round(counter.moved / needed, 3), counter.operations, round(max(0, temporary) / needed, 3)


def measured() -> dict[str, tuple[float, int, float]]:
    return {
        f"{kernel.name} {name} {len(list(tensors_in(arguments)))}": measure(kernel, arguments)
        for name, dtype in DTYPES.items()
        for kernel, arguments in examples(dtype)
    }


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
