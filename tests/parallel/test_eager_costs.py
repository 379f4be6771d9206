"""The costs of eager kernels, recorded by ``python -m tests.parallel.test_eager_costs``, and the shapes of results."""

import json
from types import ModuleType

import pytest
import torch

from benchmarks.laboratory.memory import allocated_peak
from benchmarks.laboratory.virtual_operations import nbytes, tensors_in
from gpt4d.parallel.kernels import Kernel, PlannedKernel
from gpt4d.parallel.symbolic.costs import EAGER_COSTS, minimum_bytes
from tests.parallel.counting_device import CountedOperations
from tests.support import parallel_kernels
from tests.support.parallel_kernels import examples, further_examples, symbolic

DTYPES = torch.float32, torch.bfloat16


def test_the_declared_shapes_and_dtypes_are_those_of_the_results():
    checked = set()
    for kernel, arguments in [*examples(torch.float32), *examples(torch.bfloat16), *further_examples()]:
        declared = kernel.shapes(*map(symbolic, arguments))
        results = kernel.in_torch(*arguments)
        as_tuple = [value if isinstance(value, tuple) else (value,) for value in (declared, results)]
        for one, other in zip(*as_tuple, strict=True):
            assert (one is None) == (other is None), kernel.name
            assert one is None or (one.shape, one.dtype) == (symbolic(other).shape, symbolic(other).dtype), kernel.name
        checked.add(kernel.name)
    modules = [value for value in vars(parallel_kernels).values() if isinstance(value, ModuleType)]
    found = [value for module in modules for value in vars(module).values()]
    assert checked == {one.name for one in found if isinstance(one, Kernel) and not isinstance(one, PlannedKernel)}


def measure(kernel: Kernel, arguments: tuple) -> tuple[float, int, float]:
    """Return the bytes moved, relative to ``minimum_bytes``, the operations, and temporary bytes."""
    function = kernel.in_torch
    with CountedOperations() as counted:
        results = function(*arguments)
    needed = minimum_bytes(kernel, *map(symbolic, arguments))
    given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(arguments)}
    new = sum(nbytes(one) for one in tensors_in(results) if one.untyped_storage().data_ptr() not in given)
    del results
    temporary = allocated_peak(lambda: function(*arguments)) - new
    return round(counted.moved / needed, 3), counted.operations, round(max(0, temporary) / needed, 3)


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
