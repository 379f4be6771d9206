"""The planner's pipelines: the time of a step on stages, and the choice of stages."""

import math

import pytest

from gpt4d.config import Config, GridSizes, divisors, grid_problem, possible_microbatches, with_stages
from gpt4d.config.schema import SCHEDULES
from gpt4d.model import registry
from gpt4d.parallel.stage_plan import StagePlan, consecutive_stages
from gpt4d.planner.stages import PlanEstimate, stage_parts, transfer_seconds
from gpt4d.planner.topology import for_devices, usable_gib
from gpt4d.planner.workload import grids
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.grids import full
from tests.support.planner_runs import ranked
from tests.support.settings import configured

MODEL = (
    "model=gpt_tiny", "model.layers=8", "model.hidden=64", "model.heads=4", "model.vocab_size=258",
    "model.vocab_multiple=16", "model.max_positions=32", "data.path=null", "train.batch_size=16",
    "cluster.reserved_gib=0", "optim.algorithm=adamw",
)  # fmt: skip
MACHINE = (*MODEL, "cluster=local", "cluster.device=cuda", "cluster.hidden=1", "cluster.matmul_tflops=0.1")
# Two nodes of two devices each, with a slow link between the nodes.
LEVELS = "[{ranks: 2, group_gb_s: 0.002, latency_us: 0}, {ranks: 2, group_gb_s: 10, latency_us: 0}]"
SLOW = (*MACHINE, f"cluster.levels={LEVELS}")


def pipeline(*settings: str) -> list[str]:
    return [f"parallel.pipeline.{setting}" for setting in settings]


@pytest.mark.parametrize("grid", ["1x1x1x2", "2x1x1x1"])
def test_weight_gradients_computed_by_themselves_hide_no_sums_of_outputs(grid):
    """All-reduces of the inputs' gradients overlap with the weights' products, unless the backward is split."""
    slow_links = "cluster.levels=[{ranks: null, group_gb_s: 0.001, latency_us: 0}]"
    settings = *MACHINE, slow_links, "train.seq_len=32", *pipeline("stages=2", f"stage_grids=[{grid},{grid}]")
    whole, split = (
        validate(configured([*settings, *pipeline(f"schedule={name}")]), 4).costs for name in ("1f1b", "zb_h1")
    )
    for stage, backward in enumerate(whole.input_gradient):
        inputs, weights = split.input_gradient[stage], split.weight_gradient[stage]
        assert split.forward[stage] == pytest.approx(whole.forward[stage])
        assert whole.weight_gradient[stage] == 0 < weights
        # The sums take longer than half a backward, so all of the weights' half has hidden them.
        assert inputs + weights == pytest.approx(backward) if grid == "1x1x1x2" else inputs > 0.95 * backward


