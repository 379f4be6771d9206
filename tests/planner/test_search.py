"""Search for the best grid: enumeration, ranking, grids that do not fit, and the planner's command."""

import io
import json
import math
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace

import pytest

from gpt4d.config import ConfigError, GridSizes, LevelConfig, grid_problem
from gpt4d.model import registry
from gpt4d.planner import __main__ as planner
from gpt4d.planner import paper_models
from gpt4d.planner.capacity import fewest_devices, largest_micro_batch
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.search import rank
from gpt4d.planner.workload import grids
from gpt4d.runtime.errors import one_line_errors
from gpt4d.validation import validate
from tests.support.grids import bytes_planned, bytes_sent, train_in_rank
from tests.support.settings import configured

# On two nodes some grids of this model do not fit.
PERLMUTTER = (
    "cluster=perlmutter",
    "model=gpt_20b",
    "model.layers=12",
    "train.batch_size=4",
    "train.activation_checkpointing=full",
)
# Ranks cannot share sequences of this length, so some grids do not divide the batch.
UNSHARED = (*PERLMUTTER, "train.seq_len=2046", "parallel.pipeline.stages=1")


@pytest.fixture(scope="module")
def ranking():
    """Return the ranking of all plans of the model on eight devices, without pipelines."""
    return rank(configured([*UNSHARED]), 8)


