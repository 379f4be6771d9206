"""Planned step times on machines of round numbers, compared with written-out sums, and the effects of overlaps."""

import math
from dataclasses import replace

import pytest

from gpt4d.config import ClusterConfig, Config, GridSizes, LevelConfig, OverlapConfig
from gpt4d.config.trainer_profiles import PROFILES
from gpt4d.model import registry
from gpt4d.planner import device as devices
from gpt4d.planner import estimate
from gpt4d.planner.device import Device, Links
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.workload import compute_s, grids
from tests.support.grids import full
from tests.support.settings import configured

NOWHERE = float("inf")
LARGE = "model.hidden=256", "model.layers=9"  # enough for several buckets of gradients


def machine_of(tflops: float, gb_s: float) -> ClusterConfig:
    """Return a machine on which nothing but products and bytes on links takes time."""
    levels = [LevelConfig(None, gb_s, None, 0.0)]
    return ClusterConfig(device="cuda", matmul_tflops=tflops, memory_gb_s=NOWHERE, operation_us=0.0, levels=levels)


PRODUCTS = machine_of(1.0, NOWHERE)  # a FLOP takes a picosecond
LINKS = machine_of(NOWHERE, 1.0)  # a byte takes a nanosecond
SCORES = 16 * 3 * 4 * 16 * 16 * 64  # FLOPs of one pass through the scores of all blocks of MODEL
MODEL = (
    "model=gpt_tiny", "model.layers=3", "model.hidden=64", "model.heads=4", "model.vocab_size=128",
    "model.max_positions=16", "train.batch_size=16", "optim.algorithm=adamw",
)  # fmt: skip


def config(cluster: ClusterConfig, *overrides: str) -> Config:
    return replace(configured([*MODEL, *overrides]), cluster=cluster)


def plan(cluster: ClusterConfig, sizes: GridSizes, *overrides: str):
    made = Estimate(config(cluster, *overrides), sizes)
    return made.step(made.config.train.micro_batch_size or made.share)


def bytes_of(plan) -> dict[str, float]:
    return {axis: used["bytes"] for axis, used in plan.comm.items()}


def test_one_device_computes_the_models_flops():
    """As Narayanan et al. count them, but the backward of attention takes 2.5 times its forward instead of twice."""
    description = registry.describe(config(PRODUCTS).model)
    blocks, head = 24 * 256 * 3 * 64**2 * (1 + 16 / (6 * 64)), 6 * 256 * 64 * 128
    assert description.training_flops(16, 16) == pytest.approx(3 * blocks + head)
    assert description.hardware_flops(16, 16) == pytest.approx(4 * blocks + head)
    found = plan(PRODUCTS, GridSizes())
    assert found.step_time_s == pytest.approx((3 * blocks + head + 0.5 * SCORES) * 1e-12)
    again = plan(PRODUCTS, GridSizes(), "train.activation_checkpointing=full")
    # The last product of a block is not computed again, and the head never is.
    last = 3 * (2 * 256 * 4 * 64 * 64)
    assert again.step_time_s == pytest.approx((4 * blocks + head + 0.5 * SCORES - last) * 1e-12)


def test_attention_has_its_own_rate_without_masked_products():
    """A causal mask hides half of them. The backward of attention has 2.5 times the products of its forward."""
    alone = plan(replace(PRODUCTS, matmul_tflops=NOWHERE, attention_tflops=1.0), GridSizes())
    assert alone.compute_s == pytest.approx(3.5 * SCORES / 2 * 1e-12)
    slow = plan(replace(PRODUCTS, attention_tflops=0.5), GridSizes())
    assert slow.compute_s == pytest.approx(plan(PRODUCTS, GridSizes()).compute_s)


def test_the_linear_layers_of_blocks_have_the_rate_of_float8_products():
    linear = 3 * 2 * 256 * 3 * 12 * 64**2  # forward and backward
    wide = plan(PRODUCTS, GridSizes())
    narrow = plan(replace(PRODUCTS, fp8_tflops=4.0), GridSizes(), "train.precision=fp8")
    assert narrow.compute_s == pytest.approx(wide.compute_s - 0.75 * linear * 1e-12)
    assert plan(replace(PRODUCTS, fp8_tflops=4.0), GridSizes()).compute_s == wide.compute_s


