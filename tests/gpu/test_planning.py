"""Check 11: the planner predicts the step time of check 6's best run from a calibration of this device."""

from dataclasses import asdict
from pathlib import Path

import pytest

from gpt4d.config import GridSizes, compose
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.planner import calibrate
from gpt4d.planner.estimate import Estimate
from gpt4d.validation import validate
from tests.gpu.check import Check
from tests.gpu.processes import in_process
from tests.gpu.runs import GPT_1B3, best_run

_ERROR = 0.2
# In a rehearsal the calibration only has to run.
_SHORT = {
    "MIN_MEASURED_S": 0.0,
    "ROUNDS": 1,
    "MATRIX_SIZE": {"cpu": 64},
    "ATTENTION_SHAPE": {"cpu": (1, 16, 2, 8)},
    "LARGE_MODEL": {"cpu": GPT2Config(layers=2, hidden=128, heads=4, vocab_size=128, max_positions=32)},
}


@pytest.mark.gpu(number=11, part=3, limit_s=130, functions=16, work_s=30)
def test_a_calibrated_planner_predicts_the_step_time(check: Check) -> None:
    best, path = best_run(check), check.directory / "here.yaml"
    in_process(_calibrate, path, check.rehearsal)
    batch = [f"train.batch_size={best['micro_batch']}", "train.precision=bf16", f"cluster={path}"]
    config = validate(compose([*GPT_1B3.overrides(check.rehearsal), *batch]), 1).config
    planned_s, measured_s = Estimate(config, GridSizes()).plan(best["micro_batch"]).step_time_s, best["step_time_s"]
    error = planned_s / measured_s - 1
    check.values = {"planned_s": planned_s, "measured_s": measured_s, "cluster": asdict(config.cluster)}
    check.figure = f"planned {planned_s * 1e3:.0f} ms, measured {measured_s * 1e3:.0f} ms ({error:+.0%})"
    check.require(abs(error) <= _ERROR or check.rehearsal, f"the planned step time is off by {error:+.0%}")


def _calibrate(path: Path, rehearsal: bool) -> None:
    if rehearsal:
        vars(calibrate).update(_SHORT)
    calibrate.main([f"out={path}"])
