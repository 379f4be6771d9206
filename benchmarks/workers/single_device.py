"""Two contenders in the same processes: ours and plain torch on one device, or ours with and without its counting."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.interleave import redirect_stdout_for_answers, serve
from benchmarks.workers import train_ours, train_torch
from benchmarks.workers.torch_gpt import plain_model
from benchmarks.workers.training import sequences, whole_weights
from gpt4d.config import GridSizes, ModelConfig, from_arguments
from gpt4d.parallel import collectives
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


@dataclass
class Sizes:
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    vocab: int = 8192
    seq: int = 256
    batch: int = 8

    def model(self) -> ModelConfig:
        return ModelConfig("alone", self.layers, self.hidden, self.heads, self.vocab, max_positions=self.seq)


class Uncounted:
    """What is left of ``traffic.Run`` when nothing is counted."""

    def __init__(self, traffic, work: dist.Work, device: torch.device, sent_bytes: float):
        self.work = work

    def wait(self) -> None:
        self.work.wait()


def counted_or_not(training: train_ours.Training) -> dict[str, Callable]:
    run = collectives.Run

    def uncounted() -> Callable[[], dict]:
        collectives.Run = Uncounted
        try:
            return training.step()
        finally:
            collectives.Run = run

    return {"counted": training.step, "not counted": uncounted}


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    sizes = from_arguments(Sizes, sys.argv[1:])
    config, batch = sizes.model(), sizes.batch
    whole = whole_weights(config)
    with process_group(Launch.from_environment(), torch.device("cpu")):
        if dist.get_world_size() == 1:
            plain = train_torch.Training(plain_model(whole, config), sequences(0, 1, config, batch))
            ours = train_ours.Training(GridSizes(), config, batch)
            contenders = {"ours": ours.step, "plain torch": plain.step}
        else:
            # Of all axes y has the most collectives: those of the linear layers, and two small ones for each norm.
            contenders = counted_or_not(train_ours.Training(GridSizes(y=dist.get_world_size()), config, batch))
        serve(contenders, answers)
