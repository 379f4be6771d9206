"""profile.steps: complete files, named layers and collectives, and a run with unchanged results."""

import gzip
import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from matplotlib.image import imread

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.stats import CommStats
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.training import profiling
from gpt4d.training.profiling import LayerSpan
from tests.support.grids import full, metric_lines, on_grid, train_in_rank
from tests.support.run_files import events
from tests.support.training import before_each_step, build_trainer, losses_and_norms

SHORT = ("train.steps=4", "train.batch_size=8", "train.micro_batch_size=2")
RECOMPUTED = "train.activation_checkpointing=full"
INNERMOST = ["attention_norm", "attention.qkv", "attention.core", "attention.output", "mlp_norm", "mlp.up", "mlp.down"]


@pytest.fixture
def single_device():
    """Process group of a run on one device, inside the test process."""
    with process_group(Launch(), torch.device("cpu")):
        yield


def traces(config) -> list[str]:
    """Return the paths of the files under traces/."""
    directory = Path(config.run.dir) / "traces"
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def named_ranges(config, file: str) -> list[tuple[str, float, float]]:
    """Return (name, start, stop) of the ranges that gpt4d named in a trace, by start time."""
    with gzip.open(Path(config.run.dir) / "traces" / file) as trace:
        events = json.load(trace)["traceEvents"]
    named = [e for e in events if e.get("cat") == "user_annotation"]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in named), key=lambda r: r[1])


