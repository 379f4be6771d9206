"""Two contenders in the same processes: ours and plain torch on one device, or ours with and without counting."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.interleave import redirect_stdout_for_answers, serve
from benchmarks.workers import train_ours, train_torch
from benchmarks.workers.torch_gpt import build_torch_gpt
from benchmarks.workers.training import initial_weights, sequences
from gpt4d.config import GridSizes, from_arguments
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel import collectives
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


@dataclass
class ModelSizes:
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    vocab: int = 8192
    seq: int = 256
    batch: int = 8

    def model(self) -> GPT2Config:
        return GPT2Config("single_device", self.layers, self.hidden, self.heads, self.vocab, max_positions=self.seq)


class UncountedCollective:
    """A replacement for ``traffic.InFlightCollective`` that counts nothing."""

    def __init__(self, traffic, work: dist.Work, device: torch.device, sent_bytes: float):
        self.work = work

    def wait(self) -> None:
        self.work.wait()


def with_and_without_counting(training: train_ours.Gpt4dTraining) -> dict[str, Callable]:
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
    model_sizes = from_arguments(ModelSizes, sys.argv[1:])
    config, batch = model_sizes.model(), model_sizes.batch
    weights = initial_weights(config)
    with process_group(Launch.from_environment(), torch.device("cpu")):
        if dist.get_world_size() == 1:
            plain = train_torch.TorchTraining(build_torch_gpt(weights, config), sequences(0, 1, config, batch))
            ours = train_ours.Gpt4dTraining("1x1x1x1", config, batch)
            contenders = {"ours": ours.step, "plain torch": plain.step}
        else:
            # The y axis has the most collectives: those of the linear layers, and two small ones per norm.
            sizes = GridSizes(y=dist.get_world_size())
            contenders = with_and_without_counting(train_ours.Gpt4dTraining(str(sizes), config, batch))
        serve(contenders, answers)
