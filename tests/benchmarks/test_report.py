import json

import pytest

from benchmarks import report
from benchmarks.experiments.overhead import ratio
from benchmarks.settings import parse_grids
from gpt4d.config import ConfigError

ANSWERS = [
    {"seconds": 3.0, "loss": 6.0, "exposed_s": {"x": 0.1, "z": 1.0}},
    {"seconds": 1.0, "loss": 5.0, "exposed_s": {"x": 0.3, "z": 0.2}},
    {"seconds": 2.0, "loss": 4.0, "exposed_s": {"x": 0.2, "z": 0.4}},
]


def test_a_row_contains_median_spread_repeats_and_last_loss():
    assert report.row("ours", "2x1x1x1", ANSWERS) == {
        "family": "ours",
        "name": "2x1x1x1",
        "median_s": 2.0,
        "min_s": 1.0,
        "max_s": 3.0,
        "seconds": [3.0, 1.0, 2.0],
        "loss": 4.0,
        "exposed_s": {"x": 0.2, "z": 0.4},
    }


def virtual_answer(seconds: float, cpu_bound: bool) -> dict:
    return {"seconds": seconds, "busy_s": 0.5, "host_late_share": 0.01 * seconds, "cpu_bound": cpu_bound}


def test_runs_in_which_the_processor_was_the_bottleneck_do_not_count():
    answers = [virtual_answer(1.0, False), virtual_answer(9.0, True), virtual_answer(2.0, False)]
    some = report.row("ours", "2x1x1x1", answers)
    assert some == {
        "family": "ours",
        "name": "2x1x1x1",
        "not_counted": 1,
        "median_s": 1.5,
        "min_s": 1.0,
        "max_s": 2.0,
        "seconds": [1.0, 2.0],
        "busy_s": 0.5,
        "host_late_share": 0.015,
    }
    none = report.row("torch", "DDP2", [virtual_answer(9.0, True)])
    assert none == {"family": "torch", "name": "DDP2", "not_counted": 1}
    assert report.counting([some, none]) == [some]
    assert "runs not counted: 1" in report.line(some) and "no run counts" in report.line(none)
    (axes,) = report.bars([some, none], "title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours 2x1x1x1"]


def test_ratio_compares_steps_of_the_same_repetition():
    # A machine that slows to a third midway changes both medians but not the ratio.
    assert ratio({"seconds": [1.1, 1.1, 3.3]}, {"seconds": [1.0, 1.0, 3.0]}) == pytest.approx(1.1)


def test_written_json_contains_command_machine_and_settings(tmp_path):
    rows = [report.row("ours", "2x1x1x1", ANSWERS), report.row("torch", "DDP8", [{"seconds": 2.5, "loss": 4.0}])]
    out = tmp_path / "results" / "figures"
    report.write(out, "python -m it", report.machine("torch", "no-such-package"), rows=rows, batch=8)
    written = json.loads(out.with_suffix(".json").read_text())
    assert written["command"] == "python -m it" and written["batch"] == 8 and written["rows"] == rows
    assert written["machine"]["cores"] and set(written["machine"]["versions"]) == {"python", "torch"}


def test_a_grid_that_does_not_use_all_ranks_is_rejected():
    assert parse_grids("4x1x1x2,1x1x8x1", devices=8) == ("4x1x1x2", "1x1x8x1")
    for wrong in ("4x1x1x1", "2x2x2", "axbxcxd", "", "4x1x1x2/chunk=2", "4x1x1x2/chunks=two"):
        with pytest.raises(ConfigError, match="grids="):
            parse_grids(wrong, devices=8)
