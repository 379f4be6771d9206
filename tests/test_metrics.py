"""What the console says of a step."""

from gpt4d import metrics


def used(exposed, hidden):
    return {"bytes": 1.0, "exposed_s": exposed, "hidden_s": hidden}


def test_the_line_of_a_step_says_what_was_computed_what_was_hidden_and_what_was_waited_for():
    values = {"step_time_s": 2.0, "comm": {"x": used(0.25, 0.5), "z": used(0.5, 0.0)}}
    assert metrics._where_time_went(values) == ("  computing 1.25 s, hidden 0.50 s, exposed 0.75 s (x 0.25, z 0.50)")


def test_one_device_has_nothing_to_say_of_communication():
    assert metrics._where_time_went({"step_time_s": 2.0, "comm": {}}) == ""
