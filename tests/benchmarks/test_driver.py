"""The command ``python -m benchmarks``: it runs a benchmark's workers and writes results and a plot."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from gpt4d.config import ConfigError

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
COMMAND = "python -m benchmarks "


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
    assert len(plotted) == 18
