"""Console line of a step, and the unit of the task in it and in metrics.jsonl."""

import math

import pytest
import torch
import torch.distributed as dist

from gpt4d import metrics
from gpt4d.config import Config
from gpt4d.runs.history import History
from gpt4d.validation import validate
from tests.support.grids import metric_lines


def comm(exposed, hidden):
    return {"bytes": 1.0, "exposed_s": exposed, "hidden_s": hidden}


def test_the_step_line_splits_time_into_compute_hidden_and_exposed():
    values = {"step_time_s": 2.0, "comm": {"x": comm(0.25, 0.5), "z": comm(0.5, 0.0)}}
    assert metrics.time_breakdown(values) == ("  compute 1.25 s, hidden 0.50 s, exposed 0.75 s (x 0.25, z 0.50)")


def test_one_device_prints_no_communication_times():
    assert metrics.time_breakdown({"step_time_s": 2.0, "comm": {}}) == ""


def test_perplexity_is_infinite_where_it_overflows_and_no_bytes_give_no_bits():
    assert metrics.of_loss(6.0, 3, None) == {"loss": 2.0}
    assert metrics.of_loss(6.0, 3, 2) == {"loss": 2.0, "perplexity": math.exp(2), "bits_per_byte": 3 / math.log(2)}
    values = metrics.of_loss(3e3, 3, 0)
    assert metrics.without_nan(values) == {"loss": 1e3, "perplexity": None, "bits_per_byte": None}
    assert {*metrics.without_nan(metrics.of_loss(math.nan, 3, 2)).values()} == {None}


def test_the_task_chooses_the_unit_of_the_step_line_and_of_the_history(tmp_path, capsys):
    logger = metrics.RunLogger(Config(), tmp_path, unit="images")
    logger.step({"step": 1, "loss": 2.0, "images": 64, "images_per_s": 1234.0, "step_time_s": 1.0, "comm": {}})
    logger.close()
    assert "loss 2.0000  1,234 images/s" in capsys.readouterr().out
    history = History(tmp_path)
    assert (history.unit, history.per_s, history.training[1].seen) == ("images", 1234.0, 64)


def train_and_note_timing(config, device_type):
    """Return for each step whether its collectives were timed, in a loop that believes it runs on a device."""
    from gpt4d.trainer import Trainer

    trainer = Trainer(validate(config, dist.get_world_size()), torch.device("cpu"))
    trainer.device = torch.device(device_type)
    original, timed = trainer._step, []

    def step(stop):
        timed.append({axis.traffic.timed for axis in trainer.stage.axes.values()})
        return original(stop)

    trainer._step = step
    trainer.run()
    return timed


@pytest.mark.parametrize(("device_type", "timed_steps"), [("cpu", [1, 2, 3, 4, 5, 6, 7]), ("meta", [3, 4, 6, 7])])
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
