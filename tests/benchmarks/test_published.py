"""Published runs of other trainers: their rows, the halves of the scoreboard, and their plans."""

import json
from collections import Counter

import pytest

from benchmarks.experiments.published import FIT, Settings, errors, halves, plot, run
from benchmarks.machines import machine_of
from benchmarks.published import ROWS, mfu_table, mfu_text, planned, read_rows
from gpt4d.config import CONFIG_DIR, ConfigError, read_cluster
from gpt4d.planner.published import TABLE

PLANNED = "megatron_seqsel_175b_seqsel", "mosaic_7b_8_h100", "torchtitan_8b_8_cp2", "atp_M3_ic4", "nemo2511_8b_b200"


def rows_by_id() -> dict[str, dict]:
    return {row["id"]: row for row in read_rows(ROWS)}


def test_every_published_row_has_its_own_id_a_source_and_how_it_was_checked():
    rows = read_rows(ROWS)
    assert len({row["id"] for row in rows}) == len(rows) >= 120
    assert all(row["source"] and row["source_checked"] and row["hardware"] for row in rows)


def test_halves_have_equally_many_rows_of_each_machine_in_any_order_of_the_rows():
    rows = read_rows(ROWS)
    found = halves(rows)
    counts = Counter((row["hardware"], found[row["id"]]) for row in rows)
    for machine in {row["hardware"] for row in rows}:
        assert counts[machine, FIT] - counts[machine, "test"] in (0, 1)
    assert halves(rows[::-1]) == found


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_of_a_published_run_has_its_devices_and_microbatch(name):
    row = rows_by_id()[name]
    plan = planned(row)
    assert plan.devices == row["gpus"]
    assert plan.micro_batch == row["micro_batch"]
    assert 0.5 < plan.step_time_s / row["step_s"] < 1.5


def test_a_file_of_rows_gives_planned_and_published_seconds_and_reasons(tmp_path, capsys):
    known = rows_by_id()
    unknown = known["maxtext_llama2_70b_v5p"]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [known["mosaic_7b_8_h100"], known["atp_M2_ic3"], unknown]}))
    (results,) = run(Settings(rows=str(file), mfu=str(tmp_path / "mfu.yaml")))
    assert (tmp_path / "mfu.yaml").read_text() == mfu_text(read_rows(str(file)))
    assert [row["id"] for row in results["rows"]] == ["mosaic_7b_8_h100", "atp_M2_ic3"]
    assert results["rows"][0]["published_s"] == known["mosaic_7b_8_h100"]["step_s"]
    assert [row["id"] for row in results["unplanned"]] == [unknown["id"]]
    assert results["errors"] == errors(results["rows"])
    assert "not planned: no step time is published" in capsys.readouterr().out
    assert plot(Settings(), results) is not None


def test_a_file_without_rows_is_an_error_in_one_line(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"^rows=.*: not a file of published runs"):
        read_rows(str(file))


def test_machines_sustain_less_than_their_cluster_files_estimate():
    known = rows_by_id()
    full, limited = (machine_of(known[name]) for name in ("mosaic_7b_8_h100", "torchtitan_8b_8_bf16_compile"))
    estimate = read_cluster(CONFIG_DIR / "cluster" / "dgx_h100.yaml")
    assert full.matmul_tflops < estimate.matmul_tflops
    assert [level.group_gb_s for level in full.levels] < [level.group_gb_s for level in estimate.levels]
    assert limited.matmul_tflops < full.matmul_tflops  # 500 of 700 W
    assert limited.memory_gb_s < full.memory_gb_s  # HBM2e
    assert machine_of(known["maxtext_llama2_70b_v5p"]) is None


def test_the_planners_table_of_published_mfu_follows_from_the_rows():
    assert TABLE.read_text(encoding="utf-8") == mfu_text(read_rows(ROWS))


def test_tabulated_mfu_is_the_mfu_that_sources_state_and_mixtures_and_float8_are_left_out():
    known = rows_by_id()
    row = known["mosaic_1b_512_h100"]
    (entry,) = mfu_table([row] * 3)
    assert (entry["gpu"], entry["peak_tflops"], entry["billions"], entry["runs"]) == ("H100", 989, [1, 4], 3)
    assert entry["mfu"] == pytest.approx([row["published"]["mfu"]] * 2, rel=0.01)
    rows = [{**row, "step_s": row["step_s"] / speed} for speed in (1, 2, 3, 4, 5)]
    assert mfu_table(rows)[0]["mfu"] == pytest.approx([2 * entry["mfu"][0], 4 * entry["mfu"][0]], rel=0.01)
    mixture = {**known["nemo2511_qwen3_30b_h100_fp8"], "precision": "bf16"}
    others = {**row, "precision": "fp8"}, mixture, known["atp_M4_ic4"]
    assert mfu_table(2 * [row]) == [] and all(mfu_table(3 * [other]) == [] for other in others)