def brute_force(config: Config, devices: int) -> float:
    """Return the seconds of the fastest pipeline with equal grids and the default schedule that fits."""
    description, best = registry.describe_run(config), float("inf")
    limit = usable_gib(for_devices(config.cluster, devices))
    for stages in divisors(devices)[1:]:
        staged = with_stages(config, stages)
        parts = stage_parts(staged, description)
        for sizes in grids(devices // stages):
            if grid_problem(description.rules, config.train, staged.parallel, sizes):
                continue
            for number in possible_microbatches(config.train, staged.parallel, (sizes,) * stages):
                plan = PlanEstimate(staged, description, consecutive_stages([sizes] * stages, parts), number)
                if plan.memory_gib <= limit:
                    best = min(best, plan.step_time_s)
    return best


@pytest.mark.parametrize(
    "extra", [full(["train.batch_size=8"]), full(["cluster.operation_us=200"]), ["cluster.memory_gib=0.005"]], ids=str
)
def test_the_search_is_as_good_as_trying_everything(extra):
    words = [*SLOW, *extra, *pipeline("schedule=eager_1f1b")]
    found = min(plan.step_time_s for plan in ranked(4, *words).plans if len(plan.stages) > 1)
    assert found <= 1.02 * brute_force(configured(words), 4)


def test_stages_are_chosen_where_the_links_between_nodes_are_slow():
    best = ranked(4, *SLOW).plans[0]
    assert best.config.parallel.pipeline.stages == len(best.stages) > 1
    chosen = validate(configured([*SLOW, *best.overrides]), 4)
    assert chosen.stages == best.stages and chosen.microbatches == best.microbatches
    automatic = validate(configured([*SLOW, "parallel.mode=auto"]), 4)
    assert automatic.stages == chosen.stages and automatic.candidates[0].startswith(best.grid)


def test_chunks_of_the_loss_do_not_change_the_blocks_of_stages():
    configs = (configured(["model=llama_1b", "parallel.pipeline.stages=4", f"train.loss_chunks={n}"]) for n in (1, 8))
    one, other = (stage_parts(config, registry.describe_run(config)) for config in configs)
    assert one == other


def test_what_the_configuration_sets_stays():
    settings = pipeline("stages=2", "schedule=gpipe", "microbatches=4")
    for plan in ranked(4, *SLOW, *settings).plans:
        assert len(plan.stages) == 2 and plan.config.parallel.pipeline.schedule == "gpipe" and plan.microbatches == 4
    for single in (*pipeline("stages=1"), "train.micro_batch_size=4"):
        assert not any(len(plan.stages) > 1 for plan in ranked(4, *SLOW, single).plans)


def test_settings_that_the_planner_cannot_follow_are_named():
    def report(*settings):
        validate(configured([*SLOW, "parallel.mode=auto", *pipeline(*settings)]), 4)

    cases = [
        ("stages=3", "no grid of 4 … parallel.pipeline.stages=3: does not divide 4 device(s); use one of 1, 2, 4"),
        ("stages=2", "stage_grids=[1x1x1x2,2x1x1x1]", "stage_grids= … the planner chooses the grids; leave it out"),
        ("stages=2", "microbatches=5", "no grid of 4 … microbatches=5: does not cut train.batch_size=16"),
    ]
    assert not wrong_messages(cases, report)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_of_a_pipeline_has_lower_bounds_in_every_schedule(schedule, stages):
    chunks = ["chunks_per_stage=2"] * (schedule == "interleaved_1f1b")
    words = *MACHINE, "train.seq_len=32", *pipeline(f"stages={stages}", f"schedule={schedule}", *chunks)
    plan = validate(configured([*words, *pipeline("microbatches=8")]), stages)
    exact = plan.needed_gib(math.inf)
    for share in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99):
        assert share * exact < plan.with_config(plan.config).needed_gib(share * exact) <= exact


def test_a_step_is_what_its_stages_take_and_what_they_wait():
    for plan in ranked(4, *SLOW, *pipeline("stages=2", "schedule=1f1b", "microbatches=16")).plans:
        step = plan.slowest
        assert step.compute_s + step.exposed_s + plan.idle_s == pytest.approx(plan.step_time_s)
        assert 0 < plan.idle_s < plan.step_time_s


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        # Two nodes send half of 8 MB each, and the two nodes of the target receive half each.
        ((0, (1, 1, 2, 2)), (4, (1, 1, 2, 2)), 4.0),
        # All devices hold the full tensor: the link of one node of the target must carry all of it.
        ((0, (2, 2, 1, 1)), (4, (2, 2, 1, 1)), 8.0),
        # Each node of the target needs half, but one node has it all to send.
        ((0, (2, 1, 1, 1)), (2, (1, 1, 1, 4)), 8.0),
        # Inside a node, by its own links.
        ((0, (1, 1, 1, 1)), (1, (1, 1, 1, 1)), 0.8),
    ],
)
def test_a_transfer_takes_what_the_busiest_link_carries(source, target, seconds):
    levels = "[{ranks: 4, group_gb_s: 1e-3, latency_us: 0}, {ranks: 2, group_gb_s: 1e-2, latency_us: 0}]"
    cluster = configured([f"cluster.levels={levels}"]).cluster
    first, second = (StagePlan(0, rank, GridSizes(*sizes), ()) for rank, sizes in (source, target))
    assert transfer_seconds(cluster, first, second, 8_000_000) == pytest.approx(seconds)
