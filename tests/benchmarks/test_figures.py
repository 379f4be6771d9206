"""The figures that benchmarks state follow from the rows of their contenders, and the values of runs."""

import json
from dataclasses import fields, replace

import pytest

from benchmarks import report
from benchmarks.experiments import atp, moe_quality, muon, one_device, optimizers, overhead, stream
from benchmarks.training import train_together, validations
from gpt4d.model.llama import RotaryConfig
from tests.support.settings import configured

ANSWERS = [
    {"seconds": 3.0, "loss": 6.0, "exposed_s": {"x": 0.1, "z": 1.0}},
    {"seconds": 1.0, "loss": 5.0, "exposed_s": {"x": 0.3, "z": 0.2}},
    {"seconds": 2.0, "loss": 4.0, "exposed_s": {"x": 0.2, "z": 0.4}},
]
PREDICTED = {"8x1": 10.0, "4x2": 8.0, "2x4": 9.0}
ADAMW = [{"step": 10 * n, "seconds": 2.0 * n, "loss": 6.0 - n} for n in range(1, 4)]
MUON = [{"step": 10 * n, "seconds": 3.0 * n, "loss": 6.0 - 2 * n} for n in range(1, 4)]


def test_a_row_contains_median_spread_repeats_and_last_loss():
    times = {"median_s": 2.0, "min_s": 1.0, "max_s": 3.0, "seconds": [3.0, 1.0, 2.0]}
    expected = {"family": "ours", "name": "2x1x1x1", **times, "loss": 4.0, "exposed_s": {"x": 0.2, "z": 0.4}}
    assert report.row("ours", "2x1x1x1", ANSWERS) == expected


def test_runs_in_which_the_processor_was_the_bottleneck_do_not_count():
    def answer(seconds: float, cpu_bound: bool) -> dict:
        return {"seconds": seconds, "busy_s": 0.5, "host_late_share": 0.01 * seconds, "cpu_bound": cpu_bound}

    some = report.row("ours", "2x1x1x1", [answer(1.0, False), answer(9.0, True), answer(2.0, False)])
    times = {"median_s": 1.5, "min_s": 1.0, "max_s": 2.0, "seconds": [1.0, 2.0]}
    assert some == {"family": "ours", "name": "2x1x1x1", "not_counted": 1, **times} | {
        "busy_s": 0.5, "host_late_share": 0.015,
    }  # fmt: skip
    none = report.row("torch", "DDP2", [answer(9.0, True)])
    assert none == {"family": "torch", "name": "DDP2", "not_counted": 1}
    assert report.counting([some, none]) == [some]
    assert "runs not counted: 1" in report.line(some) and "no run counts" in report.line(none)
    (axes,) = report.bars([some, none], "title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours 2x1x1x1"]


def test_written_json_contains_command_machine_and_settings(tmp_path):
    rows = [report.row("ours", "2x1x1x1", ANSWERS), report.row("torch", "DDP8", [{"seconds": 2.5, "loss": 4.0}])]
    out = tmp_path / "results" / "figures"
    report.write(out, "python -m it", report.machine("torch", "no-such-package"), rows=rows, batch=8)
    written = json.loads(out.with_suffix(".json").read_text())
    assert written["command"] == "python -m it" and written["batch"] == 8 and written["rows"] == rows
    assert written["machine"]["cores"] and set(written["machine"]["versions"]) == {"python", "torch"}


def test_ratio_compares_steps_of_the_same_repetition():
    # A machine that slows to a third midway changes both medians but not the ratio.
    assert overhead.ratio({"seconds": [1.1, 1.1, 3.3]}, {"seconds": [1.0, 1.0, 3.0]}) == pytest.approx(1.1)


def test_the_planners_mesh_and_its_gain_over_the_first_without_meshes_whose_runs_do_not_count():
    comparison = atp.compare(list(PREDICTED), "8x1", {"8x1": 12.0, "4x2": 10.0, "2x4": 8.0}, PREDICTED)
    assert (comparison["best"], comparison["chosen"], comparison["chosen_over_best"]) == ("2x4", "4x2", 1.25)
    assert comparison["gain"] == pytest.approx(0.5) and comparison["predicted_gain"] == pytest.approx(10 / 9 - 1)
    comparison = atp.compare(list(PREDICTED), "8x1", {"4x2": 10.0}, PREDICTED)
    assert comparison == {"best": "4x2", "chosen": "4x2", "chosen_over_best": 1.0}
    assert atp.compare(list(PREDICTED), "8x1", {}, PREDICTED) == {}


def test_gains_of_chunks_are_over_the_best_mesh_and_over_no_overlap():
    seconds = {"4x2": 10.0, "4x2/chunks=4": 8.0, "4x2/waiting-sums": 12.0}
    best = {1: {"best": "4x2"}, 4: {"best": "4x2/chunks=4"}}
    gains = atp.gains_of_chunks("4x2/waiting-sums", best, seconds)
    assert gains == pytest.approx({"gain": 0.25, "gain_over_waiting_sums": 0.5})
    assert atp.gains_of_chunks("4x2/waiting-sums", {1: {}, 4: best[4]}, seconds) == {}


