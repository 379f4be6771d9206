"""Functions that torch.compile fuses return what they return without it."""

import shutil
from dataclasses import replace

import pytest
import torch

from gpt4d.config import ConfigError, GridSizes
from gpt4d.parallel import fusion
from gpt4d.parallel.layers import gated, gelu, norm, rotary
from tests.grids import TINY_MODEL, build_model

compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fusion.enable(True, torch.device("cpu"))
    yield
    fusion.enable(False, torch.device("cpu"))


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
    fusion.enable(False, torch.device("cpu"))
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
        (norm._normalized, (x, None, weight, bias, 1e-5)),
        (norm._normalized, (x, branch, weight, bias, 1e-5)),
        (norm._gradients, (d_out, None, x, weight, bias, mean, rstd)),
        (norm._gradients, (d_out, d_stream, x, weight, bias, mean, rstd)),
        (norm._mean_and_variance, (x, branch)),
        (norm._scaled, (x, mean, rstd, weight, bias)),
        (norm._sums_of_gradient, (d_out, x, mean, rstd, weight)),
        (norm._split_gradients, (d_out, d_stream, x, mean, rstd, weight, sums)),
        (norm._sum_of_squares, (x, branch)),
        (norm._rms_scaled, (x, rstd, weight)),
        (norm._rms_normalized, (x, branch, weight, 1e-5)),
        (norm._rms_sum_of_gradient, (d_out, x, rstd, weight)),
        (norm._split_rms_gradients, (d_out, d_stream, x, rstd, weight, sums[0])),
        (norm._rms_gradients, (d_out, d_stream, x, rstd, weight)),
    ]
    for function, arguments in calls:
        compiled, eager = function(*arguments), function.__wrapped__(*arguments)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (compiled, eager)), strict=True):
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
    blocks, d_blocks = torch.randn(2, 3, 4, 8).to(dtype)
    x, (cos, sin) = torch.randn(2, 6, 3, 8).to(dtype), torch.randn(2, 2, 6, 1, 4)
    calls = [
        (gated._gated, gate_and_up.unbind(-2)),
        (gated._gradient, (d_out, gate_and_up)),
        (gelu._gradients, (d_blocks, blocks, torch.float32)),
        (rotary._rotated, (x, cos, sin, 1)),
        (rotary._rotated, (x, cos, sin, -1)),
    ]
    for function, arguments in calls:
        torch.testing.assert_close(function(*arguments), function.__wrapped__(*arguments), msg=function.__name__)


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.compile=true: needs a C\+\+ compiler; install g\+\+"):
        fusion.enable(True, torch.device("cpu"))
