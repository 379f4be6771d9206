"""The planner with sequences that several ranks share (``parallel.context``)."""

from dataclasses import replace

import pytest

from gpt4d.config import ClusterConfig, GridSizes, LevelConfig
from gpt4d.planner import candidates, search, topology, workload
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.options import levels
from gpt4d.validation import validate
from tests.support.planner_runs import ask, ranked
from tests.support.settings import configured

SIZES = (
    "model.layers=3", "model.hidden=64", "model.heads=4", "model.vocab_size=300", "model.max_positions=32",
    "train.seq_len=32", "optim.algorithm=adamw",
)  # fmt: skip
ONE_STAGE, CONTEXT_2 = "parallel.pipeline.stages=1", "parallel.context=2"
FEW = "model=gpt_tiny", *SIZES
# Without recomputation, the activations of one sequence do not fit on a device.
LONG = (
    "cluster=perlmutter", "cluster.memory_gib=12", "model=llama_160m", "train.seq_len=65536",
    "model.max_positions=65536", "train.batch_size=4", ONE_STAGE,
)  # fmt: skip


@pytest.mark.parametrize("attention_tflops", [None, 0.5])
@pytest.mark.parametrize("words", [["model=gpt_tiny"], ["model=llama_tiny", "model.key_value_heads=2"]], ids=str)
def test_ranks_that_share_samples_share_the_products_equally(attention_tflops, words):
    free = {"memory_gb_s": float("inf"), "operation_us": 0.0, "levels": [LevelConfig(None, float("inf"), None, 0.0)]}
    cluster = ClusterConfig(device="cuda", matmul_tflops=1.0, attention_tflops=attention_tflops, **free)
    config = replace(configured([*words, *SIZES, "train.batch_size=16"]), cluster=cluster)
    alone = levels(config)[0].step((GridSizes(),), 1)
    for context in (2, 4):
        shared = replace(config, parallel=replace(config.parallel, context=context))
        plan = levels(shared)[0].step((GridSizes(1, 1, context),), 1)
        assert plan.slowest.compute_s == pytest.approx(alone.slowest.compute_s / context)
        flops = plan.step_time_s * plan.sizes.devices * (plan.mfu or 0)
        assert flops == pytest.approx(alone.step_time_s * (alone.mfu or 0))


def test_ranks_share_samples_if_there_are_fewer_samples_than_shards_of_the_batch():
    words = *FEW, ONE_STAGE, "train.batch_size=2"
    plans = ranked(4, *words).plans
    assert {plan.sizes for plan in plans} == {*workload.grids(4)}
    for plan in plans:
        context = plan.config.parallel.context
        assert context == max(1, plan.sizes.batch_shards // 2)
        assert (f"parallel.context={context}" in plan.overrides) == (context > 1)
        assert validate(configured([*words, *plan.overrides]), 4).sizes == plan.sizes


def test_ranks_share_samples_if_a_step_does_not_fit_otherwise():
    config = configured([*LONG])
    plan = next(plan for plan in ranked(4, *LONG).plans if plan.sizes == GridSizes(z=4))
    context = plan.config.parallel.context
    assert context > 1 and plan.memory_gib <= topology.usable_gib(config.cluster)
    fewer = replace(config, parallel=replace(config.parallel, context=context // 2))
    assert Estimate(fewer, plan.sizes).memory_gib(1) > topology.usable_gib(config.cluster)
    fewest = candidates.fewest_devices(config, 8)
    assert fewest and ranked(fewest, *LONG).plans


def test_more_ranks_share_samples_if_that_saves_recomputation():
    key = "train.activation_checkpointing"
    plan = next(plan for plan in ranked(4, *LONG, keys=(key,)).plans if plan.sizes == GridSizes(z=4))
    assert plan.config.parallel.context > 1 and key not in plan.options
    assert plan.step_time_s < Estimate(configured([*LONG, f"{key}=full"]), plan.sizes).step(1).step_time_s


def test_two_stages_share_samples_if_there_are_too_few():
    words = *FEW, "train.batch_size=2", "parallel.pipeline.stages=2", "train.steps=1"
    plans = ranked(8, *words).plans
    shared = [plan for plan in plans if plan.config.parallel.context > 1]
    assert shared
    for plan in plans[:3] + shared[:2]:
        checked = validate(configured([*words, *plan.overrides]), 8)
        assert checked.stages == plan.stages
        assert checked.config.parallel.context == plan.config.parallel.context


def test_auto_and_the_command_choose_the_ranks_that_share_samples():
    words = *FEW, ONE_STAGE, "train.batch_size=1"
    plan = validate(configured([*words, "parallel.mode=auto"]), 4)
    assert plan.config.parallel.context == plan.sizes.batch_shards
    answer = ask(*words, "world_size=4")
    assert "1x1x4x1 with context 4" in answer and "parallel.context=4" in answer
    fixed = ask(*words, "train.batch_size=4", CONTEXT_2, "world_size=4")
    assert "1x1x4x1 with context 2" in fixed and "with context 4" not in fixed


def test_a_length_without_positions_names_the_setting():
    answer = ask("model=llama3_8b", "train.seq_len=131072", "world_size=64", "cluster=perlmutter")
    assert "longer than model.max_positions=8192" in answer and "model.max_positions=131072" in answer


def test_the_planner_chooses_the_faster_exchange():
    long = "model=llama_tiny", "model.max_positions=2048", "train.seq_len=2048", "train.batch_size=1", "cluster=local"
    config = configured([*long, ONE_STAGE, "cluster.levels=[{group_gb_s: 0.5}]"])
    (best,) = search.rank(config, 4, top=1).plans
    assert best.choice["context_exchange"] == "ring"
    choice = {**best.choice, "context_exchange": "all_gather"}
    gathered = Estimate(replace(config, parallel=replace(config.parallel, **choice)), best.sizes)
    assert gathered.step(best.micro_batch).step_time_s > best.step_time_s
    fixed = replace(config, parallel=replace(config.parallel, context_exchange="all_gather"))
    assert all("context_exchange" not in plan.choice for plan in search.rank(fixed, 4, top=3).plans)