@pytest.mark.parametrize("devices", [1, 7, 12, 64, 360])
def test_grids_yields_every_grid_once(devices):
    listed = list(grids(devices))
    assert len(listed) == len(set(listed)) and all(math.prod(sizes) == devices for sizes in listed)
    expected = sum(
        devices % x == 0 and devices // x % y == 0 and devices // x // y % z == 0
        for x in range(1, devices + 1) for y in range(1, devices // x + 1) for z in range(1, devices // x // y + 1)
    )  # fmt: skip
    assert len(listed) == expected


@pytest.mark.slow
@pytest.mark.parametrize("devices", [6, 8])
def test_ranked_grids_are_those_that_validation_accepts(tiny, devices):
    config = tiny()
    ranked = {plan.sizes: plan for plan in rank(config, devices).plans}
    rules = registry.describe(config.model).rules
    for sizes in grids(devices):
        possible = grid_problem(rules, config.train, config.parallel, sizes) is None
        assert (sizes in ranked) == possible
        if possible:
            assert validate(tiny(*ranked[sizes].overrides), devices).sizes == sizes


def test_plans_are_ordered_by_step_time_and_limited_by_top(ranking):
    times = [plan.step_time_s for plan in ranking.plans]
    assert times == sorted(times) and len(times) == ranking.fitting
    top = rank(configured([*UNSHARED]), 8, top=3)
    assert [p.sizes for p in top.plans] == [p.sizes for p in ranking.plans[:3]] and top.fitting == ranking.fitting


@pytest.mark.parametrize("cost", ["aware", "agnostic"])
def test_the_papers_models_rank_by_seconds_of_communication(cost):
    config = configured(["cluster=perlmutter", "model=gpt_125m", "model.layers=4", "train.batch_size=64"])
    plans, model = rank(config, 16, cost=cost).plans, registry.describe(config.model)
    seconds = [sum(paper_models.communication(config, model, plan.sizes, cost == "aware").values()) for plan in plans]
    assert seconds == sorted(seconds) == [plan.published_s for plan in plans]
    assert [plan.sizes for plan in plans] != [plan.sizes for plan in rank(config, 16).plans]


def test_grids_that_do_not_fit_are_listed_with_their_gib(ranking):
    assert all(plan.memory_gib <= 40 for plan in ranking.plans)
    assert ranking.too_large and all(gib > 40 for gib in ranking.too_large.values())
    assert len(ranking.plans) + len(ranking.too_large) + ranking.impossible == len(list(grids(8)))
    assert ranking.impossible and GridSizes(2, 1, 1, 4) in ranking.too_large  # 8 bytes of each of 6 billion parameters


@pytest.mark.slow
def test_the_planned_microbatch_is_the_largest_that_fits():
    words = *UNSHARED, "train.batch_size=512"
    plan = rank(configured(words), 8, top=1).plans[0]
    assert f"train.micro_batch_size={plan.micro_batch}" in plan.overrides
    larger = configured([*words, f"train.micro_batch_size={2 * plan.micro_batch}"])
    assert plan.sizes in rank(larger, 8).too_large


def test_grids_whose_memory_limits_the_microbatch_split_tokens():
    config = configured([*PERLMUTTER, "model.layers=4", "train.batch_size=256", "parallel.pipeline.stages=1"])
    plans = {plan.sizes: plan for plan in rank(config, 8).plans}
    plan = plans[GridSizes(8)]
    assert plan.choice["sequence_parallel"]
    whole, _ = largest_micro_batch(Estimate(config, plan.sizes))
    assert whole < plan.micro_batch


def test_nothing_fits_on_less_than_the_fewest_devices():
    config = configured(PERLMUTTER)
    fewest = fewest_devices(config, 64)
    assert rank(config, fewest).plans
    assert not any(rank(config, devices).plans for devices in range(fewest - 3, fewest))
    assert fewest_devices(config, fewest - 1) is None
    small = replace(config, cluster=replace(config.cluster, levels=[LevelConfig(fewest - 1)]))
    assert fewest_devices(small, 64) is None  # the machine has no more


def test_the_error_names_remedies_if_nothing_fits():
    config = configured(["cluster=perlmutter", "model=gpt_20b", "train.batch_size=16"])
    with pytest.raises(
        ConfigError,
        match=r"on 4 device\(s\), a step needs at least .* GiB .*use more devices, train.loss_chunks=8 or train\.activ",
    ):
        rank(config, 4).check(config, 4)
    config = configured(["train.batch_size=2"])
    with pytest.raises(ConfigError, match="no grid of 7 device"):
        rank(config, 7).check(config, 7)


def test_auto_selects_the_best_grid(tiny):
    config = tiny("parallel.mode=auto", "parallel.pipeline.stages=1")
    plan, (best, *_) = validate(config, 8), rank(config, 8, top=3).plans
    assert plan.sizes == best.sizes and plan.candidates[0].startswith(f"{best.sizes} (")
    assert plan.config.parallel.mode == "4d" and validate(plan.config, 8).sizes == best.sizes
    with pytest.raises(ConfigError, match=r"parallel\.gy=2: the planner chooses the grid"):
        validate(tiny("parallel.mode=auto", "parallel.gy=2"), 8)


# On this machine gathers limit the forward of the best grids, and reductions limit the step of the remaining grids.
SLOW_LINKS = (
    "cluster=local", "model=gpt_tiny", "model.layers=8", "model.hidden=512", "model.heads=8", "model.vocab_size=512",
    "train.seq_len=128", "model.max_positions=128", "cluster.matmul_tflops=0.02", "cluster.memory_gb_s=1000",
    "cluster.levels=[{ranks: 2, group_gb_s: 0.05}, {ranks: 4, group_gb_s: 10}]", "parallel.cache_layers=all",
    "parallel.pipeline.stages=1",
)  # fmt: skip


def test_the_planner_chooses_whole_layers_with_their_memory():
    config = configured([*SLOW_LINKS, "train.batch_size=16"])
    (best,) = rank(config, 8, top=1).plans
    assert best.sizes.z > 1 and best.choice["replicated_layers"] > 0
    chosen = configured([*SLOW_LINKS, "train.batch_size=16", *best.overrides])
    assert Estimate(chosen, best.sizes).plan(best.micro_batch).step_time_s == pytest.approx(best.step_time_s)
    split = replace(chosen, parallel=replace(chosen.parallel, replicated_layers=0))
    assert Estimate(split, best.sizes).memory_gib(best.micro_batch) < best.memory_gib
    small = replace(config, cluster=replace(config.cluster, memory_gib=best.memory_gib * 0.99))
    (other,) = rank(small, 8, top=1).plans
    chosen_plans = [(plan.sizes, plan.micro_batch, plan.choice) for plan in (best, other)]
    assert chosen_plans[0] != chosen_plans[1] and other.memory_gib < best.memory_gib
    validated = validate(replace(config, parallel=replace(config.parallel, mode="auto")), 8)
    assert validated.config.parallel.replicated_layers == best.choice["replicated_layers"]


def test_the_planner_gathers_once_per_step_where_there_are_microbatches():
    words = [*SLOW_LINKS, "train.batch_size=64"]
    config = configured([*words, "train.micro_batch_size=2", "parallel.replicated_layers=1"])
    for plan in rank(config, 8, top=2).plans:
        assert plan.sizes.z == 1 or plan.choice == {"cache_layers": "all", "cache_scope": "step"}
        assert validate(replace(configured([*words, *plan.overrides])), 8).sizes == plan.sizes


@pytest.mark.parametrize(("size", "further"), [(1, {"cache_scope": "step"}), (2, {})])
def test_the_planner_keeps_converted_weights_where_batches_are_small(size, further):
    words = "model=gpt_125m", "cluster=dgx_a100", "train.batch_size=8", f"train.micro_batch_size={size}"
    plans = {plan.sizes: plan for plan in rank(configured(words), 4).plans}
    assert plans[GridSizes(data=4)].choice == {"cache_layers": "all", **further}


def test_training_uses_the_grid_that_auto_selects(ranks, tiny):
    config = tiny("parallel.mode=auto", "parallel.pipeline.stages=1", "train.steps=2")
    ranks.run(4, train_in_rank, config)
    plan = validate(config, 4)
    assert bytes_sent(config.run.dir) == bytes_planned(plan.config, plan.sizes)


def ask(*arguments: str) -> str:
    """Return the output of the planner's command, or its error."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), suppress(SystemExit), one_line_errors():
        planner.main(list(arguments))
    return out.getvalue() or errors.getvalue()


def ask_without_torch(*arguments: str) -> str:
    """Return the output of the planner's command, in a process that must not import torch."""
    code = (
        "import sys; from gpt4d.planner.__main__ import main; from gpt4d.runtime.errors import one_line_errors\n"
        "with one_line_errors(): main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.slow
def test_json_and_picture_are_written_without_torch(tmp_path):
    picture = tmp_path / "plan.png"
    answer = json.loads(
        ask_without_torch(
            "world_size=8",
            *PERLMUTTER,
            "format=json",
            "top=3",
            f"plot={picture}",
        )
    )
    assert len(answer) == 3 and picture.stat().st_size > 5000
    best = answer[0]
    assert best["step_time_s"] <= answer[1]["step_time_s"] <= answer[2]["step_time_s"]
    exposed = sum(axis["exposed_s"] for axis in best["comm"].values())
    assert best["compute_s"] + best["idle_s"] + exposed == pytest.approx(best["step_time_s"])
    assert best["memory_gib"] == pytest.approx(sum(best["memory"].values())) and 0 < best["mfu"] < 1
    for axis, size in best["grid"].items():
        assert f"parallel.g{axis}={size}" in best["overrides"]
        assert (axis in best["comm"]) == (size > 1)


def test_the_table_ends_with_overrides_for_each_plan():
    answer = ask("world_size=8", *UNSHARED, "top=5")
    assert "grid(s) do not fit in 40 GiB without cluster.margin" in answer and "grid(s) are not possible" in answer
    pasted = [line for line in answer.splitlines() if line.startswith("  sbatch")]
    assert len(pasted) == 5
    command, nodes, script, *overrides = pasted[0].split()
    assert (command, nodes, script) == ("sbatch", "--nodes=2", "scripts/slurm/perlmutter.sh")
    assert validate(configured(["cluster=perlmutter", *overrides]), 8).sizes.devices == 8


def test_without_a_world_size_the_fewest_devices_are_printed():
    fewest = fewest_devices(configured(PERLMUTTER), 64)
    assert ask(*PERLMUTTER).startswith(
        "gpt_20b, 4 sequences of 2,048 tokens per step, needs at least "
        f"{fewest} device(s) of perlmutter; world_size={fewest} "
    )


def test_parallel_mode_atp_ranks_meshes():
    (best, *_) = json.loads(ask("world_size=8", "parallel.mode=atp", "cluster=ic1", "format=json"))
    assert best["mesh"] == [2, 4] and best["rank_order"] == "d2-d1"
    mesh = ["parallel.d1=2", "parallel.d2=4"]
    assert best["overrides"] == ["parallel.mode=atp", *mesh, "parallel.rank_order=yx"]
    assert best["step_time_s"] == pytest.approx(best["compute_s"] + best["t_comm_s"]) and best["memory_gib"] > 0
    assert "ATP-1    DeviceMesh(8, 1)" in ask("world_size=8", "parallel.mode=atp", "cluster=ic2").splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["world_size=0"], "world_size=0: use a value of at least 1"),
        (["world_size=8", "format=xml"], "format=xml: use one of table, json"),
        (["world_size=8", "cost=best"], "cost=best: use one of ours, aware, agnostic"),
        (["world_size=8", "plot=plan"], "plot=plan: not a format of plots; use the name of a .png"),
        (["world_size=8", "parallel.gq=2"], "parallel.gq: there is no such key; use one of mode, gx"),
        (["world_size=8", "cluster=missing.yaml"], "cluster=missing.yaml: no such file"),
        (["world_size=8", "parallel.gx=2"], "parallel.gx=2: the planner chooses the grid"),
        (["world_size=16", "cluster=ic2"], "cluster.levels: ic2 has 8 device(s), not 16"),
        (["world_size=8", "cluster.matmul_tflops=0"], "cluster.matmul_tflops=0.0: use a value above 0"),
        (["world_size=8", "cluster.levels=[]"], "cluster.levels=[]: a machine needs a level of links"),
        (["world_size=8", "cluster.levels=[{},{}]"], "cluster.levels[1].ranks=null: "),
        (["world_size=8", "plot=nowhere/plan.png"], "plot=nowhere/plan.png: no directory nowhere; create it"),
        (["world_size=8", "model=gpt_tiny", "model.heads=7"], "model.heads=7: does not divide"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_in_one_line(arguments, message):
    answer = ask(*arguments)
    assert answer.startswith(f"error: {message}") and answer.count("\n") == 1
