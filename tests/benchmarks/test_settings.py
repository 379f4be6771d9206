"""Settings of benchmarks, their mistakes, and the command ``python -m benchmarks``, which writes results and a plot."""

import json
import math
from importlib import import_module
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks import settings
from benchmarks.__main__ import main
from benchmarks.experiments import context, moe, one_device, overlap, peers, pipeline, planner
from benchmarks.experiments.planner import rank_grids, select_grids
from benchmarks.workloads import StagesConfig
from gpt4d.config import ConfigError, GridSizes, from_arguments, read_cluster
from gpt4d.planner.device import Links

CASE = pipeline.Settings(grid="2x1x1x2", microbatches=8)
MISTAKES = {  # values that a function rejects, and its message
    "cases={}: not a grid": (
        lambda text: pipeline.parse_cases(text, CASE), ("2x1x1x2", "2x2x2x2:8", "2x1x1x2:0", "x:8"),
    ),
    "contenders={}: not a schedule/strategy": (
        pipeline.parse_contenders, ("eager", "2f2b/broadcast", "gpipe/waiting", "gpipe/broadcast/late"),
    ),
    "grids={}:": (
        lambda text: settings.parse_grids(text, devices=8),
        ("4x1x1x1", "2x2x2", "axbxcxd", "", "4x1x1x2/chunk=2", "4x1x1x2/chunks=two"),
    ),
    "cases={}: not a list of vocabulary:precision": (one_device.parse_cases, ("8192", "8192:fp16", "0:fp32", "all")),
    "grids={}: not a grid gx·gy·gz·gdata of 8 ranks": (lambda text: [*moe.run(moe.Settings(grids=text))], ("1x1x4x1",)),
    "exchanges={}: must be a list of all_gather, ring": (
        lambda text: [*context.run(context.Settings(exchanges=text))], ("tree",),
    ),
    "out={}: empty; give a value, or leave it out for benchmarks/results/one_d": (
        lambda text: from_arguments(one_device.Settings, [f"out={text}"]), ("",),
    ),
}  # fmt: skip
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
COMMAND = "python -m benchmarks "


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_in_an_argument_is_reported_before_the_benchmark_runs(message):
    read, values = MISTAKES[message]
    for text in values:
        with pytest.raises(ConfigError) as error:
            read(text)
        assert str(error.value).startswith(message.format(text)) and "\n" not in str(error.value)


def test_cases_contenders_and_grids_are_parsed_and_every_schedule_has_its_bound():
    assert pipeline.parse_cases("2x1x1x2:8,1x1x1x4:32", CASE) == [("2x1x1x2", 8), ("1x1x1x4", 32)]
    assert pipeline.parse_contenders("gpipe/broadcast") == ["gpipe/broadcast", "gpipe/signal"]
    assert len(pipeline.parse_contenders("all")) == 6 * 5 + 2
    assert settings.parse_grids("4x1x1x2,1x1x8x1", devices=8) == ("4x1x1x2", "1x1x8x1")


@pytest.mark.parametrize("schema", [overlap.Settings, peers.Settings, planner.Settings])
def test_virtual_devices_have_other_defaults_which_arguments_override(schema):
    cores, virtual = settings.read_settings(schema, []), settings.read_settings(schema, ["virtual=true"])
    assert (cores.mbit, cores.repeats, cores.out, cores.virtual_device()) == (400, 5, schema.out, None)
    assert (virtual.mbit, virtual.repeats, virtual.warm_up, virtual.out) == (200, 3, 1, f"{schema.out}_virtual")
    chosen = settings.read_settings(schema, ["virtual=true", "mbit=1000", "repeats=1", "out=here"])
    assert (chosen.mbit, chosen.repeats, chosen.out) == (1000, 1, "here")