def hooks(trainer) -> list:
    """Return the hooks a profiled step leaves on model and optimizer, and the axes with named collectives."""
    handles = [h for m in trainer.stage.module.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    optimizer = trainer.train_step.optimizer
    handles += [optimizer.around_step] if optimizer.around_step is not nullcontext else []
    return handles + [axis.name for axis in trainer.stage.grid if axis.traffic.named_range is not nullcontext]


@pytest.mark.parametrize("recompute", [(), full((RECOMPUTED,))], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("sizes", [GridSizes(1, 1, 2, 2), full(GridSizes(2, 2, 1, 1))], ids=str)
def test_a_profiled_run_has_equal_bits_and_named_traces_of_every_rank(ranks, tiny, sizes, recompute):
    words = (*SHORT, *on_grid(sizes), *recompute)
    plain, config = tiny(*words, "run.dir=" + tiny().run.dir + "-plain"), tiny(*words, "profile.steps=2-3")
    for each in (plain, config):
        ranks.run(4, train_in_rank, each)
    assert losses_and_norms(config) == losses_and_norms(plain)
    assert not (Path(plain.run.dir) / "traces").exists()

    files = [f"steps_00000002-00000003/rank_{rank:05d}.json.gz" for rank in range(4)]
    assert traces(config) == [*files, "steps_00000002-00000003/timeline.png"]
    assert imread(Path(config.run.dir) / "traces" / "steps_00000002-00000003" / "timeline.png").std() > 0.1

    collectives = {
        GridSizes(2, 2, 1, 1): {"all_reduce x", "all_reduce y", "all_gather y", "all_reduce world"},
        GridSizes(1, 1, 2, 2): {"all_gather z", "reduce_scatter z", "all_reduce data", "all_reduce z"},
    }[sizes]
    uses = 2 * 8 // sizes.batch_shards // 2  # steps times microbatches
    for file in files:
        names = [name for name, _, _ in named_ranges(config, file)]
        assert {"step 2", "step 3", "optimizer update"} <= set(names)
        assert collectives <= set(names) and {f"wait {name}" for name in collectives} <= set(names)
        assert not any(name.endswith((" x", " y")) for name in names) or sizes.x == 2
        for phase in ("forward", "backward", *(["recomputation"] if recompute else [])):
            for layer in ["blocks.0", *(f"blocks.1.{layer}" for layer in INNERMOST)]:
                assert names.count(f"{layer} {phase}") == uses, (layer, phase)
        for layer in ("tokens", "positions", "norm", "head"):
            assert names.count(f"{layer} forward") == names.count(f"{layer} backward") == uses
        assert recompute or not any(name.endswith("recomputation") for name in names)


def train_and_record_timeline(config):
    """Train, and return the arguments of each call of ``draw_timeline`` on this rank."""
    calls = []
    with patch.object(profiling, "draw_timeline", lambda path, *values: (path.touch(), calls.append(values))):
        train_in_rank(config)
    return calls


def test_the_timeline_shows_one_step_of_rank_0_with_every_axis(ranks, tiny):
    config = tiny(*SHORT, "parallel.gx=2", "parallel.gz=2", RECOMPUTED, "profile.steps=2-3")
    (calls, *others) = ranks.run(4, train_and_record_timeline, config)
    assert others == [[]] * 3
    ((title, seconds, spans, axes),) = calls
    assert "step 3 on grid 2x1x2x1" in title
    assert list(axes) == ["x", "z", "world"]
    assert {span.phase for span in spans} == {"forward", "recomputation", "backward", "update"}
    assert len([span for span in spans if span.name == "head"]) == 2 * 2, "two microbatches of one step"
    intervals = [(span.start, span.stop) for span in spans]
    for traffic in axes.values():
        assert traffic.run_intervals and traffic.wait_intervals
        intervals += traffic.wait_intervals
        assert all(0 <= start <= stop for start, stop in traffic.run_intervals)  # the end may be recorded late
    assert all(0 <= start <= stop <= seconds for start, stop in intervals)
    line = metric_lines(config.run.dir)[2]  # the same step: drawing it does not reset the counters
    for axis, traffic in axes.items():
        assert traffic.seconds()["exposed_s"] == pytest.approx(line["comm"][axis]["exposed_s"])
        assert line["comm"][axis]["bytes"] > 0


def test_a_block_range_contains_its_layers_and_its_recomputation(single_device, tiny):
    config = tiny("train.steps=1", RECOMPUTED, "profile.steps=1")
    build_trainer(config).run()
    ranges = {name: (start, stop) for name, start, stop in named_ranges(config, traces(config)[0])}

    def within(inner, outer):
        return ranges[outer][0] <= ranges[inner][0] and ranges[inner][1] <= ranges[outer][1]

    for phase in ("forward", "recomputation", "backward"):
        assert all(within(f"blocks.0.{layer} {phase}", f"blocks.0 {phase}") for layer in INNERMOST)
    assert within("blocks.1 recomputation", "blocks.1 backward")
    in_order = ["tokens forward", "blocks.0 forward", "blocks.1 forward", "head forward", "head backward"]
    in_order += ["blocks.1 backward", "blocks.0 backward", "tokens backward", "optimizer update"]
    for earlier, later in itertools.pairwise(in_order):
        assert ranges[earlier][1] <= ranges[later][0], (earlier, later)


def test_hooks_exist_only_during_profiled_steps(single_device, tiny):
    one, seen = build_trainer(tiny(*SHORT, "profile.steps=2-3")), []
    with before_each_step(one, lambda step: seen.append(bool(hooks(one)))):
        one.run()
    assert seen == [False, True, True, False]
    assert hooks(one) == []


@pytest.mark.parametrize("where", ["forward", full("backward")])
def test_a_failure_during_profiling_leaves_no_trace_and_no_hook(single_device, tiny, where):
    config = tiny(*SHORT, "profile.steps=2-3")
    one = build_trainer(config)
    failing, owner, name = one.stage.module.blocks["1"].mlp.up, one.train_step.runtime, "compute"
    if where == "backward":
        owner, name = one.stage.weights, "scatter"
    original = getattr(owner, name)

    def fail(*_):
        raise RuntimeError("broken")

    def broken(*arguments):
        if one.progress.step == 2 and where == "forward":
            failing.forward = fail
        return fail() if one.progress.step == 2 and arguments[0] is failing.weight else original(*arguments)

    setattr(owner, name, broken)
    with pytest.raises(RuntimeError, match="broken"):
        one.run()
    assert traces(config) == [] and hooks(one) == []

    again = tiny("train.steps=1", "profile.steps=1", "run.dir=" + config.run.dir + "-again")
    build_trainer(again).run()  # The profiler of this process can start again.
    assert len(traces(again)) == 2


def write_half_and_fail(_, path, *rest):
    Path(path).write_bytes(b"half of")
    raise OSError(28, "No space left on device")


def test_a_partially_written_file_is_removed_and_the_run_goes_on(single_device, tiny, capsys):
    config = tiny("train.steps=1", "profile.steps=1")
    with (
        patch.object(profiling.profile, "export_chrome_trace", write_half_and_fail),
        patch.object(profiling, "draw_timeline", lambda path, *rest: write_half_and_fail(None, path)),
    ):
        build_trainer(config).run()
    assert traces(config) == []
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [" No space left on device; free space" in line for line in warnings] == [True, True]
    assert "rank_00000.json.gz" in warnings[0] and "timeline.png" in warnings[1]


def test_a_resumed_run_profiles_the_rest_of_the_range_or_says_it_is_past(single_device, tiny, capsys):
    build_trainer(tiny("train.steps=2")).run()
    resumed = tiny("train.steps=4", "profile.steps=2-3")
    build_trainer(resumed).run()
    assert traces(resumed) == [f"steps_00000003-00000003/{file}" for file in ("rank_00000.json.gz", "timeline.png")]
    assert len(events(resumed.run.dir, "profile")) == 1
    capsys.readouterr()
    build_trainer(tiny("train.steps=5", "profile.steps=3")).run()
    assert "profile.steps=3: already past, resumed at step 4" in capsys.readouterr().out
    assert len(traces(resumed)) == 2
    beyond = tiny("train.steps=2", "profile.steps=2-99", "run.dir=" + resumed.run.dir + "-beyond")
    build_trainer(beyond).run()
    assert len(traces(beyond)) == 2 and traces(beyond)[0].startswith("steps_00000002-00000002/")


def test_an_inner_layer_covers_the_layer_that_contains_it():
    block, up = LayerSpan("blocks.0", "backward", 0.0, 10.0), LayerSpan("blocks.0.mlp.up", "backward", 1.0, 8.0)
    again = LayerSpan("blocks.0", "recomputation", 2.0, 5.0)
    up_again = LayerSpan("blocks.0.mlp.up", "recomputation", 3.0, 4.0)
    norm = LayerSpan("norm", "forward", 11.0, 12.0)
    outer, inner = profiling.lanes([norm, up_again, again, up, block])
    assert outer == [(block, 0.0, 2.0), (again, 2.0, 5.0), (block, 5.0, 10.0), (norm, 11.0, 12.0)]
    assert inner == [(up, 1.0, 3.0), (up_again, 3.0, 4.0), (up, 4.0, 8.0), (norm, 11.0, 12.0)]


def test_traffic_since_is_relative_to_its_origin_and_resets_nothing():
    runs = [(0.5, 2.0), (6.0, 9.0), (8.0, 9.0)]
    traffic = CommStats(bytes=8.0, wait_intervals=[(1.0, 2.0), (7.0, 9.5)], run_intervals=runs)
    since = traffic.since(5.0)
    assert since.wait_intervals == [(2.0, 4.5)] and since.run_intervals == [(1.0, 4.0), (3.0, 4.0)]
    # The wait outlasted its collective by half a second; only the second before the wait was hidden.
    assert since.seconds() == {"exposed_s": 2.5, "hidden_s": 1.0}
    assert traffic.read() == {"bytes": 8.0, "exposed_s": 3.5, "hidden_s": 1.5}


@pytest.mark.parametrize("recompute", [full(()), (RECOMPUTED,)], ids=["plain", "checkpointed"])
def test_with_chunks_each_turn_of_a_layer_is_named_and_no_ranges_cross(single_device, tiny, recompute):
    config = tiny("train.steps=1", "parallel.chunks=2", "model.dropout=0.1", "profile.steps=1", *recompute)
    drawn = train_and_record_timeline(config)
    ((_, _, spans, _),) = drawn
    assert {"blocks.0", "blocks.1"} <= {span.name for span in spans if span.phase == "backward"}
    ranges = named_ranges(config, traces(config)[0])
    names = [name for name, _, _ in ranges]
    for layer in ("attention.qkv", "mlp.down"):
        turns = names.count(f"blocks.0.{layer} forward")
        assert turns >= 4 and turns % 2 == 0, "at least two turns of each of two chunks"
    open_until = []
    for name, start, stop in ranges:
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or stop <= open_until[-1] + 1, f"{name} ends after the range it began in"
        open_until.append(stop)