BLOCKS = 3 * 2 * 256 * 12 * 64**2  # FLOPs of a forward of the linear layers of all blocks of MODEL


@pytest.mark.parametrize(
    ("trainer", "checkpointing", "flops"),
    [
        ("axonn", "full", BLOCKS / 3),  # the last product of a block
        ("llm-foundry", "full", 0),  # ends at the last saved tensor, as gpt4d
        ("torchtitan", "selective", BLOCKS / 2),  # every second product
        ("megatron-2022", "none", -0.5 * SCORES),  # the backward of attention does not recompute its scores
    ],
)
def test_other_trainers_recompute_other_products(trainer, checkpointing, flops):
    override = f"train.activation_checkpointing={checkpointing}"
    own = plan(PRODUCTS, GridSizes(), override).compute_s
    other = plan(replace(PRODUCTS, trainer=trainer), GridSizes(), override).compute_s
    assert other - own == pytest.approx(flops * 1e-12, abs=own * 1e-9)


def test_attention_without_a_fused_kernel_reads_and_writes_its_scores():
    machine = replace(PRODUCTS, matmul_tflops=NOWHERE, memory_gb_s=1.0)
    own, other = (plan(replace(machine, trainer=name), GridSizes()).compute_s for name in ("gpt4d", "megatron-2022"))
    passes = PROFILES["megatron-2022"].score_passes
    assert other - own == pytest.approx(3.5 * passes * 2 * SCORES / (4 * 16) * 1e-9)


def test_older_attention_kernels_are_slower_on_gpus_that_have_newer_ones():
    machine = replace(PRODUCTS, matmul_tflops=NOWHERE, attention_tflops=1.0)
    for fp8_tflops, generations in ((None, 1), (1.0, 2)):
        own, other = (
            plan(replace(machine, fp8_tflops=fp8_tflops, trainer=name), GridSizes()).compute_s
            for name in ("gpt4d", "llm-foundry")
        )
        assert other == pytest.approx(own / 0.6**generations)


def test_the_slowest_of_several_devices_determines_a_step():
    alone = plan(PRODUCTS, GridSizes(data=4)).compute_s
    spread = plan(replace(PRODUCTS, spread=0.1), GridSizes(data=4)).compute_s
    assert spread == pytest.approx((1 + 0.1 * math.sqrt(2 * math.log(4))) * alone)


def test_reads_and_writes_of_products_overlap_their_arithmetic_as_far_as_the_machine_says():
    machine = replace(PRODUCTS, memory_gb_s=1000.0)
    both, neither = (plan(replace(machine, product_hidden=share), GridSizes()).compute_s for share in (1.0, 0.0))
    half = plan(replace(machine, product_hidden=0.5), GridSizes()).compute_s
    assert both < half == pytest.approx((both + neither) / 2)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("attention_tflops", [None, 0.1, 10.0])
def test_no_step_is_faster_than_the_bound_by_which_the_search_omits_options(attention_tflops, precision):
    cluster = replace(PRODUCTS, attention_tflops=attention_tflops, fp8_tflops=4.0)
    made = config(cluster, f"train.precision={precision}")
    bound = compute_s(made, registry.describe(made.model), 1)
    assert bound < plan(cluster, GridSizes(), f"train.precision={precision}").compute_s


def test_without_computation_nothing_hides():
    """The axes z and data use the same links sequentially, so their bytes limit the step."""
    found = plan(LINKS, GridSizes(1, 1, 2, 2))
    sent = sum(axis["bytes"] for axis in found.comm.values())
    assert found.step_time_s == pytest.approx(sent * 1e-9) and found.exposed_s == pytest.approx(found.step_time_s)


