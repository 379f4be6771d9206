"""Functions that torch.compile fuses return the same results as without it."""

import importlib
import shutil
import sysconfig
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters

from gpt4d.config import ConfigError, GridSizes
from gpt4d.config.composing import compose
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import activations, conv_kernels, float8, group_norm, heads, norm
from gpt4d.runtime import compile_cache
from gpt4d.step import TrainStep, build_stage
from gpt4d.task.diffusion import Diffusion
from gpt4d.task.language import LanguageModeling
from gpt4d.validation import validate
from tests.exactness.cases import FAMILIES
from tests.exactness.comparison import microbatches
from tests.support.grids import TINY_MODEL, build_model, full, metric_lines, train_in_rank


def eager(kernel):
    """Return a kernel's function on torch's tensors, which is not compiled."""
    return getattr(importlib.import_module(f"{kernel.__module__}_kernels"), kernel.__name__)


compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture(autouse=True)
def no_private_directory(monkeypatch):
    monkeypatch.setattr(compile_cache, "set_environment", lambda: None)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compile.enable(True, torch.device("cpu"))
    yield
    compile.enable(False, torch.device("cpu"))


def loss_and_gradients(compute_dtype):
    config = replace(TINY_MODEL, dropout=0.2, attention_dropout=0.2)
    model = build_model(config, GridSizes(), torch.float32, compute_dtype=compute_dtype)
    ids = torch.arange(48).view(4, 12) % config.vocab_size
    loss = model.loss_sum(ids, ids.flip(0), torch.arange(4))
    loss.backward()
    model.weights.finish()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@compiler
@pytest.mark.full
def test_a_compiled_model_has_the_loss_and_gradients_of_an_eager_one(compiled):
    loss, gradients = loss_and_gradients(torch.float32)
    compile.enable(False, torch.device("cpu"))
    expected, expected_gradients = loss_and_gradients(torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert (gradients - expected_gradients).norm() <= 1e-6 * expected_gradients.norm()


@compiler
@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_norms_equal_eager_ones(compiled, dtype):
    x, branch, d_out, d_stream = torch.randn(4, 6, 8).to(dtype)
    mean, rstd, weight, bias = torch.randn(6, 1), torch.rand(6, 1), torch.randn(8), torch.randn(8)
    sums = torch.randn(2, 6, 1)
    calls = [
        (norm.layer_norm, (x, None, weight, bias, 1e-5)),
        (norm.layer_norm, (x, branch, weight, bias, 1e-5)),
        (norm.layer_norm_gradients, (d_out, None, x, weight, bias, mean, rstd)),
        (norm.layer_norm_gradients, (d_out, d_stream, x, weight, bias, mean, rstd)),
        (norm.mean_and_variance, (x, branch)),
        (norm.normalized, (x, mean, rstd, weight, bias)),
        (norm.sums_of_gradient, (d_out, x, mean, rstd, weight)),
        (norm.split_layer_norm_gradients, (d_out, d_stream, x, mean, rstd, weight, sums)),
        (norm.sum_of_squares, (x, branch)),
        (norm.scaled, (x, rstd, weight)),
        (norm.rms_norm, (x, branch, weight, 1e-5)),
        (norm.sum_of_rms_gradient, (d_out, x, rstd, weight)),
        (norm.split_rms_norm_gradients, (d_out, d_stream, x, rstd, weight, sums[0])),
        (norm.rms_norm_gradients, (d_out, d_stream, x, rstd, weight)),
        (norm.rms_norm, (x, branch, weight, 1e-5, True)),
        (norm.rms_norm_gradients, (d_out, d_stream, x, rstd, weight, True)),
    ]
    for function, arguments in calls:
        compiled, expected = function(*arguments), eager(function)(*arguments)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (compiled, expected)), strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                # Compiled, sums of bfloat16 are not rounded before they are used.
                assert one.dtype == other.dtype, function.__name__
                bound = 1e-6 if dtype == torch.float32 else 1e-5 if other.dtype == torch.float32 else 1e-2
                assert (one - other).norm() <= bound * other.norm(), function.__name__


