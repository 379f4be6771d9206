"""The pipelines that are compared train alike, and the prediction of a step has all parts of its time."""

from dataclasses import replace

import pytest

from benchmarks.experiments import pipeline
from benchmarks.workloads import END, LAST, StagesConfig
from gpt4d.parallel.pipeline.simulation import Costs, orders_of, simulate
from tests.support.grids import full

CASE = pipeline.Settings(grid="2x1x1x2", microbatches=8)
LINK_S = 4 * 128 * 1024 * 4 * 8 / 200e6  # seconds of one microbatch's activations
TIED_S = 512 * 1024 * 4 * 8 / 200e6
WHOLE = {"F0": 1.0, "F1": 1.0, "B0": 2.0, "B1": 2.0}
ACTIONS = {**WHOLE, **{kind + LAST: seconds for kind, seconds in WHOLE.items()}, END: 0.5}


def losses(module, name, settings):
    """On a rank: the losses of three steps of a contender."""
    from benchmarks.adapters.gpt4d_stages import LinkGroups, StagedTraining
    from benchmarks.adapters.torch_stages import TorchPipeline

    config = StagesConfig(hosts=2, layers=4, hidden=16, heads=4, length=8, samples=4, microbatches=4, **settings)
    training = TorchPipeline(name, config) if module == "torch" else StagedTraining(name, config, LinkGroups(), None)
    seen = [training.step()()["loss"] for _ in range(3)]
    if module == "ours":
        training.stage.exchange.close()
    return seen


@pytest.mark.parametrize(
    ("name", "other"),
    [("1f1b/broadcast/waiting", "Schedule1F1B"), full("interleaved_1f1b/send_recv", "ScheduleInterleaved1F1B")],
)
def test_torchs_pipeline_trains_like_ours(ranks, name, other):
    settings = {"ranks": 2, "grid": "1x1x1x2"}
    ours = ranks.run(4, losses, "ours", name, settings)
    theirs = ranks.run(4, losses, "torch", other, settings)
    assert theirs == [pytest.approx(ours[0], rel=1e-5)] * 4 and ours[0][2] < ours[0][0]


def actions_on_virtual_devices():
    """On a rank: the seconds of the actions of a step over two stages."""
    from benchmarks.adapters.gpt4d_stages import LinkGroups, StagedTraining

    sizes = {"layers": 2, "hidden": 128, "heads": 4, "length": 32, "microbatches": 2}
    config = StagesConfig(hosts=2, ranks=1, grid="1x1x1x1", virtual=True, **sizes)
    device = config.virtual_device()
    with device:
        training = StagedTraining("zb_h1/signal", config, LinkGroups(), device)
        collect_results = training.step()
        device.synchronize()
    results = collect_results()
    training.stage.exchange.close()
    return results["actions_s"]


def test_the_times_of_all_actions_are_measured_on_virtual_devices(ranks):
    actions_s, others = ranks.run(2, actions_on_virtual_devices)
    assert actions_s == others  # the longest of all ranks
    kinds = {f"{kind}{stage}{last}" for kind in "FIW" for stage in range(2) for last in ("", LAST)}
    assert actions_s.keys() == {*kinds, END} and min(actions_s.values()) > 0


def test_a_predicted_step_has_actions_transfers_and_its_end():
    assert pipeline.predict(CASE, "1f1b/signal", ACTIONS) == pytest.approx(8 * 3 + 3 + 0.5)
    last = ACTIONS | {f"B1{LAST}": 2.7}
    assert pipeline.predict(CASE, "1f1b/signal", last) == pytest.approx(8 * 3 + 3 + 0.5 + 0.7)
    eager = pipeline.predict(CASE, "eager_1f1b/broadcast", ACTIONS)
    assert eager == pytest.approx(pipeline.predict(CASE, "eager_1f1b/signal", ACTIONS) + 2 * LINK_S)


def test_transfers_are_planned_at_the_rate_of_the_uplinks():
    for strategy, factor in (("broadcast", 1), ("send_recv", 2), ("signal", 0)):  # two devices of x need each tile
        edges, copies_s = pipeline.transfers(CASE, CASE.plan("1f1b"), strategy)
        assert edges == {(0, 1): pytest.approx(factor * LINK_S)}
        assert (min(copies_s) > 0) == (max(copies_s) > 0) == (strategy != "signal")
    alone = replace(CASE, grid="1x1x1x4")
    assert pipeline.transfers(alone, alone.plan("1f1b"), "broadcast")[1] == pytest.approx((TIED_S, TIED_S))


def test_a_step_waits_for_copied_weights_as_far_as_nothing_is_computed_meanwhile():
    """The first stage is done 2.5 s after the last one, which computes from 1.5 s on."""
    timeline = simulate(orders_of("1f1b", 2, 4, Costs.equal(2, 1, 1, 1, 0.5)), Costs.equal(2, 1, 1, 1, 0.5))
    spans = timeline.stages
    assert spans[0][-1].stop - spans[1][-1].stop == 2.5 and spans[1][0].start == 1.5
    assert pipeline.CopySeconds(2.5, 1.5).exposed(timeline) == 0
    assert pipeline.CopySeconds(3.0, 1.75).exposed(timeline) == 0.75


def row(family, name, seconds, **more):
    times = {"median_s": seconds, "min_s": seconds, "max_s": seconds, "busy_s": 1.0, "host_late_share": 0.0}
    return {"family": family, "name": name, **times, **more}


def test_rows_are_compared_with_signal_and_the_simulator():
    rows = [
        row("ours", "eager_1f1b/broadcast", 30.0),
        row("ours", "eager_1f1b/signal", 27.5, actions_s=ACTIONS),
        row("ours", "1f1b/broadcast/waiting", 40.0),
        row("torch", "Schedule1F1B", 36.0),
        {"family": "megatron-core", "name": "1F1B", "not_counted": 5},
    ]
    pipeline.add_predictions(CASE, rows)
    assert rows[0]["throughput_of_signal"] == pytest.approx(27.5 / 30)
    assert rows[1]["prediction_error"] == pytest.approx(0.0)
    assert "predicted_s" not in rows[2]
    assert pipeline.compare(rows)["torch Schedule1F1B"] == pytest.approx(1.2)
    of_signal, not_counted = pipeline.describe(rows[0]), pipeline.describe(rows[4])
    assert "91.7% of signal's throughput" in of_signal and "no run counts" in not_counted
    figure = pipeline.plot(CASE, {"cases": [{"rows": rows, "stages": 2, "grid": "2x1x1x2", "microbatches": 8}]})
    assert len(figure.axes) == 1
