"""Console line of a step, the unit of the task in it and in metrics.jsonl, and the plots of examples/plot_run.ipynb."""

import ast
import json
import math
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

from gpt4d.config import Config
from gpt4d.runs import logger
from gpt4d.runs.history import History
from tests.support.environment import REPOSITORY
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.training import before_each_step, build_trainer


def comm(exposed, hidden):
    return {"bytes": 1.0, "exposed_s": exposed, "hidden_s": hidden}


def test_the_step_line_splits_time_into_compute_hidden_and_exposed():
    values = {"step_time_s": 2.0, "comm": {"x": comm(0.25, 0.5), "z": comm(0.5, 0.0)}}
    assert logger.time_breakdown(values) == "  compute 1.25 s, hidden 0.50 s, exposed 0.75 s (x 0.25, z 0.50)"
    assert logger.time_breakdown({"step_time_s": 2.0, "comm": {}}) == ""


def test_perplexity_is_infinite_where_it_overflows_and_no_bytes_give_no_bits():
    assert logger.of_loss(6.0, 3, None) == {"loss": 2.0}
    assert logger.of_loss(6.0, 3, 2) == {"loss": 2.0, "perplexity": math.exp(2), "bits_per_byte": 3 / math.log(2)}
    values = logger.of_loss(3e3, 3, 0)
    assert logger.without_nan(values) == {"loss": 1e3, "perplexity": None, "bits_per_byte": None}
    assert {*logger.without_nan(logger.of_loss(math.nan, 3, 2)).values()} == {None}


def test_the_task_chooses_the_unit_of_the_step_line_and_of_the_history(tmp_path, capsys):
    config = Config()
    config.run.dir = str(tmp_path)
    log = logger.RunFiles(config, "images")
    log.open_log()
    log.step({"step": 1, "loss": 2.0, "images": 64, "images_per_s": 1234.0, "step_time_s": 1.0, "comm": {}})
    log.close()
    assert "loss 2.0000  1,234 images/s" in capsys.readouterr().out
    history = History(tmp_path)
    assert (history.unit, history.per_s, history.training[1].seen) == ("images", 1234.0, 64)


def train_and_note_timing(config, device_type):
    """Return for each step whether its collectives were timed, in a loop that believes it runs on a device."""
    trainer, timed = build_trainer(config), []
    trainer.device = torch.device(device_type)
    axes = trainer.stage.axes.values()
    with before_each_step(trainer, lambda step: timed.append({axis.traffic.timed for axis in axes})):
        trainer.run()
    return timed


@pytest.mark.parametrize(("device_type", "timed_steps"), [full("cpu", [1, 2, 3, 4, 5, 6, 7]), ("meta", [3, 4, 6, 7])])
def test_a_gpu_times_collectives_only_in_the_last_step_before_a_report_and_in_profiled_steps(
    ranks, tiny, device_type, timed_steps
):
    config = tiny("parallel.gz=2", "train.steps=7", "logging.every=3", "profile.steps=4")
    for timed in ranks.run(2, train_and_note_timing, config, device_type):
        assert [step for step, values in enumerate(timed, start=1) if values == {True}] == timed_steps
        assert all(len(values) == 1 for values in timed)
    assert [line["step"] for line in metric_lines(config.run.dir)] == [3, 6, 7]
    for line in metric_lines(config.run.dir):
        assert line["comm"]["z"]["bytes"] > 0 and 0 < line["comm"]["z"]["exposed_s"] < line["step_time_s"]


NOTEBOOK = json.loads((REPOSITORY / "examples/plot_run.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs_and_imports_only_matplotlib():
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])
    nodes = [node for node in ast.walk(ast.parse("\n".join(CELLS))) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {ast.unparse(node).split()[1].partition(".")[0] for node in nodes}
    assert names - sys.stdlib_module_names == {"matplotlib"}


def test_the_plots_show_the_metrics_of_a_run(ranks, tiny):
    config = tiny("parallel.gx=2", "train.steps=4", "train.validate_every=2")
    ranks.run(2, train_in_rank, config)
    run, names = Path(config.run.dir), {}
    matplotlib.use("Agg")
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"cell {number}", "exec"), names)
        names["run"] = run
    steps = metric_lines(run)
    losses, norms, speeds, waits = names["figure"].axes
    for axes, key in ((losses, "loss"), (norms, "grad_norm"), (speeds, "tokens_per_s"), (waits, "step_time_s")):
        line = axes.lines[0]
        assert list(line.get_xdata()) == [1, 2, 3, 4]
        assert list(line.get_ydata()) == pytest.approx([step[key] for step in steps])
    assert list(losses.lines[1].get_xdata()) == [2, 4]
    exposed = next(line for line in waits.lines if line.get_label().endswith(", x"))
    assert list(exposed.get_ydata()) == [step["comm"]["x"]["exposed_s"] for step in steps]
    plt.close(names["figure"])
