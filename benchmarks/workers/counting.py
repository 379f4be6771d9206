"""Our training step on 1×n×1×1, with and without counting the collectives: two contenders in the same processes."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.interleave import redirect_stdout_for_answers, serve
from benchmarks.workers.one_device import OneDeviceConfig
from benchmarks.workers.train_ours import Gpt4dTraining
from gpt4d.config import GridSizes, from_arguments
from gpt4d.parallel.comm import collectives
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


class UncountedCollective:
    """A replacement for ``traffic.InFlightCollective`` that counts nothing."""

    def __init__(self, traffic, work: dist.Work, device: torch.device, sent_bytes: float):
        self.work = work

    def wait(self) -> None:
        self.work.wait()


def with_and_without_counting(training: Gpt4dTraining) -> dict[str, Callable]:
    counted_collective = collectives.InFlightCollective

    def step_uncounted() -> Callable[[], dict]:
        collectives.InFlightCollective = UncountedCollective
        try:
            return training.step()
        finally:
            collectives.InFlightCollective = counted_collective

    return {"counted": training.step, "not counted": step_uncounted}


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    config = from_arguments(OneDeviceConfig, sys.argv[1:])
    with process_group(Launch.from_environment(), torch.device("cpu")):
        # The y axis has the most collectives: those of the linear layers, and two small ones per norm.
        sizes = GridSizes(y=dist.get_world_size())
        serve(with_and_without_counting(Gpt4dTraining(str(sizes), config.model, config.batch)), answers)
