"""Recomputation, parts of the loss and sharded states: searched with the grid unless the user sets them."""

import json
import math
from dataclasses import replace

import pytest
from matplotlib.axes import Axes

from gpt4d.config import ConfigError, GridSizes, grid_problem
from gpt4d.model import registry
from gpt4d.planner import launching, published, tables, topology, workload
from gpt4d.planner.candidates import Search, fewest_devices, microbatch_numbers
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.options import KEYS, levels, open_keys, with_settings
from gpt4d.planner.search import rank, with_fewer_options
from tests.support.planner_runs import ask
from tests.support.settings import configured

ONE_STAGE = "parallel.pipeline.stages=1"
ACCOUNT = "--account=ACCOUNT"
LLAMA = ["model=llama3_8b", "model.layers=6", "cluster=perlmutter", "train.batch_size=16", ONE_STAGE]
GPT = ["model=gpt_tiny", "model.vocab_size=4096", "cluster=local", "train.batch_size=16"]
SMALL = [*GPT, ONE_STAGE]


def test_options_that_the_user_sets_or_that_a_model_has_not_are_not_searched():
    assert open_keys(configured([]), []) == list(KEYS)
    words = ["train.loss_chunks=1", "optim.shard_states=true"]
    assert open_keys(configured(words), words) == ["train.activation_checkpointing"]
    config = configured(["train.loss_chunks=2"])
    assert [level.options for level in levels(config, open_keys(config))][1] == {"optim.shard_states": True}
    found = {key for level in levels(configured(["model=unet_tiny"]), KEYS) for key in level.options}
    assert found == {"optim.shard_states", "train.activation_checkpointing"}


def test_searched_options_make_a_step_faster_or_possible():
    config = configured(LLAMA)
    (fixed, *_), (free, *_) = rank(config, 2, top=1).plans, rank(config, 2, top=1, keys=KEYS).plans
    assert free.step_time_s < fixed.step_time_s and free.options
    assert free.memory_gib <= topology.usable_gib(config.cluster) == 38
    whole = configured([*LLAMA, "model.layers=32"])
    assert fewest_devices(whole, 64, KEYS) < fewest_devices(whole, 64)
    chosen = configured([*LLAMA, *free.overrides])
    repeated = Estimate(chosen, free.sizes).step(free.micro_batch)
    assert repeated.step_time_s == pytest.approx(free.step_time_s)
    assert repeated.memory_gib == pytest.approx(free.memory_gib)


def content(description) -> tuple:
    return description.units, description.replicated, description.loss_chunks, description.spec.config.padded_vocab_size


def test_a_search_describes_the_model_once_for_each_padding_and_option(monkeypatch):
    describe, described = registry.describe_run, []

    def record(*arguments):
        described.append(content(describe(*arguments)))
        return describe(*arguments)

    monkeypatch.setattr(registry, "describe_run", record)
    config = configured([*GPT, "cluster.memory_gib=0.5"])
    assert rank(config, 2, keys=KEYS).plans
    assert len(described) == len(set(described)) > 2


def test_the_levels_of_a_search_share_equal_descriptions_only():
    choices, grid = levels(configured(SMALL), KEYS), [GridSizes(3)]
    assert len({id(level.description) for level in choices}) == 2, "only parts of the loss change the description"
    for level in choices:
        for choice in ({}, {"replicated_layers": 1}, {"replicated_layers": 2}):
            config = replace(level.config, parallel=replace(level.config.parallel, **choice))
            assert content(level.choosing(**choice).describe(grid)) == content(registry.describe_run(config, grid))