def test_all_that_can_hides_behind_long_products():
    """Exposed: the first gather, the collectives of the last product and, on x, the all-reduces of the forward."""
    slow = replace(LINKS, matmul_tflops=1e-6)
    found = plan(slow, GridSizes(2, 1, 2, 1))
    assert found.comm["z"]["exposed_s"] < 0.2 * found.comm["z"]["time_s"]
    switches = (f"parallel.overlap.{key}=false" for key in ("all_reduce", "all_gather", "reduce_scatter", "data"))
    eager = plan(slow, GridSizes(2, 1, 2, 1), *switches)
    assert eager.exposed_s == pytest.approx(sum(axis["time_s"] for axis in eager.comm.values()))
    assert eager.compute_s == found.compute_s and eager.step_time_s > found.step_time_s


@pytest.mark.parametrize("switch", [name for name in OverlapConfig.__dataclass_fields__ if name != "prefetch"])
def test_each_overlap_saves_time_and_no_byte(switch):
    machine, sizes = replace(LINKS, matmul_tflops=0.005), GridSizes(2, 1, 2, 2)
    on, off = (plan(machine, sizes, *LARGE, *words) for words in ((), (f"parallel.overlap.{switch}=false",)))
    assert on.step_time_s < off.step_time_s and bytes_of(on) == pytest.approx(bytes_of(off))


def test_what_cannot_pass_beside_a_computation_is_exposed():
    links = Links(LINKS, GridSizes(1, 1, 2, 1))
    hidden = links.speeds["all_gather", "z"]
    links.speeds["all_gather", "z"] = hidden._replace(hidden=0.25)
    device = Device(LINKS, links)
    gathering = device.start("all_gather", "z", 4e9)
    assert device.now == pytest.approx(3.0)
    device.now += 5.0
    device.wait(gathering)
    assert device.now == pytest.approx(8.0) and device.exposed_s["z"] == pytest.approx(3.0)


def seconds_of_pieces(parts: tuple[float, ...], pieces: int, collectives: int) -> list[float]:
    """Return the time at which each of some equal collectives is complete, simulated piece by piece."""
    free, complete = [0.0] * len(parts), []
    for _ in range(collectives):
        for _ in range(pieces):
            ready = 0.0
            for part, part_s in enumerate(parts):
                ready = free[part] = max(ready, free[part]) + part_s / pieces
        complete.append(free[-1])
    return complete


@pytest.mark.parametrize("pieces", [1, 4])
def test_pieces_of_collectives_follow_each_other_through_their_parts(pieces, monkeypatch):
    """All-reduces of two hosts of two ranks: 1 s inside a host, 2 s between hosts and 1 s inside."""
    machine = replace(LINKS, device="cpu", levels=[LevelConfig(None, 1.0, None, 0.0), LevelConfig(2, 1.0, None, 0.0)])
    links = Links(machine, GridSizes(4))
    links.speeds = {key: speed._replace(hidden=1.0) for key, speed in links.speeds.items()}
    monkeypatch.setattr(devices, "num_pieces", lambda nbytes: pieces if nbytes == 1e9 else 0)  # a rank's part
    device = Device(machine, links)
    reductions = [device.start("all_reduce", "x", 2e9) for _ in range(3)]
    assert device.now == 0
    device.now = 1.5  # of computation
    for reduction, complete in zip(reductions, seconds_of_pieces((1.0, 2.0, 1.0), pieces, 3), strict=True):
        device.wait(reduction)
        assert device.now == pytest.approx(complete)
    assert device.exposed_s["x"] == pytest.approx(device.now - 1.5)


