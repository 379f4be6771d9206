"""An error of memory on one rank ends the job with a line that names the layer and the settings that fit."""

import functools

import pytest
import torch

from gpt4d.training.out_of_memory import MemoryWatch, is_out_of_memory
from gpt4d.validation import validate
from tests.support.faults import at_step, shorten_timeouts
from tests.support.jobs import ended_job

HOST = "[enforce fail] DefaultCPUAllocator"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError(f"{HOST}: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError(f"{HOST}: not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("connection closed by peer"), False),
    ],
)
def test_errors_of_memory_are_recognized(error, expected):
    assert is_out_of_memory(error) == expected


def test_torchs_error_for_the_host_is_recognized():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)


def test_the_suggested_settings_need_less_than_was_planned(tiny):
    config = tiny()
    line = MemoryWatch(validate(config, 1), torch.device("cpu")).describe(MemoryError())
    assert line.startswith("out of memory in the start of the run (planned 0.4")
    assert ": set " in line and "(planned 0.4" in line.split(": set ")[1]


def exhaust(step, target, rank):
    """Raise torch's error in the forward of the last block on one rank."""
    shorten_timeouts()

    def fail(profile):
        module = profile.stage.module.get_submodule("blocks.1.mlp")
        original = type(module).__call__

        def call(self, *arguments):
            if self is module:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return original(self, *arguments)

        type(module).__call__ = call

    if rank == target:
        at_step(step, fail)


def test_one_rank_of_four_ends_all_with_its_layer_and_settings(ranks, tiny):
    config = tiny("parallel.gx=2", "parallel.gz=2", "train.steps=6")
    outputs = ended_job(ranks.context, config, [1, 1, 1, 1], functools.partial(exhaust, 3, 3)).outputs()
    line = outputs[0]
    assert "rank 3 on " in line and "failed: out of memory in blocks.1.mlp (planned " in line and ": set " in line, line
    assert "Traceback" not in "".join(outputs)
