"""examples/plot_run.ipynb plots the metrics of a run, without Jupyter."""

import ast
import json
import sys
from pathlib import Path

import matplotlib
import pytest

from tests.support.grids import metric_lines, train_in_rank

NOTEBOOK = json.loads((Path(__file__).resolve().parents[1] / "examples/plot_run.ipynb").read_text(encoding="utf-8"))
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
    import matplotlib.pyplot as plt

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