def test_a_loss_between_two_validations_is_interpolated():
    assert optimizers.crossing(MUON, 3.0) == {"step": 15, "seconds": 4.5}
    assert optimizers.crossing(ADAMW, 1.0) is None


def test_shares_of_muons_run_compare_with_the_end_of_adamws_run():
    found = optimizers.summary({"adamw": [ADAMW], "muon": [MUON]})
    assert found["medians"] == {"steps": pytest.approx(0.5), "seconds": pytest.approx(0.75)}


def test_an_update_takes_the_time_that_adamws_step_does_not_take():
    rows = [
        {"name": f"{grid} {variant}", "median_s": scale * seconds, "update_exposed_s": {"stage": 0.5, "data": 0.1}}
        for grid, scale in (("1x1x8x1", 7.0), ("4x1x2x1", 1.0))
        for variant, seconds in (("adamw", 8.0), ("muon", 12.0), ("duplicated", 40.0))
    ]
    figures = {"muon_s": 4.0, "duplicated_s": 32.0, "ratio": 0.125, "muon_share": 4 / 12, "duplicated_share": 0.8}
    assert muon.update("4x1x2x1", rows) == pytest.approx(figures | {"exposed_share": 0.05})


def test_ours_is_compared_with_the_best_of_the_others():
    contenders = ("ours", "eager", 120.0, 30.0), ("torch", "eager", 80.0, 60.0), ("transformers", "compiled", 100.0, 50)
    rows = [dict(zip(("family", "name", "tokens_per_s", "peak_mib"), row, strict=True)) for row in contenders]
    expected = {"tokens_per_s_over_best": 1.2, "peak_over_torch_nn": 0.5}
    assert one_device.compare(rows, "tokens_per_s") == pytest.approx(expected)
    assert one_device.compare(rows[:1], "tokens_per_s") == {}


def test_seconds_of_a_validation_are_the_seconds_of_the_steps_before_it():
    lines = [
        {"event": "start", "step": 0},
        {"step": 1, "step_time_s": 0.5, "loss": 9.0},
        {"step": 2, "step_time_s": 0.25, "loss": 8.0},
        {"event": "validation", "step": 2, "loss": 8.5, "bits_per_byte": 3.0},
        {"step": 3, "step_time_s": 1.0, "loss": 7.0},
        {"event": "validation", "step": 3, "loss": 7.5},
    ]
    first = {"step": 2, "seconds": 0.75, "loss": 8.5, "bits_per_byte": 3.0}
    assert validations(lines) == [first, {"step": 3, "seconds": 1.75, "loss": 7.5}]


def test_the_summary_has_the_medians_of_the_last_validations():
    finals = {"mixture": (3.0, 5.0, 4.0), "dense": (6.0, 8.0, 9.0)}
    runs = {
        name: [{"processor_s": 2 * loss, "curve": [{"loss": 10.0}, {"loss": loss}]} for loss in losses]
        for name, losses in finals.items()
    }
    found = moe_quality.summary(runs)
    assert found["mixture"] == {"losses": [3.0, 5.0, 4.0], "medians": {"loss": 4.0, "processor_s": pytest.approx(8.0)}}
    assert found["dense"]["medians"]["loss"] == 8.0


def test_streams_alternate_with_token_files_and_the_ratio_is_of_medians_without_first_runs(monkeypatch, capsys):
    seconds = iter([9.0, 99.0, 50.0, 4.0, 2.0, 5.0, 4.0, 60.0, 4.0])  # first the run that trains the tokenizer
    streams = []

    def train(directory, name, steps, *overrides):
        streams.append("data.stream=true" in overrides)
        return {"seconds": next(seconds), "tokens": 100}

    monkeypatch.setattr(stream, "train", train)
    (results,) = stream.run(stream.Settings(repeats=3))
    assert streams == [False, *[True, False] * 4]
    assert [row["seconds"] for row in results["rows"]] == [[4.0, 5.0, 60.0], [2.0, 4.0, 4.0]]
    assert results["ratio"] == pytest.approx(4 / 5)
    assert "stream / token files: 0.800" in capsys.readouterr().out


def test_the_dense_model_is_the_llama_of_the_experts_that_a_token_uses():
    mixture, dense = (configured(moe_quality.MODELS[name]) for name in ("mixture", "dense"))
    inner = mixture.model.experts_per_token * mixture.model.inner
    shared = {each.name: getattr(mixture.model, each.name) for each in fields(RotaryConfig)}
    assert replace(dense.model, **shared | {"inner": inner, "name": dense.model.name}) == dense.model
    assert (dense.train, dense.data, dense.optim) == (mixture.train, mixture.data, mixture.optim)


def test_active_parameters_differ_by_the_routers_alone():
    mixture, dense = moe_quality.sizes("mixture"), moe_quality.sizes("dense")
    assert dense["parameters"] == dense["active_parameters"]
    layers, hidden, experts = 2, 128, 8
    assert mixture["active_parameters"] - dense["active_parameters"] == layers * hidden * experts


@pytest.mark.slow
def test_a_model_that_does_not_train_is_named(tmp_path):
    with pytest.raises(RuntimeError, match=r"train.py failed: first, second$"):
        train_together({tmp_path / name: ["train.steps=-1"] for name in ("first", "second")})