def test_a_plan_without_its_options_is_estimated_with_the_same_unsharded_blocks():
    config, sizes = configured(SMALL), GridSizes(1, 1, 4, 1)
    search = Search(levels(config, KEYS), 4)
    whole = search.choices[-1].choosing(replicated_layers=2)
    plan = with_fewer_options(search, whole.step((sizes,), config.train.batch_size // 4 // 4))
    assert plan.choice == {"replicated_layers": 2} and plan.options != whole.options
    chosen = with_settings(config, {**plan.options, "parallel.replicated_layers": 2})
    assert plan.step_time_s == Estimate(chosen, sizes).step(plan.micro_batch).step_time_s


def test_a_plan_has_no_option_that_it_does_not_need():
    plan = rank(configured([*SMALL, "cluster.memory_gib=64"]), 1, keys=KEYS).plans[0]
    assert not plan.options


@pytest.mark.parametrize("keys", [(), KEYS], ids=["fixed", "searched"])
def test_at_least_is_the_minimum_over_everything_that_is_searched(keys):
    config = configured([*SMALL, "cluster.memory_gib=0.41"])
    ranking, needed = rank(config, 2, keys=keys), []
    assert not ranking.plans
    for level in levels(config, keys):
        search = Search([level], 2)
        for sizes in workload.grids(2):
            if not grid_problem(level.description.rules, config.train, config.parallel, sizes):
                steps = [level.step((sizes,), number) for number in microbatch_numbers(level, (sizes,))]
                least, bound = search.least_gib((sizes,), 1, math.inf), search.least_gib((sizes,), 1, 0)
                assert bound <= least <= min(step.needed_gib(math.inf) for step in steps) * (1 + 1e-12)
                needed.append(least)
    least = ranking.least()
    assert least.exact and least.gib == min(needed)
    with pytest.raises(ConfigError, match=rf"a step needs at least {least.gib:.1f} GiB of each \(grid {least.grid}"):
        ranking.check(config, 2)


def test_a_run_is_planned_in_hours_and_with_its_command():
    query = ["world_size=8", "model=gpt_125m", "cluster=perlmutter", "train.batch_size=64", ONE_STAGE, "tokens=100e9"]
    query += "price=2.5", "top=1"
    answer = ask(*query)
    assert "64 sequences of 1,024 tokens per step" in answer
    assert "1,525,879 steps (100B tokens) take " in answer and "device-hours" in answer
    last = answer.splitlines()[-1].strip()
    assert last.startswith(f"sbatch {ACCOUNT} --nodes=2 scripts/slurm/perlmutter.sh model=gpt_125m ")
    assert "cluster=" not in last and " train.tokens=100000000000 data=tokens data.path=PATH parallel.gx=" in last
    assert " at 2.5 each\n" in answer
    (entry,) = json.loads(ask(*query, "format=json"))
    assert entry["hours"] == pytest.approx(1525879 * entry["step_time_s"] / 3600)
    assert entry["device_hours"] == pytest.approx(8 * entry["hours"]) and entry["command"] == last
    assert entry["run_cost"] == pytest.approx(2.5 * entry["device_hours"])
    assert entry["tokens_per_s"] == pytest.approx(64 * 1024 / entry["step_time_s"])


PUBLISHED = "model=gpt_125m", "cluster=dgx_a100", "train.batch_size=64", "train.steps=1000000", "grid=1x1x1x8"


@pytest.fixture
def published_quarter(monkeypatch, tmp_path):
    """Let the published MFU of models of 0.1 to 1 billion parameters be 20 to 25 % of 312 TFLOP/s."""
    table = tmp_path / "table.yaml"
    table.write_text("[{gpu: A100, peak_tflops: 312, billions: [0.1, 1], mfu: [0.2, 0.25], runs: 7}]")
    monkeypatch.setattr(published, "TABLE", table)
    published._table.cache_clear()
    yield
    published._table.cache_clear()


def test_a_planned_duration_and_its_cost_have_those_at_the_published_mfu_next_to_them(published_quarter):
    # 72·s·l·h²·(1 + s/6h + V/12lh) FLOPs of a sequence (arXiv 2104.04473, Eq. 3, without recomputation).
    flops = 72 * 1024 * 12 * 768**2 * (1 + 1024 / 6 / 768 + 50257 / 12 / 12 / 768)
    slow, fast = (1e6 * 64 * flops / (8 * 312e12 * mfu) / 3600 for mfu in (0.2, 0.25))
    (entry,) = json.loads(ask(*PUBLISHED, "format=json"))
    assert entry["mfu"] > 0.25 and entry["published_mfu"] == [0.2, 0.25]
    assert entry["published_hours"] == pytest.approx([slow, fast], rel=1e-3)
    lines = ask(*PUBLISHED, "price=2.5").splitlines()
    (line,) = [line for line in lines if "published" in line]
    assert " take " in lines[lines.index(line) - 1] and line.endswith(
        f"7 published runs of 0.1 to 1 billion parameters on A100 typically have 20 to 25% MFU, this plan "
        f"{entry['mfu']:.0%}: {fast:.3g} h to {slow:.3g} h for {20 * fast:.3g} to {20 * slow:.3g}"
    )


MIXTURE = "model=moe_tiny model.hidden=1024 model.inner=4096 model.heads=16 model.head_size=64 train.batch_size=512"
UNET = "model=unet_250m train.batch_size=512 cluster.memory_gib=800"


@pytest.mark.parametrize(
    "changed",
    [
        "cluster=h100", "cluster.peak_tflops=null", "cluster.matmul_tflops=30", "model.layers=2", MIXTURE, UNET,
        "lora.rank=8", "grid=1x1x1x4", "train.precision=fp32", "train.seq_len=8193 model.max_positions=8193",
    ],
)  # fmt: skip
def test_other_gpus_models_precisions_and_slower_plans_have_no_published_runs(changed, published_quarter):
    (entry,) = json.loads(ask(*PUBLISHED, "format=json", *changed.split()))
    assert entry["published_mfu"] is entry["published_hours"] is None


@pytest.mark.parametrize(
    ("words", "devices", "installed", "clone"),
    [
        ("cluster=h100", 1, "gpt4d train", "python train.py"),
        ("cluster=h100", 8, "torchrun --nproc-per-node 8 -m gpt4d train", "torchrun --nproc-per-node 8 train.py"),
        *[
            (words, devices, f"srun {options} gpt4d train", f"sbatch {options} scripts/slurm/generic.sh")
            for words, devices, options in (
                ("cluster=dgx_h100", 16, f"{ACCOUNT} --nodes=2 --ntasks-per-node=8 --gpus-per-node=8"),
                ("cluster=h100", 12, f"{ACCOUNT} --nodes=2 --ntasks-per-node=6 --gpus-per-node=6"),
                ("cluster=gb200", 72, f"{ACCOUNT} --nodes=18 --ntasks-per-node=4 --gpus-per-node=4"),
            )
        ],
        ("cluster=frontier", 16, None, f"sbatch {ACCOUNT} --nodes=2 scripts/slurm/frontier.sh"),
        (
            "cluster=frontier",
            2,
            None,
            f"sbatch {ACCOUNT} --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 scripts/slurm/frontier.sh",
        ),
    ],
)
def test_a_command_starts_as_the_machine_and_the_installation_require(
    words, devices, installed, clone, monkeypatch, tmp_path
):
    config = configured([words])
    overrides = "" if "frontier" in words else f" {words}"
    assert launching.command(config, devices, [words], []) == clone + overrides
    monkeypatch.setattr(launching, "_CLONE", tmp_path)
    assert installed is None or launching.command(config, devices, [words], []) == installed + overrides


def test_a_command_has_the_users_settings_unless_the_planner_replaces_them_and_names_the_data_of_a_large_model():
    words = ["data.path=my books/*.txt", "parallel.mode=auto", "train.micro_batch_size=8"]
    assert launching.command(configured(), 1, words, ["train.micro_batch_size=2"]) == (
        "python train.py 'data.path=my books/*.txt' train.micro_batch_size=2"
    )
    for model, data in (("gpt_125m", "data=tokens data.path=PATH"), ("unet_50m", "data=pictures data.path=PATH")):
        assert launching.command(configured([f"model={model}"]), 1, [], []) == f"python train.py {data}"
        assert launching.command(configured([f"model={model}"]), 1, ["data=hub"], []) == "python train.py data=hub"


def test_one_grid_is_answered_with_what_makes_it_fit():
    answer = ask("grid=2x1x1x1", *LLAMA)
    assert "llama3_8b on grid 2x1x1x1 of perlmutter" in answer and ": does not fit" in answer
    assert "it fits with train.micro_batch_size=2 (planned " in answer
    assert "the fewest devices that suffice are 2, with parallel.gx=" in answer
    answer = ask("grid=2x1x1x1", *LLAMA, "train.micro_batch_size=1")
    assert (
        ": fits\n" in answer
        and f"sbatch {ACCOUNT} --nodes=1 --ntasks-per-node=2" in answer
        and " model=llama3_8b" in answer
    )


def test_help_names_every_argument():
    answer, names = ask("--help"), ("world_size", "grid", "tokens", "price", "largest", "top", "format", "plot")
    assert all(f"{name}=" in answer for name in names)


def test_shared_memory_of_a_node_does_not_grow_with_its_processes():
    config = configured(["cluster=local", "cluster.memory_gib=null", "cluster.host_gib=8", "model=gpt_1b3"])
    assert fewest_devices(config, 4096, KEYS) is None
    with pytest.raises(ConfigError, match=r"use a machine with more memory \(cluster=NAME\)"):
        rank(config, 8, keys=KEYS).check(config, 8)


def test_bars_of_the_picture_end_at_the_step_time(tmp_path, monkeypatch):
    ends, barh = {}, Axes.barh

    def record(self, places, widths, *, left=None, **more):
        if left is not None:
            ends.update((place, start + width) for place, width, start in zip(places, widths, left, strict=True))
        return barh(self, places, widths, left=left, **more)

    monkeypatch.setattr(Axes, "barh", record)
    config = configured(["cluster=local", "train.batch_size=16", "parallel.pipeline.stages=2"])
    plans = rank(config, 2).plans
    assert any(plan.idle_s > 0 for plan in plans)
    tables.plot(plans, "title", tmp_path / "plan.png")
    assert [ends[place] for place in range(len(plans))] == pytest.approx([plan.step_time_s for plan in plans])
    assert plans[0].sizes == GridSizes()
