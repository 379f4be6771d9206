"""Functions that torch.compile fuses return the same results as without it."""

import shutil
import sysconfig
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters

from gpt4d.config import ConfigError
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.kernels import Kernel
from gpt4d.parallel.layers import activations, conv, float8, group_norm, norm
from gpt4d.runtime import compile_cache
from gpt4d.step import TrainStep, build_stage
from gpt4d.task.diffusion import Diffusion
from gpt4d.task.generation import continued
from gpt4d.task.language import LanguageModeling
from gpt4d.task.scoring import Continuation, Scorer
from gpt4d.validation import validate
from tests.exactness.comparison import microbatches
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.parallel_kernels import examples
from tests.support.settings import configured

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def compiles(monkeypatch, tmp_path):
    """Use a directory of the test, and disable compilation after the test."""
    monkeypatch.setattr(compile_cache, "set_environment", lambda: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    compile.enable(False, torch.device("cpu"))


def compiled_calls(dtype: torch.dtype) -> Iterator[tuple[Kernel, tuple]]:
    """Yield calls of compiled functions: with an offset of a norm's weights, without SiLU after a group norm."""
    for kernel, arguments in examples(dtype):
        if (kernel.fused or kernel.blocks) and not kernel.name.startswith("float8."):  # which have a test of their own
            yield kernel, arguments
        if kernel in (norm.rms_norm, norm.rms_norm_gradients):
            yield kernel, (*arguments, True)
        if kernel in (group_norm.group_norm, group_norm.group_norm_gradients):
            yield kernel, (*arguments[:-1], False)


def conversions_to_float8() -> list[torch.Tensor]:
    """Return scales, and the bits of converted activations, gradients and weights."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=draw).bfloat16() for shape in ((64, 48), (48, 2, 16)))
    scales = {dtype: float8.scale(x, dtype) for dtype in (float8.VALUES, float8.GRADIENTS)}
    made = [float8.quantized(x, by, dtype, flip) for dtype, by in scales.items() for flip in (False, True)]
    packed = [float8.packed(shard, float8.scale(shard, float8.VALUES)) for shard in (weight, weight / 64)]
    values, scale = float8.unpacked(float8.joined(torch.cat(packed), 2, 48), 96)
    converted = [*made, *(float8.unpacked(one, 48)[0] for one in packed), values, float8.transposed(values)]
    return [*scales.values(), scale, *(one.view(torch.uint8) for one in converted)]


@pytest.mark.full
@compiler
def test_compiled_conversions_to_float8_have_the_bits_of_eager_ones():
    eager = conversions_to_float8()
    compile.enable(True, torch.device("cpu"))
    for one, other in zip(conversions_to_float8(), eager, strict=True):
        assert torch.equal(one, other)


@pytest.mark.full
@compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_functions_equal_eager_ones(dtype):
    calls = [*compiled_calls(dtype)]
    eager = [kernel.in_torch(*deepcopy(arguments)) for kernel, arguments in calls]
    compile.enable(True, torch.device("cpu"))
    for (kernel, arguments), expected in zip(calls, eager, strict=True):
        found = kernel(*arguments)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
            assert (one is None) == (other is None), kernel.name
            if other is None:
                continue
            assert one.dtype == other.dtype, kernel.name
            # Compiled, bfloat16 is not rounded before it is used: also products whose sums are weights of experts.
            rounded = other.dtype != torch.float32 or kernel.name.startswith("experts.")
            bound = 1e-6 if dtype == torch.float32 else 1e-2 if rounded else 1e-5
            assert (one - other).norm() <= bound * other.norm(), kernel.name


@pytest.fixture
def traced(monkeypatch):
    """Trace functions into graphs as torch.compile does, and execute the graphs without compiling them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt_tiny", "model.dropout=0.1"),
        full("llama_tiny", "model.qk_norm=true data.reset_attention=true train.activation_checkpointing=selective"),
        full("olmo2_tiny", "train.precision=fp8"),
        full("gemma3_tiny", "train.loss_chunks=2"),
        full("unet_tiny", "model.dropout=0.1 model.attention_at=[16] train.activation_checkpointing=selective"),
        full("utransformer_tiny", ""),
    ],
)
def test_no_function_is_compiled_again_after_the_second_step(traced, model, words):
    is_text = model not in ("unet_tiny", "utransformer_tiny")
    settings = "train.batch_size=4 train.micro_batch_size=2 train.precision=bf16 train.compile=true " + words
    shape = ["model.layers=2", "train.seq_len=16"] if is_text else []
    config = configured([f"model={model}", *shape, *settings.split()])
    plan = validate(config, 1)
    stage = build_stage(plan, Grid.single_device(), torch.device("cpu"))
    compute = (LanguageModeling if is_text else Diffusion).compute
    train = TrainStep(stage, partial(compute, None), config.optim)
    graphs = []
    for step in range(4):
        train(microbatches(plan, stage, step), plan.microbatches, 1, 1e-3)
        train.evaluate(microbatches(plan, stage, step), plan.microbatches)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 10
    assert graphs[1:] == graphs[1:2] * 3
    assert not counters["graph_break"]


