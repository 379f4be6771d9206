"""``parallel.*`` resolves to a DeviceMesh(d1, d2) and an order of ranks, or is rejected in one line."""

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage_plan import ranks_in_grid_order
from gpt4d.planner import atp, search, topology
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.resolve import resolve
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.grids import full
from tests.support.planner_runs import ranked
from tests.support.settings import configured

PAIRS = ("model=gpt_tiny", "cluster.levels=[{ranks: 4, group_gb_s: 1}, {ranks: 2, group_gb_s: 50}]", "model.heads=8")
BF16 = ("train.precision=bf16", "train.batch_size=8")


@pytest.mark.parametrize("rank_order", ["xy", "yx"])
def test_each_rank_is_as_far_from_its_neighbors_as_the_planner_assumes(rank_order):
    sizes = GridSizes(2, 4, 3, 2)
    ranks, planned, distance = ranks_in_grid_order(sizes, rank_order), topology.spans(sizes, rank_order), 1
    assert sorted(ranks) == list(range(sizes.devices))
    for axis, size in sizes._asdict().items():  # places count x first, then y, z and data
        for place, first in enumerate(ranks):
            if place // distance % size + 1 < size:
                assert ranks[place + distance] - first == planned[axis].stride
        distance *= size
    assert planned[rank_order[0]].stride == 1


def test_every_rank_belongs_to_one_stage_of_consecutive_ranks():
    pipeline = ["parallel.pipeline.stages=2", "parallel.pipeline.stage_grids=[2x2x1x1,1x2x1x1]"]
    plan = validate(configured([*PAIRS, *pipeline, "parallel.rank_order=yx"]), 6)
    assert [stage.ranks for stage in plan.stages] == [(0, 2, 1, 3), (4, 5)]
    assert [plan.stage_of(member).index for member in range(6)] == [0, 0, 0, 0, 1, 1]


def test_the_plan_has_the_description_that_estimate_and_stage_use(monkeypatch):
    pipeline = ["parallel.pipeline.stages=2", "parallel.pipeline.stage_grids=[1x1x1x1,3x1x1x1]"]
    words = "model=gpt_tiny", "model.heads=6", "model.hidden=96", "train.loss_chunks=2"
    plan = validate(configured([*words, *pipeline]), 4)
    assert plan.description.parameters == registry.describe_run(plan.config).parameters
    monkeypatch.setattr(registry, "describe_run", None)
    assert plan.step_time_s > 0
    stage = build_stage(plan, Grid.single_device(), torch.device("cpu"))
    assert {name for name, _ in stage.module.named_parameters()} < plan.description.parameters.keys()


def test_mode_atp_trains_on_the_given_mesh_in_the_faster_order():
    words = [*PAIRS, "parallel.mode=atp", "parallel.d1=4", "parallel.d2=2"]
    plan = validate(configured(words), 8)
    assert plan.sizes == GridSizes(4, 2) and plan.stages[0].ranks == (0, 2, 4, 6, 1, 3, 5, 7)
    (candidate,) = plan.candidates
    assert candidate.startswith("DeviceMesh(4, 2) with consecutive ranks along d2 (")
    given = validate(configured([*words, "parallel.rank_order=xy"]), 8)
    assert given.stages[0].ranks == tuple(range(8)) and "consecutive ranks along d1" in given.candidates[0]


def test_mode_atp_chooses_the_mesh_with_the_least_communication():
    config = configured([*PAIRS, "parallel.mode=atp"])
    plan, meshes = validate(config, 8), atp.rank(config, 8)
    assert plan.sizes == GridSizes(*meshes[0].mesh) and plan.candidates[0].startswith(str(meshes[0]))
    assert [line.split(" (")[-1] for line in plan.candidates] == [
        f"{mesh.t_comm_s:.3g} s of all-reduces per step)" for mesh in meshes[:3]
    ]
    assert validate(plan.config, 8).stages == plan.stages
    one_head = validate(configured([*PAIRS, "parallel.mode=atp", "model.heads=1"]), 8)
    assert one_head.sizes == GridSizes(1, 8), "all other meshes split the heads"