def test_inner_and_outer_links_carry_at_once_and_late_ranks_are_waited_for():
    """Two gathers of 2 s on y, between nodes, and one of 2 s on x, inside; ranks come 0.5 s late."""
    nodes = [LevelConfig(None, 1.0, None, 0.0), LevelConfig(2, 1.0, None, 0.0)]
    machine = replace(LINKS, levels=nodes, skew_us=5e5)
    links = Links(machine, GridSizes(2, 2, 1, 1))
    links.speeds = {key: speed._replace(hidden=1.0) for key, speed in links.speeds.items()}
    device = Device(machine, links)
    started = [device.start("all_gather", axis, nbytes) for axis, nbytes in (("y", 1e9), ("y", 1e9), ("x", 2e9))]
    assert device.now == 0
    for index, now in ((2, 2.5), (0, 2.5), (1, 4.5)):  # two groups share a node's links: 0.5 + 2
        device.wait(started[index])
        assert device.now == pytest.approx(now)
    assert device.exposed_s == {"x": pytest.approx(2.5), "y": pytest.approx(2.0)}


def test_states_that_do_not_travel_behind_the_forward_are_waited_for():
    machine, sizes = replace(LINKS, matmul_tflops=0.005), GridSizes(1, 1, 1, 4)
    large = *LARGE, "optim.shard_states=true"
    on, off = (plan(machine, sizes, *large, *words) for words in ((), ("parallel.overlap.data=false",)))
    assert off.comm["data"]["exposed_s"] == pytest.approx(off.comm["data"]["time_s"])
    assert on.comm["data"]["exposed_s"] < 0.5 * off.comm["data"]["exposed_s"]


@pytest.mark.parametrize("cache_layers", [0, 4, full(10), 19, full("all")])
def test_the_memory_of_many_blocks_is_extrapolated_from_few(monkeypatch, cache_layers):
    machine = configured(["cluster=perlmutter"]).cluster
    words = "model.layers=20", "train.activation_checkpointing=full", f"parallel.cache_layers={cache_layers}"
    found = []
    for blocks in (estimate.BLOCKS_PER_KIND, 1000):
        monkeypatch.setattr(estimate, "BLOCKS_PER_KIND", blocks)
        found.append(Estimate(config(machine, *words), GridSizes(1, 1, 4, 2)).memory_gib(2) - machine.reserved_gib)
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_whole_layers_move_communication_from_the_forward_to_the_backward():
    # A forward takes about two thirds of the time of its gathers. A backward takes longer than its scatters.
    machine, sizes = replace(LINKS, matmul_tflops=0.19), GridSizes(1, 1, 2, 1)
    large = "model.layers=12", "model.hidden=512", "train.precision=fp32"
    split, some, too_many = (
        plan(machine, sizes, *large, "parallel.cache_layers=all", f"parallel.replicated_layers={count}")
        for count in (0, 3, 12)
    )
    assert some.comm["z"]["bytes"] == pytest.approx(split.comm["z"]["bytes"])  # a sum sends as much as both
    assert some.step_time_s < 0.98 * split.step_time_s < too_many.step_time_s


SETTINGS = [
    (),
    ("parallel.cache_layers=5", "train.activation_checkpointing=full"),
    ("parallel.cache_layers=all", "parallel.cache_scope=step", "parallel.replicated_layers=4"),
]
SAMPLED = [GridSizes(2, 2, 2), GridSizes(1, 2, 1, 4), GridSizes(z=8)]  # each with one of the settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        (pytest.param if sizes == SAMPLED[number] else full)(overrides, sizes, id=f"{sizes}-{number}")
        for number, overrides in enumerate(SETTINGS)
        for sizes in grids(8)
    ],
)
def test_a_long_step_is_extrapolated_from_short_ones(monkeypatch, sizes, overrides):
    machine = configured(["cluster=perlmutter"]).cluster
    model = "model.layers=12", "model.hidden=512", "model.heads=8"
    words = (*model, "train.micro_batch_size=1", "train.batch_size=64", *overrides)
    drawn = plan(machine, sizes, *words)
    monkeypatch.setattr(estimate, "MAX_WALKED", 1 << 30)
    walked = plan(machine, sizes, *words)
    assert bytes_of(drawn) == pytest.approx(bytes_of(walked))
    assert drawn.compute_s == pytest.approx(walked.compute_s)
    assert drawn.step_time_s == pytest.approx(walked.step_time_s, rel=0.01)
