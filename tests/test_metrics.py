"""Console line of a step, and the unit of the task in it and in metrics.jsonl."""

from gpt4d import metrics
from gpt4d.config import Config


def comm(exposed, hidden):
    return {"bytes": 1.0, "exposed_s": exposed, "hidden_s": hidden}


def test_the_step_line_splits_time_into_compute_hidden_and_exposed():
    values = {"step_time_s": 2.0, "comm": {"x": comm(0.25, 0.5), "z": comm(0.5, 0.0)}}
    assert metrics._time_breakdown(values) == ("  compute 1.25 s, hidden 0.50 s, exposed 0.75 s (x 0.25, z 0.50)")


def test_one_device_prints_no_communication_times():
    assert metrics._time_breakdown({"step_time_s": 2.0, "comm": {}}) == ""


def test_the_task_chooses_the_unit_of_the_step_line_and_of_the_plot(tmp_path, capsys):
    logger = metrics.RunLogger(Config(), tmp_path, unit="images")
    logger.step({"step": 1, "loss": 2.0, "images": 64, "images_per_s": 1234.0, "step_time_s": 1.0, "comm": {}})
    logger.close()
    assert "loss 2.0000  1,234 images/s" in capsys.readouterr().out
    assert metrics.plot_losses(tmp_path, unit="images").stat().st_size > 0
