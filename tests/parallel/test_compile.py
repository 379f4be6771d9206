"""Functions that torch.compile fuses return the same results as without it."""

import importlib
import shutil
from dataclasses import replace

import pytest
import torch

from gpt4d.config import ConfigError, GridSizes
from gpt4d.parallel import compile
from gpt4d.parallel.layers import activations, heads, norm
from tests.grids import TINY_MODEL, build_model


def eager(kernel):
    """Return a kernel's function on torch's tensors, which is not compiled."""
    return getattr(importlib.import_module(f"{kernel.__module__}_kernels"), kernel.__name__)


compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


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
    x, (cos, sin) = torch.randn(2, 6, 3, 8).to(dtype), torch.randn(2, 2, 6, 1, 4)
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


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.compile=true: needs a C\+\+ compiler; install g\+\+"):
        compile.enable(True, torch.device("cpu"))
