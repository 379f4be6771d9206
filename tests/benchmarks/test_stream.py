"""The comparison of streams with token files."""

import pytest

from benchmarks.experiments import stream


def test_the_runs_alternate_and_the_ratio_is_of_medians_without_the_first_runs(monkeypatch, capsys):
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
