"""The kernels of compiled functions for GPUs that this machine does not have: number, registers, spills and values."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from gpt4d.parallel.compile import options_of
from gpt4d.parallel.kernels import Kernel
from gpt4d.parallel.layers import activations, float8, group_norm, heads, loss, norm
from tests.support import cross_compiler
from tests.support.grids import full
from tests.support.parallel_kernels import Sizes, fused_examples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="only Triton compiles for a GPU without one"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch's builds for GPUs ask the driver as they compile"),
]

# So large that both reductions of a norm's backward are in one kernel.
LARGE = Sizes(5120, 1024, 16, images=16, side=32, channels=256, groups=32)
# For the interpreter. An option puts both reductions into one kernel.
SMALL = Sizes(256, 128, 4, images=2, side=8, channels=64, groups=16)
SMALL_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}
# Not for AMD's GPUs. On a CPU the compiled functions have the bits of eager ones (tests/parallel/test_compile.py).
FLOAT8 = "float8"
# Number of GPU kernels that a function becomes, if there are several.
KERNELS = {
    "norm.split_layer_norm_gradients": 3, "norm.split_rms_norm_gradients": 3, "activations.gelu_gradients": 2,
    "float8.scale": 2, "group_norm.group_moments": 4, "group_norm.normalized": 2, "group_norm.group_norm": 5,
    "group_norm.gradient_sums": 3, "group_norm.split_group_norm_gradients": 3, "group_norm.group_norm_gradients": 5,
    "experts.weighted_swiglu_gradients": 2,
}  # fmt: skip


@cache
def cases(sizes: Sizes = LARGE) -> dict[str, tuple[Callable, tuple]]:
    """Return each compiled function, with arguments in bf16, and statistics and parameters in float32."""
    torch.manual_seed(0)
    found = fused_examples(torch.bfloat16, sizes)
    named = {kernel.name: (kernel.in_torch, arguments) for kernel, arguments in found}
    x, (largest, scale) = torch.randn(sizes[:2]).bfloat16(), torch.randn(2, sizes.rows)
    shards = torch.randn(2, sizes.features, sizes.rows).to(torch.float8_e4m3fn)
    joined = shards.movedim(0, 1).contiguous()
    blocks = {  # functions that kernels call for each block
        "loss, sums": (loss.sum_of_exponentials, (x, largest + 5)),
        "loss, softmax": (loss.write_softmax, (x.clone(), largest + 5, scale.exp())),
        "float8, values": (float8.write_values, (shards[0], x, scale[0])),
        "float8, joined": (float8.write_joined, (joined, shards, scale[:2, None])),
    }
    return named | {name: (function.__wrapped__, arguments) for name, (function, arguments) in blocks.items()}


@pytest.fixture(scope="module")
def run_for(tmp_path_factory):
    """Return a function that calls another one in a process that compiles for a target, or interprets its kernels."""
    processes: dict[tuple, ProcessPoolExecutor] = {}

    def run(target: str, function: Callable, *args, interprets: bool = False):
        key = target, interprets
        if key not in processes:
            context = multiprocessing.get_context("spawn")  # a process that has not imported Triton
            arguments = tmp_path_factory.mktemp("generated"), *key
            processes[key] = ProcessPoolExecutor(1, context, cross_compiler.set_up, arguments)
        return processes[key].submit(function, *args).result()

    yield run
    for process in processes.values():
        process.shutdown()


def kernels_of(names: list[str], replicates: bool) -> dict[str, list[cross_compiler.KernelCode]]:
    """Return the kernels of functions, all if ``names`` is empty."""
    chosen = {name: case for name, case in cases().items() if name in names or not names}
    if torch.version.hip:
        chosen = {name: case for name, case in chosen.items() if not name.startswith(FLOAT8)}
    return {name: cross_compiler.kernels(*case, **options_of(replicates)) for name, case in chosen.items()}


def relative_errors() -> dict[str, list[tuple[torch.dtype, float]]]:
    """Return the dtypes of the results and their relative errors against the same functions in float64."""
    found, options = {}, options_of(replicates=True) | SMALL_OPTIONS
    for name, (function, arguments) in cases(SMALL).items():
        if not name.startswith(FLOAT8):
            wide = [arg.double() if torch.is_tensor(arg) and arg.is_floating_point() else arg for arg in arguments]
            exact, results = function(*wide), cross_compiler.interpreted(function, arguments, **options)
            if exact is None:  # the function overwrites the first argument
                exact, results = wide[0], arguments[0]
            pairs = zip(*(one if isinstance(one, tuple) else (one,) for one in (results, exact)), strict=True)
            found[name] = [(one.dtype, ((one - other).norm() / other.norm()).item()) for one, other in pairs]
    return found


def test_every_compiled_kernel_has_a_case():
    modules = activations, float8, group_norm, heads, loss, norm
    declared = [one for module in modules for one in vars(module).values() if isinstance(one, Kernel)]
    assert {kernel.name for kernel in declared if kernel.fused} <= cases().keys()


@pytest.mark.parametrize("target", [full("sm_90"), full("gfx90a")])
def test_a_function_becomes_few_kernels_that_fit_in_registers(run_for, target):
    found = run_for(target, kernels_of, [], False)
    numbers = {name: len({kernel.name for kernel in kernels}) for name, kernels in found.items()}
    assert numbers == {name: KERNELS.get(name, 1) for name in found}
    spilling = {(name, kernel.name) for name, kernels in found.items() for kernel in kernels if kernel.spills}
    if target == "gfx90a":  # one configuration of geglu_gradient, which torch.compile measures, spills there
        spilling -= {(name, kernel.name) for name, kernels in found.items() for kernel in kernels if not kernel.spills}
    assert not spilling


@pytest.mark.parametrize("names", [["activations.gelu_gradients"], full([])])
def test_a_reduction_is_compiled_in_one_way_if_ranks_have_equal_inputs(run_for, names):
    found = run_for("sm_90", kernels_of, names, True)
    for name, kernels in found.items():
        reductions = [kernel for kernel in kernels if not kernel.name.startswith("triton_poi")]
        assert len(reductions) == len({kernel.name for kernel in reductions}), name
        assert not any(kernel.spills for kernel in reductions), name


@pytest.mark.full
def test_kernels_compute_the_values_of_float64(run_for):
    found = run_for("sm_90", relative_errors, interprets=True)
    assert found
    for name, errors in found.items():
        assert all(error < (4e-3 if dtype == torch.bfloat16 else 1e-5) for dtype, error in errors), (name, errors)