@compiler
@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_activations_and_rotation_equal_eager_ones(compiled, dtype):
    gate_and_up, d_out = torch.randn(6, 2, 8).to(dtype), torch.randn(6, 8).to(dtype)
    rows, d_rows = torch.randn(2, 256, 8).to(dtype)
    x, (cos, sin) = torch.randn(2, 6, 3, 8).to(dtype), torch.randn(2, 2, 6, 1, 8)
    calls = [
        (activations.swiglu, (gate_and_up,)),
        (activations.swiglu_gradient, (d_out, gate_and_up)),
        (activations.geglu, (gate_and_up,)),
        (activations.geglu_gradient, (d_out, gate_and_up)),
        (activations.gelu_gradients, (d_rows, rows, torch.randn(2, 4))),
        (heads.rotated, (x, cos, sin, 1)),
        (heads.rotated, (x, cos, sin, -1)),
    ]
    for function, arguments in calls:
        torch.testing.assert_close(function(*arguments), eager(function)(*arguments), msg=function.__name__)


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


@compiler
@pytest.mark.full
def test_compiled_conversions_to_float8_have_the_bits_of_eager_ones(compiled):
    found = conversions_to_float8()
    compile.enable(False, torch.device("cpu"))
    for one, other in zip(found, conversions_to_float8(), strict=True):
        assert torch.equal(one, other)


@compiler
@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_compiled_group_norms_equal_eager_ones(compiled, dtype, scaled):
    x, d_out = torch.randn(2, 3, 4, 4, 8).to(dtype)
    index = group_norm.group_index(x, group_norm.Groups((0, 0, 0, 1, 1, 1, 1, 0), 2))
    mean, rstd, weight, bias = torch.randn(3, 8), torch.rand(3, 8), torch.randn(8), torch.randn(8)
    affine = (weight, bias, *(torch.randn(2, 3, 8).to(dtype) if scaled else (None, None)))
    moments, sums = group_norm.group_moments(x, index[1]), (torch.randn(2, 3, 8), torch.randn(2, 3, 2))
    calls = [
        (group_norm.group_moments, (x, index[1])),
        (group_norm.normalized, (x, moments, index[0], *affine, 4, 1e-5, True)),
        (group_norm.group_norm, (x, *index, *affine, 4, 1e-5, True)),
        (group_norm.group_norm, (x, *index, *affine, 4, 1e-5, False)),
        (group_norm.normalized_again, (x, mean, rstd, *affine, True)),
        (group_norm.gradient_sums, (d_out, x, mean, rstd, *affine, index[1], True)),
        (group_norm.split_group_norm_gradients, (d_out, x, mean, rstd, *affine, *sums, index[0], 64, True)),
        (group_norm.group_norm_gradients, (d_out, x, mean, rstd, *affine, *index, 64, True)),
        (group_norm.group_norm_gradients, (d_out, x, mean, rstd, *affine, *index, 64, False)),
    ]
    for function, arguments in calls:
        torch.testing.assert_close(function(*arguments), eager(function)(*arguments), msg=function.__name__)