def test_mode_atp_leaves_devices_to_z_and_data():
    for words, sizes in (("d1=2 d2=1", (2, 1, 2, 2)), ("d1=2", (2, 2, 2, 1)), ("d2=2 gdata=2", (1, 2, 2, 2))):
        settings = [f"parallel.{word}" for word in ("mode=atp", "gz=2", *words.split())]
        assert validate(configured([*PAIRS, *settings]), 8).sizes == sizes


MISTAKES = [
    ("mode=atp gx=2", "parallel.gx=2: its name in parallel.mode=atp is d1; use parallel.d1=2"),
    ("d2=2", "parallel.d2=2: belongs to parallel.mode=atp; set that, or use parallel.gy=2"),
    ("mode=atp d1=3", "parallel.d1=3: does not divide the 8 device … use one of 1, 2, 4, 8"),
    ("mode=atp gz=3", "parallel.gz·gdata=3·1=3: does not divide the 8 process"),
    ("mode=atp d1=2 d2=3", "parallel.d1·d2·gz=2·3·1: does not fit the 8 process … leave d1 and d2 out"),
    ("mode=atp d1=2 d2=2 gdata=1", "parallel.d1·d2·gz·gdata=2·2·1·1: does not fit … leave d1 and d2 out"),
    ("mode=atp d1=2 d2=2 gz=4", "=2·2·4: does not fit the 8"),
    ("mode=atp d1=0", "parallel.d1=0: use a value of at least 1"),
    ("mode=atp gz=0", "parallel.gz=0: use a value of at least 1"),
    ("mode=atp gdata=-1", "parallel.gdata=-1: use a value of at least 1"),
    ("chunks=4 train.micro_batch_size=2 train.batch_size=16",
     "parallel.chunks=4: does not divide a device's microbatch of 2 sample"),
    ("sequence_parallel=true gx=4 train.seq_len=6 gy=2 train.batch_size=1",
     "parallel.gx=4 does not divide the 6 tokens of a chunk; use a multiple of 4 for train.seq_len, a multiple of 2 "
     "for train.batch_size, or"),
    ("mode=atp d1=8 model.heads=4", "where gx is d1 and gy is d2: parallel.gx=8: does not"),
    ("rank_order=z", "parallel.rank_order=z: use one of xy, yx"),
]  # fmt: skip


def test_impossible_meshes_are_rejected_in_one_line():
    def report(words):
        validate(configured([word if "." in word else f"parallel.{word}" for word in words.split()]), 8)

    assert not wrong_messages(MISTAKES, report)


def test_the_planner_puts_the_axis_of_more_traffic_inside_the_nodes():
    """A block sums 7h elements over y and 2h over x."""
    config = configured([*PAIRS, "model.layers=8", "model.hidden=256", "train.batch_size=8", "model.vocab_size=256"])
    plans = [plan for plan in search.rank(config, 8).plans if plan.sizes == GridSizes(4, 2)]
    assert plans[0].choice == {"rank_order": "yx"} and plans[0].grid == "4x2x1x1 in rank order yx"
    chosen = validate(configured([*PAIRS, *plans[0].overrides]), 8)
    assert chosen.stages[0].ranks == (0, 2, 4, 6, 1, 3, 5, 7)


def test_a_mesh_that_is_chosen_has_a_microbatch_that_fits_and_one_that_is_given_keeps_its_own():
    words = ["cluster=local", "model=gpt_125m", "train.batch_size=64", "parallel.mode=atp"]
    chosen = validate(configured(words), 8)
    assert Estimate(chosen.config, chosen.sizes).memory_gib(chosen.micro_batch_size(chosen.stages[0])) <= 8
    assert chosen.micro_batch_size(chosen.stages[0]) < 64
    given = resolve(configured([*words, "parallel.d1=2", "parallel.d2=4"]), 8)
    assert given.micro_batch_size(given.stages[0]) == 64