def test_a_worker_reads_the_settings_of_its_benchmark():
    config = settings.read_settings(peers.Settings, ["virtual=true", "flops=1e9", "launch_us=7", "ranks=2"])
    worker = from_arguments(settings.WorkerConfig, list(config.worker_arguments(["4x1x1x1", "1x1x1x4/sharded"])))
    assert worker.grids == "4x1x1x1,1x1x1x4/sharded"
    device, expected = worker.virtual_device(), config.virtual_device()
    for part in ("operations", "links"):
        simple = {k: v for k, v in vars(getattr(expected, part)).items() if isinstance(v, (int, float))}
        assert simple and simple.items() <= vars(getattr(device, part)).items()
    assert device.operations.flops == 1e9 and device.operations.launch_s == 7e-6 and device.links.ranks_per_host == 2
    stages = pipeline.Settings(hosts=2, hidden=512, repeats=7)
    read = from_arguments(StagesConfig, [*settings.arguments_of(stages, StagesConfig, contenders="1f1b/signal")])
    assert (read.hidden, read.repeats, read.steps, read.flops) == (512, 7, None, stages.flops)
    assert read.contenders == "1f1b/signal"


def test_ranks_send_inside_a_host_at_a_multiple_of_their_share_of_the_uplink():
    assert settings.DeviceConfig(mbit=200, ranks=4).intra_host_mb_s == 75
    assert settings.DeviceConfig(intra_host_ratio=0).intra_host_mb_s is None


@pytest.mark.parametrize("ratio, inside", [(12, 75e6), (0, math.inf)])
def test_the_planner_is_given_the_rates_of_links_and_devices(tmp_path, ratio, inside):
    config = planner.Settings(virtual=True, mbit=200, intra_host_ratio=ratio)
    OmegaConf.save(settings.plain_rates(config), path := tmp_path / "cluster.yaml")
    cluster = read_cluster(path)
    speeds = Links(cluster, GridSizes(4, 1, 2, 1)).speeds
    assert 1 / speeds["all_gather", "z"].s_per_byte == pytest.approx(25e6 / 4)  # four groups share an uplink
    assert speeds["all_reduce", "x"].s_per_byte == pytest.approx(1 / inside)
    assert (cluster.matmul_tflops, cluster.memory_gb_s, cluster.operation_us) == (0.02, 1000, 20)
    assert len(rank_grids(path, config)["ours"]) == 20


def test_many_grids_are_represented_by_the_first_six_and_six_of_the_rest():
    assert select_grids(few := [str(n) for n in range(20)]) == few
    selected = select_grids([str(n) for n in range(35)])
    assert selected[:6] == [str(n) for n in range(6)]
    assert len(set(selected)) == 12 and selected[6] == "6" and selected[-1] == "34"


def test_the_name_of_a_grid_says_all_its_settings():
    names = "4x1x2x1/replicated=1", "2x4x1x1/chunks=4/tokens/yx", "1x8x1x1/repeated-heads", "1x1x8x1/context=8/ring"
    for name in ("4x1x2x1", *names):
        case = settings.parse_grid(name)
        assert settings.grid_name(case.sizes, case.parallel) == name
    assert settings.parse_grid("1x1x1x8/sharded").sharded


@pytest.mark.slow
def test_a_benchmark_writes_its_command_and_a_row_per_contender(tmp_path, capsys):
    sizes = ["ranks=1", "mib=16", "side=1024", "repeats=1"]
    arguments = ["checkpoint", *sizes, f"where={tmp_path}", f"out={tmp_path / 'results'}"]
    main(arguments)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["command"] == " ".join(["python -m benchmarks", *arguments])
    assert "torch" in document["machine"]["versions"] and document["mib"] == 16
    assert {row["family"] for row in document["rows"]} == {"ours", "torch", "plain"}
    assert all(row["seconds"] == [row["median_s"]] for row in document["rows"])
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "load, rows to columns / load" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["speed"], ["report", "out=here"]])
def test_an_unknown_benchmark_is_one_line_with_all_names(arguments):
    with pytest.raises(ConfigError, match=r"(not a|no) benchmark.*; use one of atp, checkpoint, .*, unet"):
        main(arguments)


def test_stored_results_have_the_format_that_plots_read():
    documents = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    plotted = set()
    for document in documents:
        if document["command"].startswith(COMMAND):
            name, *_ = document["command"].removeprefix(COMMAND).split()
            benchmark = import_module(f"benchmarks.experiments.{name}")
            if hasattr(benchmark, "plot") and benchmark.plot(benchmark.Settings(), document):
                plotted.add(name)
    assert len(plotted) == 19