@pytest.fixture
def traced(monkeypatch):
    """Trace functions into graphs as torch.compile does, and execute the graphs without compiling them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    compile.enable(False, torch.device("cpu"))


FAMILY_SETTINGS = {
    "gpt": ["model.dropout=0.1"],
    "llama": ["model.qk_norm=true", "data.reset_attention=true", "train.activation_checkpointing=selective"],
    "olmo2": ["train.precision=fp8"],
    "gemma3": ["train.loss_chunks=2"],
    "unet": ["model.dropout=0.1", "model.attention_at=[16]", "train.activation_checkpointing=selective"],
    "utransformer": [],
}


@pytest.mark.parametrize("family", ["gpt", *map(full, ("unet", "llama", "olmo2", "gemma3", "utransformer"))])
def test_no_function_is_compiled_again_after_the_second_step(traced, family):
    is_text = family not in ("unet", "utransformer")
    settings = ["train.batch_size=4", "train.micro_batch_size=2", "train.precision=bf16", "train.compile=true"]
    settings += ["model.layers=2", "train.seq_len=16"] if is_text else []
    config = compose([f"model={FAMILIES[family]}", *settings, *FAMILY_SETTINGS[family]])
    plan = validate(config, 1)
    stage = build_stage(plan.config, Grid.single_device(), torch.device("cpu"))
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


def failing(*_, **__):
    raise RuntimeError("cc1plus:\n  no such file\n\nSet TORCHDYNAMO_VERBOSE=1")


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.compile=true: needs a C\+\+ compiler; install g\+\+"):
        compile.enable(True, torch.device("cpu"))


def test_a_compiler_that_fails_is_reported_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda function, **_: failing)
    error = r"^train.compile=true: a test function cannot be compiled \(cc1plus: no such file\); repair the .+false$"
    with pytest.raises(ConfigError, match=error):
        compile.enable(True, torch.device("cpu"))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match=r"^train.compile=true: needs Python.h; install .+false$"):
        compile.enable(True, torch.device("cpu"))


def test_training_continues_without_compiled_functions_if_the_compiler_of_a_gpu_fails(monkeypatch, capsys):
    """There is no GPU here, so the compiler of a GPU fails."""
    monkeypatch.setattr(compile, "_missing_compiler", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: failing)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    compile.enable(None, torch.device("cuda"))
    warning = capsys.readouterr().err
    assert warning.startswith("warning: train.compile=null: a test function cannot be compiled (cc1plus: no such file)")
    assert warning.count("\n") == 1
    gate_and_up = torch.randn(2, 2, 4)
    assert torch.equal(activations.swiglu(gate_and_up), eager(activations.swiglu)(gate_and_up))


def enable_where_rank_1_fails():
    """On a rank: the error of ``enable``."""
    fails = dist.get_rank() == 1
    compiler = patch.object(torch, "compile", lambda function, **_: failing if fails else function)
    found = patch.object(compile, "_missing_compiler", lambda device: None)
    with compiler, found, pytest.raises(ConfigError) as error:
        compile.enable(True, torch.device("cpu"))
    return str(error.value)


def test_all_ranks_report_a_compiler_that_fails_on_one_rank(ranks):
    errors = ranks.run(2, enable_where_rank_1_fails)
    assert errors[0] == errors[1] and errors[0].startswith("train.compile=true: rank 1: a test function cannot")


def train_with_functions_that_are_traced(config):
    """On a rank: the lines of a run that passes its functions to a compiler."""
    compiler = patch.object(torch, "compile", lambda function, **_: function)
    with compiler, patch.object(compile, "_missing_compiler", lambda device: None):
        train_in_rank(config)
        compile.enable(False, torch.device("cpu"))
    return metric_lines(config.run.dir)


def test_a_run_tests_the_compilers_before_it_builds_the_model(ranks, tiny):
    """The ranks agree on the result of the test in an activity, which must not be part of another activity."""
    lines = ranks.run(2, train_with_functions_that_are_traced, tiny("train.compile=true", "parallel.gx=2"))
    assert lines[0]


def test_ranks_with_equal_inputs_compile_a_reduction_in_the_same_way(monkeypatch):
    options = []
    monkeypatch.setattr(torch, "compile", lambda function, **given: options.append(given) or function)
    gate_and_up = torch.randn(2, 2, 4)
    for replicates in (True, False):
        compile.enable(True, torch.device("cpu"), replicates)
        activations.swiglu(gate_and_up)
    compile.enable(False, torch.device("cpu"))
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
    conv_kernels.choose_algorithms(torch.device("cuda"), replicates)
    assert (cudnn.benchmark, cudnn.deterministic) == expected
    assert not cudnn.allow_tf32
