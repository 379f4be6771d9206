"""The ranking: which grids there are, which fit, and what is said of the others."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from gpt4d.config import ConfigError, GridSizes, LevelConfig, compose, grid_problem
from gpt4d.planner import paper_models
from gpt4d.planner.search import choose, fewest_devices, grids, rank
from gpt4d.validation import validate
from tests.grids import bytes_planned, bytes_sent, train_in_rank

PERLMUTTER = ("cluster=perlmutter", "model=gpt_20b", "train.batch_size=256", "train.activation_checkpointing=full")


@pytest.mark.parametrize("devices", [1, 7, 12, 64, 360])
def test_every_grid_is_there_once(devices):
    found = list(grids(devices))
    assert len(found) == len(set(found)) and all(math.prod(sizes) == devices for sizes in found)
    by_force = sum(
        devices % x == 0 and devices // x % y == 0 and devices // x // y % z == 0
        for x in range(1, devices + 1) for y in range(1, devices // x + 1) for z in range(1, devices // x // y + 1)
    )  # fmt: skip
    assert len(found) == by_force


@pytest.mark.parametrize("devices", [6, 8])
def test_what_is_ranked_is_what_the_trainer_takes(tiny, devices):
    config = tiny()
    ranked = {plan.sizes: plan for plan in rank(config, devices).plans}
    for sizes in grids(devices):
        possible = grid_problem(config.model, config.train, sizes) is None
        assert (sizes in ranked) == possible
        if possible:
            assert validate(tiny(*ranked[sizes].overrides), devices) == sizes


def test_the_best_is_first_and_top_cuts_the_rest():
    config = compose(PERLMUTTER)
    whole = rank(config, 32)
    times = [plan.step_time_s for plan in whole.plans]
    assert times == sorted(times) and len(times) == whole.fitting
    top = rank(config, 32, top=3)
    assert [p.sizes for p in top.plans] == [p.sizes for p in whole.plans[:3]] and top.fitting == whole.fitting


@pytest.mark.parametrize("cost", ["aware", "agnostic"])
def test_the_papers_models_rank_by_their_seconds(cost):
    config = compose(["cluster=perlmutter", "model=gpt_125m", "train.batch_size=64"])
    plans = rank(config, 16, cost=cost).plans
    seconds = [sum(paper_models.communication(config, plan.sizes, cost == "aware").values()) for plan in plans]
    assert seconds == sorted(seconds) == [plan.published_s for plan in plans]
    assert [plan.sizes for plan in plans] != [plan.sizes for plan in rank(config, 16).plans]


def test_what_does_not_fit_is_left_out_with_its_gib():
    config = compose([*PERLMUTTER, "train.micro_batch_size=4"])
    ranking = rank(config, 32)
    assert all(plan.memory_gib <= 40 for plan in ranking.plans)
    assert ranking.too_large and all(gib > 40 for gib in ranking.too_large.values())
    assert len(ranking.plans) + len(ranking.too_large) + ranking.impossible == len(list(grids(32)))
    assert GridSizes(1, 1, 1, 32) in ranking.too_large  # 16 bytes of each of 20 billion parameters


def test_a_microbatch_is_the_largest_that_fits():
    config = compose([*PERLMUTTER, "train.batch_size=1024"])
    plan = rank(config, 32, top=1).plans[0]
    assert f"train.micro_batch_size={plan.micro_batch}" in plan.overrides
    larger = compose([*PERLMUTTER, "train.batch_size=1024", f"train.micro_batch_size={2 * plan.micro_batch}"])
    assert plan.sizes in rank(larger, 32).too_large


def test_the_fewest_devices_are_those_below_which_nothing_fits():
    config = compose(PERLMUTTER)
    fewest = fewest_devices(config, 64)
    assert rank(config, fewest).plans
    assert not any(rank(config, devices).plans for devices in range(fewest - 3, fewest))
    assert fewest_devices(config, fewest - 1) is None
    small = replace(config, cluster=replace(config.cluster, levels=[LevelConfig(fewest - 1)]))
    assert fewest_devices(small, 64) is None  # the machine has no more


def test_where_nothing_fits_the_remedy_is_told():
    config = compose(["cluster=perlmutter", "model=gpt_20b", "train.batch_size=16"])
    with pytest.raises(
        ConfigError, match=r"on 4 device\(s\) a step takes .* GiB .*use more devices or optim\.shard_states=true"
    ):
        rank(config, 4).check(config, 4)
    config = compose(["train.batch_size=2"])
    with pytest.raises(ConfigError, match="no grid of 7 device"):
        rank(config, 7).check(config, 7)


def test_auto_takes_the_best_grid(tiny):
    config, plans = choose(tiny("parallel.mode=auto"), 8)
    assert validate(config, 8) == plans[0].sizes and config.parallel.mode == "4d"
    with pytest.raises(ConfigError, match=r"parallel\.gy=2: the planner chooses the grid"):
        choose(tiny("parallel.mode=auto", "parallel.gy=2"), 8)


def test_a_run_trains_on_the_grid_that_auto_takes(ranks, tiny):
    config, plans = choose(tiny("parallel.mode=auto", "train.steps=2"), 4)
    ranks.run(4, train_in_rank, config)
    assert bytes_sent(config.run.dir) == bytes_planned(config, plans[0].sizes)


def test_a_mesh_of_atp_is_not_yet_trained_on(tiny):
    with pytest.raises(ConfigError, match=r"parallel\.gx=d1 parallel\.gy=d2"):
        validate(tiny("parallel.mode=atp"), 4)


def ask(*words: str) -> str:
    """The planner's answer on a command line, in a process that must not have needed torch."""
    code = (
        "import sys; from gpt4d.planner.__main__ import main; from gpt4d.runtime.errors import one_line_errors\n"
        "with one_line_errors(): main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert not done.returncode or done.stderr.startswith("error: "), done.stderr
    return done.stdout or done.stderr


def test_the_answer_in_json_and_as_a_picture_needs_no_torch(tmp_path):
    picture = tmp_path / "plan.png"
    answer = json.loads(
        ask(
            "world_size=16384",
            *PERLMUTTER[:2],
            "train.batch_size=4096",
            "train.activation_checkpointing=full",
            "format=json",
            "top=3",
            f"plot={picture}",
        )
    )
    assert len(answer) == 3 and picture.stat().st_size > 5000
    best = answer[0]
    assert best["step_time_s"] <= answer[1]["step_time_s"] <= answer[2]["step_time_s"]
    exposed = sum(axis["exposed_s"] for axis in best["comm"].values())
    assert best["compute_s"] + exposed == pytest.approx(best["step_time_s"])
    assert best["memory_gib"] == pytest.approx(sum(best["memory"].values())) and 0 < best["mfu"] < 1
    for axis, size in best["grid"].items():
        assert f"parallel.g{axis}={size}" in best["overrides"]
        assert (axis in best["comm"]) == (size > 1)


def test_the_table_ends_with_words_to_paste():
    answer = ask("world_size=32", *PERLMUTTER, "top=5")
    assert "grid(s) do not fit in 40 GiB; the smallest" in answer and "grid(s) are not possible" in answer
    pasted = [line for line in answer.splitlines() if line.startswith("parallel.gx=")]
    assert len(pasted) == 5
    config = compose([*PERLMUTTER, *pasted[0].split()])
    assert validate(config, 32).devices == 32


def test_without_a_world_size_it_tells_the_fewest_devices():
    assert (
        ask(*PERLMUTTER)
        == f"gpt_20b trains on {fewest_devices(compose(PERLMUTTER), 64)} device(s) of perlmutter at the least\n"
    )


def test_atps_meshes_are_ranked_on_request():
    (best, *_) = json.loads(ask("world_size=8", "parallel.mode=atp", "cluster=ic1", "format=json"))
    assert best["mesh"] == [2, 4] and best["overrides"] == ["parallel.gx=2", "parallel.gy=4"]
    assert best["step_time_s"] == pytest.approx(best["compute_s"] + best["t_comm_s"]) and best["memory_gib"] > 0
    assert "ATP-1    DeviceMesh(8, 1)" in ask("world_size=8", "parallel.mode=atp", "cluster=ic2").splitlines()[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["world_size=0"], "world_size=0: use a value of at least 1"),
        (["world_size=8", "format=xml"], "format=xml: use one of table, json"),
        (["world_size=8", "cost=best"], "cost=best: use one of ours, aware, agnostic"),
        (["world_size=8", "plot=plan"], "plot=plan: the name of a .png"),
        (["world_size=8", "parallel.gq=2"], "parallel.gq: there is no such key; there are mode, gx"),
        (["world_size=8", "cluster=missing.yaml"], "cluster=missing.yaml: no such file"),
        (["world_size=8", "parallel.gx=2"], "parallel.gx=2: the planner chooses the grid"),
        (["world_size=16", "cluster=ic2"], "cluster.levels: ic2 has 8 device(s), not 16"),
        (["world_size=8", "cluster.matmul_tflops=0"], "cluster.matmul_tflops=0.0: use a value above 0"),
        (["world_size=8", "cluster.levels=[]"], "cluster.levels=[]: a machine has one level of links at the least"),
        (["world_size=8", "cluster.levels=[{},{}]"], "cluster.levels[1].ranks=None: "),
        (["world_size=8", "plot=nowhere/plan.png"], "plot=nowhere/plan.png: no such directory"),
        (["world_size=8", "model.heads=7"], "model.heads=7 does not divide"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(words, told):
    answer = ask(*words)
    assert answer.startswith(f"error: {told}") and answer.count("\n") == 1
