"""Check 11: the planner predicts the step times of check 6, from a calibration of this device and without one."""

from dataclasses import asdict
from pathlib import Path

import pytest

from gpt4d.config import GridSizes
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.planner import calibrate
from gpt4d.planner.estimate import Estimate
from gpt4d.validation import validate
from tests.gpu.check import Check
from tests.gpu.processes import in_process
from tests.gpu.runs import GPT_1B3, measured_runs
from tests.support.settings import configured

_ERROR = 0.2
# In a rehearsal the calibration only has to run.
_SHORT = {
    "MIN_MEASURED_S": 0.0,
    "ROUNDS": 1,
    "MATRIX_SIZE": {"cpu": 64},
    "ATTENTION_SHAPE": {"cpu": (1, 16, 2, 8)},
    "LARGE_MODEL": GPT2Config(layers=2, hidden=128, heads=4, vocab_size=128, max_positions=32),
}


@pytest.mark.gpu(number=11, part=3, limit_s=130, work_s=60)
def test_the_planner_predicts_the_step_times(check: Check) -> None:
    measured, path = measured_runs(check), check.directory / "here.yaml"
    in_process(_calibrate, path, check.rehearsal)
    figures, rows = [], []
    for cluster in (str(path), "auto"):
        name = "cluster=auto" if cluster == "auto" else "calibrated"
        for run in measured:
            batch = [f"train.batch_size={run['micro_batch']}", "train.precision=bf16", f"cluster={cluster}"]
            config = validate(configured([*GPT_1B3.overrides(check.rehearsal), *batch]), 1).config
            planned_s = Estimate(config, GridSizes()).plan(run["micro_batch"]).step_time_s
            measured_s = run["step_time_s"]
            error = planned_s / measured_s - 1
            times = f"{planned_s * 1e3:.0f} ms planned, {measured_s * 1e3:.0f} ms measured ({error:+.1%})"
            figures.append(f"{name}, microbatch {run['micro_batch']}: {times}")
            check.require(abs(error) <= _ERROR or check.rehearsal, f"{figures[-1]}: the planned time is off")
            row = {"micro_batch": run["micro_batch"], "planned_s": planned_s, "measured_s": measured_s}
            rows.append(row | {"cluster": asdict(config.cluster)})
    check.values["predictions"] = rows
    check.figure = "; ".join(figures)


def _calibrate(path: Path, rehearsal: bool) -> None:
    if rehearsal:
        vars(calibrate).update(_SHORT)
    calibrate.main([f"out={path}"])
