"""Float8 products against plain torch, on all grids, and runs with them against runs in bf16."""

import itertools
import math
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import ConfigError, GridSizes
from gpt4d.parallel.context import Context
from gpt4d.parallel.engine.interleave import run_alone
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import float8
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.plan import one_stage
from gpt4d.step import build_stage
from tests.parallel.layers.oracle import check_cases, fill, normal, part
from tests.support.grids import bytes_planned, bytes_sent, full, metric_lines, sampled, train_in_rank

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 256, E5M2: 2**15}  # the largest power of two up to which a tensor is scaled
GRIDS = [GridSizes(), GridSizes(2, 2), GridSizes(z=2, data=2)]
MORE_GRIDS = [GridSizes(2), GridSizes(y=2), GridSizes(z=2), GridSizes(data=2), GridSizes(2, 2, 2)]


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor rounded to float8 with one scale, a power of two, in float32."""
    scale = LARGEST[dtype] / 2.0 ** (math.floor(math.log2(tensor.abs().max())) + 1)
    return (tensor.float() * scale).to(dtype).float() / scale


def differences(sizes: GridSizes, transposed: bool, fused: int | None, dtype: torch.dtype) -> list[float]:
    """Return the relative differences of the output and of the gradients of input and weight to plain torch."""
    weights = ShardedWeights(Context(Grid(sizes), dtype, float8=True), torch.float32)
    layer, columns = Layer(LinearSpec(64, 64, transposed=transposed, num_fused=fused), weights), 64 * (fused or 1)
    total = GradientReducer(weights, dict(layer.named_parameters()))
    inputs, weight = normal(128, 64).to(dtype), normal(64, columns, seed=1).bfloat16()
    bias, upstream = normal(columns, seed=2).bfloat16(), normal(128, columns, seed=3).to(dtype)
    fill(layer.weight, weight, weights)
    fill(layer.bias, bias, weights)
    into, out, batch = *(("x", "y") if transposed else ("y", "x")), ("data", "z")
    in_layout, out_layout = Layout(batch, (into,)), Layout(batch, *[()] * bool(fused), (out,))
    out_shape = (128, *layer.bias.spec.shape)
    mine = part(inputs, weights, in_layout).requires_grad_()
    ours = run_alone(layer(mine))
    ours.backward(part(upstream.view(out_shape), weights, out_layout))
    total.finish()

    x, w, d = rounded(inputs, E4M3), rounded(weight, E4M3), rounded(upstream, E5M2)
    theirs = [
        (ours, part((x @ w + bias.float()).view(out_shape), weights, out_layout)),
        (mine.grad, part(d @ w.T, weights, in_layout)),
        (layer.weight.grad, part((x.T @ d).view(layer.weight.spec.shape), weights, layer.weight.spec.layout)),
    ]
    return [((one.float() - other).norm() / other.norm()).item() for one, other in theirs]


@pytest.mark.parametrize("sizes", sampled([*GRIDS, *MORE_GRIDS], GRIDS))
def test_a_linear_layer_multiplies_the_same_rounded_values_on_every_grid(ranks, sizes):
    """In float32 the sums are exact, so that the layers differ only in values that are subnormal on some grid."""
    cases = [(*case, torch.float32) for case in itertools.product((False, True), (None, 3))]
    for found in itertools.chain(*ranks.run(sizes.devices, check_cases, differences, sizes, cases)):
        assert max(found) < 2e-6


def test_outputs_and_gradients_of_inputs_are_rounded_to_the_compute_dtype_once(ranks):
    (found,) = ranks.run(1, differences, GridSizes(), False, 3, torch.bfloat16)
    assert max(found) < 2**-8 and found[2] < 2e-6


@pytest.mark.parametrize("largest", [0.0, 2.0**-130, 1e-30, 3.0, 1e30])
def test_a_scale_is_a_power_of_two_that_leaves_no_value_too_large(largest):
    x = largest * torch.linspace(-1, 1, 65).view(5, 13)
    for dtype, exponent in ((float8.VALUES, 7), (float8.GRADIENTS, 14)):
        scale = float8.scale(x, dtype)
        values = float8.quantized(x, scale, dtype, False).float()
        assert torch.frexp(scale).mantissa == 0.5
        assert values.isfinite().all() and (values * scale - x).abs().max() <= largest * 2**-3
        if largest > 2.0**-100:
            assert 2**exponent <= values.abs().max() <= 2 ** (exponent + 1)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_product_with_a_value_that_is_not_finite_is_not_a_number(value):
    """A step with such a product is skipped, though float8 may round infinity to a finite value."""
    x, weight = torch.ones(16, 16), torch.ones(16, 16)
    x[3, 5] = value
    for one, other in ((x, weight), (weight, x)):
        packed = float8.packed(other, float8.scale(other, float8.VALUES))
        assert float8.Float8Matmul((16,)).forward(one, packed, None).isnan().all()
    halves = [float8.packed(half, float8.scale(half, float8.VALUES)) for half in x.chunk(2)]
    assert float8.unpacked(float8.joined(torch.cat(halves), 2, 8), 16)[1].isnan()


def test_shards_with_scales_of_their_own_are_joined_without_rounding_again():
    shards = [2.0**exponent * normal(8, 3, 16, seed=exponent).float() for exponent in (0, -3, 4)]
    gathered = torch.cat([float8.packed(shard, float8.scale(shard, float8.VALUES)) for shard in shards])
    joined, whole = float8.joined(gathered, 3, 8), torch.cat(shards)
    direct = float8.packed(whole, float8.scale(whole, float8.VALUES))
    (values, scale), (expected, expected_scale) = (float8.unpacked(one, 24) for one in (joined, direct))
    assert scale == expected_scale
    difference = (values.float() - expected.float()).abs()
    assert difference.max() <= 2**-9  # the smallest subnormal value
    assert not difference[expected.float().abs() >= 2**-5].any()


def test_a_weight_with_rows_that_sharded_states_have_rounded_has_the_same_float8_values():
    weights, exact = ShardedWeights(Context(Grid.single_device(), torch.bfloat16, float8=True)), normal(64, 64).float()
    shard, gathered = Layer(LinearSpec(64, 64), weights).weight, []
    for values in (exact, torch.cat((exact[:32], exact[32:].bfloat16().float()))):
        shard.data = values
        gathered.append(weights.gather(shard))
    for one, other in zip(*(float8.unpacked(packed, 64) for packed in gathered), strict=True):
        assert torch.equal(one.float(), other.float())


def checked_product(calls: list, a, b, scale_a, scale_b, bias=None, out_dtype=None, **options):
    """Call ``torch._scaled_mm`` on a CPU, and check the requirements of a GPU."""
    (rows, contracted), columns = a.shape, b.shape[1]
    assert a.stride() == (contracted, 1) and b.stride() == (1, contracted)
    assert rows % 16 == contracted % 16 == columns % 16 == 0
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    assert {a.dtype, b.dtype} in ({E4M3}, {E4M3, E5M2})
    assert all(scale.dtype == torch.float32 and scale.numel() == 1 for scale in (scale_a, scale_b))
    assert bias is None or (bias.dtype == out_dtype == torch.bfloat16 and bias.is_contiguous())
    calls.append((a.dtype, out_dtype))
    return torch.ops.aten._scaled_mm(a, b, scale_a, scale_b, bias, None, out_dtype, **options)


MODELS = {
    "gpt2": ["model=gpt_tiny"],
    "llama": ["model=llama_tiny", "model.key_value_heads=2", "model.head_size=16", "model.inner=128"],
}
SIZES = ["model.hidden=64", "train.seq_len=32"]


def products_of_a_step(config, sizes) -> list:
    """Return the dtypes of the first factors and the results of the products of a forward and a backward."""
    stage, calls = build_stage(one_stage(config, sizes), Grid(sizes), torch.device("cpu")), []
    ids = torch.arange(64).view(2, 32)
    with patch.object(torch, "_scaled_mm", lambda *args, **options: checked_product(calls, *args, **options)):
        stage.module.loss_sum(ids, ids, torch.arange(2)).backward()
        stage.weights.schedule.finish()
    return calls


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(("sizes", "options"), [((1, 1, 1, 1), []), full((2, 2, 1, 1), ["sequence_parallel"])], ids=str)
def test_all_products_of_blocks_have_the_layouts_that_a_gpu_requires(ranks, tiny, family, sizes, options):
    settings = [f"parallel.{option}=true" for option in options]
    config = tiny(*MODELS[family], *SIZES, "train.precision=fp8", *settings)
    forward, backward = (E4M3, torch.bfloat16), (E5M2, torch.bfloat16)
    for calls in ranks.run(math.prod(sizes), products_of_a_step, config, GridSizes(*sizes)):
        layers = 4 * config.model.layers
        assert {kind: calls.count(kind) for kind in set(calls)} == {
            forward: layers,
            backward: layers,
            (E4M3, torch.float32): layers,  # gradients of weights
        }


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """Return a function from ``tiny``, a number of ranks and overrides to a run's configuration and logged steps."""
    made = {}

    def train(tiny, world, *overrides):
        if (world, overrides) not in made:
            config = tiny(*SIZES, *overrides, f"run.dir={tmp_path_factory.mktemp('float8')}")
            ranks.run(world, train_in_rank, config)
            made[world, overrides] = config, metric_lines(config.run.dir)
        return made[world, overrides]

    return train