def test_no_function_is_compiled_for_texts_that_are_generated_or_scored(traced):
    config = configured(["model=gpt_tiny", "model.layers=1", "train.seq_len=16", "train.compile=true"])
    stage = build_stage(validate(config, 1), Grid.single_device(), torch.device("cpu"))
    counters.clear()  # the test of the compiler is a graph
    for length in (3, 5):
        continued(stage, [[1] * length], 2, {0})
        Scorer(stage, 1).scores([Continuation((1,) * length, (2,))])
    assert compile.enabled and not counters["stats"]["unique_graphs"]


def failing(*_, **__):
    raise RuntimeError("cc1plus:\n  no such file\n\nSet TORCHDYNAMO_VERBOSE=1")


def test_a_compiler_that_is_missing_or_fails_is_reported_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.compile=true: needs a C\+\+ compiler; install g\+\+"):
        compile.enable(True, torch.device("cpu"))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda function, **_: failing)
    error = r"^train.compile=true: a test function cannot be compiled \(cc1plus: no such file\); repair the .+false$"
    with pytest.raises(ConfigError, match=error):
        compile.enable(True, torch.device("cpu"))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"^train.compile=true: needs Python.h; install .+false$"):
        compile.enable(True, torch.device("cpu"))


def test_training_continues_without_compiled_functions_if_the_compiler_of_a_gpu_fails(monkeypatch, capsys):
    """There is no GPU here, so the compiler of a GPU fails."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(compile, "find_spec", lambda name: name)
    monkeypatch.setattr(torch, "compile", lambda function, **_: failing)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    compile.enable(None, torch.device("cuda"))
    warning = capsys.readouterr().err
    assert warning.startswith("warning: train.compile=null: a test function cannot be compiled (cc1plus: no such file)")
    assert warning.count("\n") == 1
    gate_and_up = torch.randn(2, 2, 4)
    assert torch.equal(activations.swiglu(gate_and_up), activations.swiglu.in_torch(gate_and_up))


def enable_where_rank_1_fails():
    """On a rank: the error of ``enable``."""
    fails = dist.get_rank() == 1
    compiler = patch.object(torch, "compile", lambda function, **_: failing if fails else function)
    with compiler, patch.object(shutil, "which", lambda name: name), pytest.raises(ConfigError) as error:
        compile.enable(True, torch.device("cpu"))
    return str(error.value)


def test_all_ranks_report_a_compiler_that_fails_on_one_rank(ranks):
    errors = ranks.run(2, enable_where_rank_1_fails)
    assert errors[0] == errors[1] and errors[0].startswith("train.compile=true: rank 1: a test function cannot")


def train_with_functions_that_are_traced(config):
    """On a rank: a run that passes its functions to a compiler."""
    compiler = patch.object(torch, "compile", lambda function, **_: function)
    with compiler, patch.object(shutil, "which", lambda name: name):
        train_in_rank(config)
        compile.enable(False, torch.device("cpu"))


def test_a_run_tests_the_compilers_before_it_builds_the_model(ranks, tiny):
    """The ranks agree on the result of the test in an activity, which must not be part of another activity."""
    config = tiny("train.compile=true", "parallel.gx=2", "train.steps=2")
    ranks.run(2, train_with_functions_that_are_traced, config)
    assert metric_lines(config.run.dir)


def test_ranks_with_equal_inputs_compile_a_reduction_in_the_same_way(monkeypatch):
    options = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: options.append(given) or function)
    gate_and_up = torch.randn(2, 2, 4)
    for replicates in (True, False):
        compile.enable(True, torch.device("cpu"), replicates)
        activations.swiglu(gate_and_up)
    test_function, function = options[::2], options[1::2]
    assert test_function == [{"fullgraph": True}] * 2
    assert [given["options"].get("deterministic") for given in function] == [True, None]
    assert all(given["fullgraph"] for given in function)


@pytest.mark.parametrize(
    ("replicates", "deterministic", "expected"),
    [(False, False, (True, False)), (True, False, (False, True)), (False, True, (False, False))],
)
def test_cudnn_measures_algorithms_unless_results_must_not_depend_on_it(
    monkeypatch, replicates, deterministic, expected
):
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "allow_tf32"):
        monkeypatch.setattr(cudnn, name, getattr(cudnn, name))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    conv.choose_algorithms(torch.device("cuda"), replicates)
    assert (cudnn.benchmark, cudnn.deterministic) == expected
    assert not cudnn.allow_tf32
