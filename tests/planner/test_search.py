"""Search for the best grid: enumeration, ranking, grids that do not fit, and the planner's command."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from gpt4d.config import ConfigError, GridSizes, LevelConfig, grid_problem
from gpt4d.model import registry
from gpt4d.planner.candidates import fewest_devices, fewest_microbatches
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.options import KEYS, levels
from gpt4d.planner.search import rank
from gpt4d.planner.workload import grids, possible_contexts
from gpt4d.validation import validate
from tests.support.grids import bytes_planned, bytes_sent, full, train_in_rank
from tests.support.planner_runs import ask, ranked
from tests.support.settings import configured

ONE_STAGE = "parallel.pipeline.stages=1"
# On two nodes some grids of this model do not fit.
PERLMUTTER = (
    "cluster=perlmutter", "model=gpt_20b", "model.layers=12", "train.batch_size=4",
    "train.activation_checkpointing=full",
)  # fmt: skip
# Ranks cannot share sequences of this length, so some grids do not divide the batch.
UNSHARED = (*PERLMUTTER, "train.seq_len=2046", ONE_STAGE)


@pytest.mark.parametrize("devices", [1, 7, 12, 64, 360])
def test_grids_yields_every_grid_once(devices):
    listed = list(grids(devices))
    assert len(listed) == len(set(listed)) and all(math.prod(sizes) == devices for sizes in listed)
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    assert len(listed) == sum(devices % (x * y * z) == 0 for x, y, z in itertools.product(divisors, repeat=3))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [6, full(8)])
def test_ranked_grids_are_those_that_validation_accepts(tiny, devices):
    config = tiny()
    ranked = {plan.sizes: plan for plan in rank(config, devices).plans}
    rules = registry.describe(config.model).rules
    for sizes in grids(devices):
        possible = grid_problem(rules, config.train, config.parallel, sizes) is None
        assert (sizes in ranked) == possible
        if possible:
            assert validate(tiny(*ranked[sizes].overrides), devices).sizes == sizes


def test_plans_are_ordered_by_step_time_and_limited_by_top():
    ranking, top = ranked(8, *UNSHARED), rank(configured([*UNSHARED]), 8, top=3)
    times = [plan.step_time_s for plan in ranking.plans]
    assert times == sorted(times) and len(times) == ranking.fitting == top.fitting + top.pruned
    assert [p.sizes for p in top.plans] == [p.sizes for p in ranking.plans[:3]]


def test_grids_that_do_not_fit_are_listed_with_their_gib():
    ranking = ranked(8, *UNSHARED)
    assert all(plan.memory_gib <= 40 for plan in ranking.plans)
    assert ranking.too_large and all(gib > 40 for gib in ranking.too_large.values())
    assert len(ranking.plans) + len(ranking.too_large) + ranking.impossible == len(list(grids(8)))
    assert ranking.impossible and GridSizes(2, 1, 1, 4) in ranking.too_large  # 8 bytes of each of 6 billion parameters


def test_the_planned_microbatch_is_the_largest_that_fits():
    words = *UNSHARED, "train.batch_size=64"
    plan = rank(configured([*words]), 4, top=1).plans[0]
    assert f"train.micro_batch_size={plan.micro_batch}" in plan.overrides
    assert plan.sizes in ranked(4, *words, f"train.micro_batch_size={2 * plan.micro_batch}").too_large


@pytest.mark.parametrize(
    ("words", "devices", "share"),
    [
        ("model=gpt_20b model.layers=8 cluster=perlmutter train.batch_size=64", 8, 0.9),
        full("model=llama3_8b cluster=dgx_h100 train.batch_size=64", 16, 0.7),
        full("model=unet_1b cluster=perlmutter train.batch_size=512", 8, 0.5),
        full("model=gemma3_1b cluster=perlmutter train.batch_size=128", 8, 0.5),
        full("model=olmoe_7b cluster=dgx_h100 train.batch_size=64", 8, 0.7),
        full("model=llama_1b cluster=perlmutter train.batch_size=256 optim.algorithm=muon", 8, 0.5),
    ],
)
def test_activations_of_similar_grids_change_no_microbatch(words, devices, share):
    config = configured(words.split())
    config = replace(config, cluster=replace(config.cluster, memory_gib=share * config.cluster.memory_gib))
    compared = 0
    for level in levels(config, KEYS):
        for sizes in grids(devices):
            if possible_contexts(level.config, level.description.rules, sizes):
                alone = fewest_microbatches(replace(level, known={}), (sizes,))
                found = fewest_microbatches(level, (sizes,))
                assert (found and found.microbatches) == (alone and alone.microbatches), sizes
                compared += any(known.alike for known in level.known.values())
    assert compared > 20


def test_grids_whose_memory_limits_the_microbatch_split_tokens():
    words = *PERLMUTTER, "model.layers=4", "train.batch_size=256", ONE_STAGE
    (plan,) = (plan for plan in ranked(8, *words).plans if plan.sizes == GridSizes(8))
    whole = fewest_microbatches(levels(configured([*words]))[0], (plan.sizes,))
    assert plan.choice["sequence_parallel"] and whole.microbatches > plan.microbatches


def test_nothing_fits_on_less_than_the_fewest_devices():
    words = *PERLMUTTER, ONE_STAGE
    config = configured([*words])
    fewest = fewest_devices(config, 64)
    assert ask(*words).startswith(
        "gpt_20b, 4 sequences of 2,048 tokens per step, needs at least "
        f"{fewest} device(s) of perlmutter; world_size={fewest} "
    )
    assert rank(config, fewest).plans
    assert not any(rank(config, devices).plans for devices in range(fewest - 3, fewest))
    assert fewest_devices(config, fewest - 1) is None
    small = replace(config, cluster=replace(config.cluster, levels=[LevelConfig(fewest - 1)]))
    assert fewest_devices(small, 64) is None  # the machine has no more


def test_the_error_names_remedies_if_nothing_fits():
    large, small = (
        configured(w) for w in (["cluster=perlmutter", "model=gpt_20b", "train.batch_size=16"], ["train.batch_size=2"])
    )
    remedies = "use more devices, train.loss_chunks=8 or train.activ"
    with pytest.raises(ConfigError, match=rf"on 4 device\(s\), a step needs at least .* GiB .*{remedies}"):
        rank(large, 4).check(large, 4)
    with pytest.raises(ConfigError, match="no grid of 7 device"):
        rank(small, 7).check(small, 7)


def test_auto_selects_the_best_grid_and_training_uses_it(ranks, tiny):
    config = tiny("parallel.mode=auto", ONE_STAGE, "train.steps=2")
    plan, (best, *_) = validate(config, 4), rank(config, 4, top=3).plans
    assert plan.sizes == best.sizes and plan.candidates[0].startswith(f"{best.sizes} (")
    assert plan.config.parallel.mode == "4d" and validate(plan.config, 4).sizes == best.sizes
    ranks.run(4, train_in_rank, config)
    assert bytes_sent(config.run.dir) == bytes_planned(plan.config, plan.sizes)
    with pytest.raises(ConfigError, match=r"parallel\.gy=2: the planner chooses the grid"):
        validate(tiny("parallel.mode=auto", "parallel.gy=2"), 8)


# On this machine gathers limit the forward of the best grids, and reductions limit the step of the remaining grids.
SLOW_LINKS = (
    "cluster=local", "model=gpt_tiny", "model.layers=8", "model.hidden=512", "model.heads=8", "model.vocab_size=512",
    "train.seq_len=128", "model.max_positions=128", "cluster.matmul_tflops=0.02", "cluster.memory_gb_s=1000",
    "cluster.levels=[{ranks: 2, group_gb_s: 0.05}, {ranks: 4, group_gb_s: 10}]", "parallel.cache_layers=all", ONE_STAGE,
)  # fmt: skip


def test_the_planner_chooses_whole_layers_with_their_memory():
    config = configured([*SLOW_LINKS, "train.batch_size=16"])
    (best,) = rank(config, 8, top=1).plans
    assert best.sizes.z > 1 and best.choice["replicated_layers"] > 0
    chosen = configured([*SLOW_LINKS, "train.batch_size=16", *best.overrides])
    assert Estimate(chosen, best.sizes).step(best.micro_batch).step_time_s == pytest.approx(best.step_time_s)
    split = replace(chosen, parallel=replace(chosen.parallel, replicated_layers=0))
    assert Estimate(split, best.sizes).memory_gib(best.micro_batch) < best.memory_gib
    small = replace(config, cluster=replace(config.cluster, memory_gib=best.memory_gib * 0.99))
    (other,) = rank(small, 8, top=1).plans
    assert (best.sizes, best.micro_batch, best.choice) != (other.sizes, other.micro_batch, other.choice)
    assert other.memory_gib < best.memory_gib
    validated = validate(replace(config, parallel=replace(config.parallel, mode="auto")), 8)
    assert validated.config.parallel.replicated_layers == best.choice["replicated_layers"]


def test_the_planner_gathers_once_per_step_where_there_are_microbatches():
    words = [*SLOW_LINKS, "train.batch_size=64"]
    config = configured([*words, "train.micro_batch_size=2", "parallel.replicated_layers=1"])
    for plan in rank(config, 8, top=2).plans:
        assert plan.sizes.z == 1 or plan.choice == {"cache_scope": "step"}
        assert validate(configured([*words, *plan.overrides]), 8).sizes == plan.sizes


@pytest.mark.parametrize(("size", "further"), [(1, {"cache_scope": "step"}), (2, {})])
def test_the_planner_keeps_converted_weights_where_batches_are_small(size, further):
    words = "model=gpt_125m", "cluster=dgx_a100", "train.batch_size=8", f"train.micro_batch_size={size}"
    plans = {plan.sizes: plan for plan in rank(configured(words), 4).plans}
    assert plans[GridSizes(data=4)].choice == {"cache_layers": "all", **further}


@pytest.mark.slow
def test_json_and_picture_are_written_without_torch(tmp_path):
    picture = tmp_path / "plan.png"
    code = (
        "import sys; from gpt4d.planner.__main__ import main; from gpt4d.config.commands import one_line_errors\n"
        "with one_line_errors(): main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules"
    )
    arguments = "world_size=4", *PERLMUTTER, ONE_STAGE, "format=json", "top=3", f"plot={picture}"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    best, *others = json.loads(done.stdout)
    assert picture.stat().st_size > 5000
    assert best["step_time_s"] <= others[0]["step_time_s"] <= others[1]["step_time_s"]
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
    command, _, nodes, script, *overrides = pasted[0].split()
    assert (command, nodes, script) == ("sbatch", "--nodes=2", "scripts/slurm/perlmutter.sh")
    assert validate(configured(["cluster=perlmutter", *overrides]), 8).sizes.devices == 8


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
        ("world_size=0", "world_size=0: use a value of at least 1"),
        ("worldsize=8", "worldsize: there is no such argument; did you mean world_size?"),
        ("world_size=8 token=1e12", "token: there is no such argument; did you mean tokens?"),
        ("gpus=8", "gpus: there is no such argument; did you mean world_size?"),
        ("world_size=8 steps=100", "steps: there is no such key; did you mean train.steps?"),
        ("largest=true model=gpt_5b top=3", "largest=true: plans every model by itself; leave out top, model"),
        ("world_size=8 price=-1", "price=-1.0: use a value of at least 0"),
        ("world_size=8 format=xml", "format=xml: use one of table, json"),
        ("plot=plan.png", "plot=plan.png: belongs to a ranking of grids"),
        ("grid=2x1x1x1 top=3", "top=3: belongs to a ranking of grids"),
        ("world_size=8 plot=plan", "plot=plan: not a format of plots; use the name of a .png"),
        ("world_size=8 plot=nowhere/plan.png", "plot=nowhere/plan.png: no directory nowhere; create it"),
        ("world_size=8 parallel.gq=2", "parallel.gq: there is no such key; use one of mode, gx"),
        ("world_size=8 cluster=missing.yaml", "cluster=missing.yaml: no such file"),
        ("world_size=8 parallel.gx=2", "parallel.gx=2: the planner chooses the grid; leave it out, or ask for one"),
        ("world_size=16 cluster=ic2", "cluster.levels: ic2 has 8 device(s), not 16"),
        ("world_size=8 cluster.matmul_tflops=0", "cluster.matmul_tflops=0.0: use a value above 0"),
        ("world_size=8 cluster.levels=[]", "cluster.levels=[]: a machine needs a level of links"),
        ("world_size=8 cluster.levels=[{},{}]", "cluster.levels[1].ranks=null: "),
        ("world_size=8 model=gpt_tiny model.heads=7", "model.heads=7: does not divide"),
        ("--world-size 8", "--world-size: settings are key=value; use world_size=8"),
        ("--top=3", "--top=3: settings are key=value; use top=3"),
        ("grid=4x1", "grid=4x1: not the sizes of gx, gy, gz and gdata; use grid=4x1x2x1"),
        ("grid=2x1x1x1 world_size=4", "world_size=4: grid=2x1x1x1 has 2 device(s); use world_size=2"),
        ("grid=3x1x1x1 cluster=local", "parallel.gx=3: does not divide model.heads=4"),
        ("world_size=1 model=unet_tiny tokens=1e6", "train.tokens=1000000: model=unet_tiny is trained on images; use"),
        ("world_size=1 tokens=-1", "train.tokens=-1: use a value above 0"),
    ],
)
def test_a_mistake_is_reported_in_one_line(arguments, message):
    answer = ask(*arguments.split(), *([] if "cluster" in arguments else ["cluster=local"]))
    assert answer.startswith(f"error: {message}") and answer.count("\n") == 1