def losses(steps) -> list[float]:
    return [step["loss"] for step in steps]


@pytest.mark.parametrize(
    ("family", "steps", "lr"), [("gpt2", 6, 0.001), full("gpt2", 200, 0.003), full("llama", 200, 0.003)]
)
def test_a_run_in_float8_has_the_loss_of_bf16_within_1_percent(run, tiny, family, steps, lr):
    settings = *MODELS[family], f"train.steps={steps}", f"optim.lr={lr}"
    wide, narrow = (losses(run(tiny, 1, *settings, f"train.precision={name}")[1]) for name in ("bf16", "fp8"))
    assert narrow != wide and len(narrow) == steps
    assert narrow[-1] == pytest.approx(wide[-1], rel=1e-2)
    assert sum(narrow[-20:]) == pytest.approx(sum(wide[-20:]), rel=1e-2)


PLANS = {
    "x": (2, ["parallel.gx=2"]),
    "y": (2, ["parallel.gy=2"]),
    "z": (2, ["parallel.gz=2"]),
    "data": (2, ["parallel.gdata=2", "optim.shard_states=true"]),
    "split tokens and chunks": (2, ["parallel.gx=2", "parallel.sequence_parallel=true", "parallel.chunks=2"]),
    "stages": (2, ["parallel.pipeline.stages=2"]),
    "atp": (2, ["parallel.mode=atp", "parallel.d1=1", "parallel.d2=2"]),
    "microbatches": (1, ["train.micro_batch_size=4", "train.activation_checkpointing=full"]),
    "retained weights": (1, ["train.micro_batch_size=4", "parallel.cache_layers=all", "parallel.cache_scope=step"]),
}
FLOAT8 = *MODELS["gpt2"], "train.steps=6", "optim.lr=0.001", "train.precision=fp8"  # also a run of the test above
PLANNED = {"z": GridSizes(z=2), "split tokens and chunks": GridSizes(2)}  # grids of plans whose bytes are compared


@pytest.mark.parametrize("plan", [name if name in PLANNED else full(name) for name in PLANS])
def test_a_run_in_float8_has_the_losses_norm_and_planned_bytes_on_every_plan(run, tiny, plan):
    """In bf16, which rounds partial sums in the same way, first losses differ by 2e-5 and first norms by 1e-4."""
    world, overrides = PLANS[plan]
    (_, alone), (config, found) = (run(tiny, *made) for made in ((1, *FLOAT8), (world, *FLOAT8, *overrides)))
    assert found[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-4)
    assert found[0]["grad_norm"] == pytest.approx(alone[0]["grad_norm"], rel=2e-3)
    assert losses(found) == pytest.approx(losses(alone), rel=5e-3)
    if plan in PLANNED:
        assert bytes_sent(config.run.dir) == bytes_planned(config, PLANNED[plan])


@pytest.mark.parametrize(("name", "capability", "hip"), [("A100", (8, 0), None), ("MI300X", (9, 4), "6.4")])
def test_a_gpu_without_float8_products_is_an_error_before_training(monkeypatch, name, capability, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=rf"^train.precision=fp8: {name} has no float8 products .*; use "):
        float8.check_device(torch.device("cuda"))
    float8.check_device(torch.device("cpu"))