def test_a_measured_bandwidth_precedes_that_of_the_links():
    slow = ["cluster=ic1", "cluster.atp_gb_s={8x1: [0.1, null], 2x4: [0.2, 0.9]}", "parallel.mode=atp", "model.heads=8"]
    modelled = atp.rank(configured(["cluster=ic1", "cluster.atp_gb_s=null", *slow[2:]]), 8)
    seconds = {plan.mesh: plan.t_comm_s for plan in modelled}
    for plan in atp.rank(configured(slow), 8):
        assert (plan.t_comm_s > 1.5 * seconds[plan.mesh]) == (plan.mesh in [(8, 1), (2, 4)])


@pytest.mark.parametrize(("devices", "length"), [(2, 5), full(4, 5), full(8, 5), full(8, 6), full(8, 7)])
def test_the_planners_choice_is_accepted_whatever_the_lengths(devices, length):
    words = [*PAIRS, "parallel.sequence_parallel=true", f"train.seq_len={length}", "train.batch_size=4"]
    for micro_batch in (["train.micro_batch_size=1"], []):
        for plan in search.rank(configured([*words, *micro_batch]), devices).plans:
            assert validate(configured([*words, *micro_batch, *plan.overrides]), devices).sizes == plan.sizes


@pytest.mark.parametrize(
    ("world", "words", "kept"),
    [
        (1, [], ("all", "microbatch")),
        (2, ["train.micro_batch_size=1"], ("all", "step")),
        (4, ["parallel.pipeline.stages=2"], ("all", "step")),
        (2, ["train.micro_batch_size=1", "parallel.mode=auto", "parallel.cache_layers=0"], (0, None)),
        (2, ["train.micro_batch_size=1", "parallel.cache_scope=microbatch"], ("all", "microbatch")),
        (1, ["parallel.cache_layers=0", "parallel.cache_scope=microbatch"], (0, "microbatch")),
        (2, ["parallel.gz=2"], (0, None)),
        (1, ["train.precision=fp32"], (0, None)),
        (1, ["parallel.cache_layers=0"], (0, None)),
        (1, ["parallel.cache_layers=2"], (2, None)),
    ],
)
def test_converted_weights_are_kept_unless_they_are_gathered_or_a_number_of_blocks_is_given(world, words, kept):
    parallel = validate(configured([*BF16, *words]), world).config.parallel
    assert (parallel.cache_layers, parallel.cache_scope) == kept


def test_converted_weights_are_kept_as_long_as_a_tenth_of_the_memory_stays_free():
    given = *BF16, "model=gpt_125m", "train.seq_len=64", "train.micro_batch_size=1"

    cases = ["layers=all", "scope=step"], ["layers=all"], ["layers=0"]
    settings = ([f"parallel.cache_{word}" for word in case] for case in cases)
    limits = [Estimate(configured([*given, *words]), GridSizes()).memory_gib(1) for words in settings]
    assert limits == sorted(limits, reverse=True) and len({*limits}) == 3
    for limit, kept in zip(limits, [("all", "step"), ("all", "microbatch"), (0, None)], strict=True):
        parallel = validate(configured([*given, f"cluster.memory_gib={limit / 0.9}"]), 1).config.parallel
        assert (parallel.cache_layers, parallel.cache_scope) == kept


@pytest.mark.parametrize("words", [[], ["model.layers=2", "parallel.pipeline.stages=2"]], ids=["grids", "pipelines"])
def test_the_overrides_of_a_plan_keep_the_weights_that_the_plan_keeps(words):
    for plan in ranked(2, *BF16, *words).plans[:6]:
        parallel = validate(configured([*BF16, *words, *plan.overrides]), 2).config.parallel
        expected = plan.choice.get("cache_layers", 0), plan.choice.get("cache_scope")
        assert (parallel.cache_layers, parallel.cache_scope) == expected
