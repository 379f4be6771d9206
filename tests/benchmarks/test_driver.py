"""The command ``python -m benchmarks``: it runs a benchmark's workers and writes results and a plot."""

import json

import pytest

from benchmarks.__main__ import main
from gpt4d.config import ConfigError


@pytest.mark.slow
def test_a_benchmark_writes_its_command_and_a_row_per_contender(tmp_path, capsys):
    arguments = ["checkpoint", "mib=64", "side=1024", "repeats=1", f"where={tmp_path}", f"out={tmp_path / 'results'}"]
    main(arguments)
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["command"] == " ".join(["python -m benchmarks", *arguments])
    assert "torch" in document["machine"]["versions"] and document["mib"] == 64
    assert {row["family"] for row in document["rows"]} == {"ours", "torch", "plain"}
    assert all(row["seconds"] == [row["median_s"]] for row in document["rows"])
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "load, rows to columns / load" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["speed"], ["report", "out=here"]])
def test_an_unknown_benchmark_is_one_line_with_all_names(arguments):
    with pytest.raises(ConfigError, match=r"not a benchmark; use one of atp, checkpoint, .*, unet"):
        main(arguments)
