"""One trainer of ``benchmarks.one_device``: the same GPT-2, tokens and AdamW, eager and compiled.

On a grid of several ranks each trains on its share of the batch, and megatron-core takes part.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.interleave import ContenderStep, redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.settings import parse_sizes
from benchmarks.workers.torch_gpt import adamw, build_torch_gpt
from benchmarks.workers.train_megatron import MegatronTraining, without_cuda
from benchmarks.workers.training import OPTIM, Workload, initial_weights, sequences
from gpt4d.config import Config, ParallelConfig, TrainConfig, from_arguments
from gpt4d.model.gpt2 import hugging_face
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel import compile
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import TrainStep, build_stage
from gpt4d.testing.memory import allocated_peak


@dataclass
class OneDeviceConfig:
    """A model and its batch, the same for all trainers."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 8192
    length: int = 256  # tokens of a sequence
    batch: int = 8  # sequences of a step
    loss_chunks: int = 1  # train.loss_chunks of ours
    precision: str = "fp32"  # or bf16: autocast in the other trainers
    steps: int = 2  # of a turn
    grid: str = "1x1x1x1"  # gx·gy·gz·gdata; gy and gz are 1
    device: str = "cpu"  # or cuda

    @property
    def model(self) -> GPT2Config:
        return GPT2Config("benchmark", self.layers, self.hidden, self.heads, self.vocabulary, max_positions=self.length)


@dataclass
class TrainerConfig(OneDeviceConfig):
    trainer: str = "ours"


def with_states(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters and the tensors of the optimizer's states."""
    yield from parameters
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class Training:
    """The training step of a torch module from token ids to logits, as most would write it.

    ``forward`` is what computes the logits, the module itself or a compiled one.
    """

    def __init__(self, module: nn.Module, config: OneDeviceConfig, forward: Callable | None = None):
        self.module, self.forward = module, module if forward is None else forward
        device = torch.device(config.device)
        self.ids, self.targets = (t.to(device) for t in sequences(0, 1, config.model, config.batch))
        self.optimizer = adamw(module.parameters())
        self.autocast: Callable[[], AbstractContextManager] = nullcontext
        if config.precision == "bf16":
            self.autocast = lambda: torch.autocast(device.type, torch.bfloat16)

    def step(self) -> torch.Tensor:
        with self.autocast():
            logits = self.forward(self.ids)
            loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        del logits  # or they would stay until the end of the backward
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), OPTIM.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what exists between steps."""
        return with_states(self.module.parameters(), self.optimizer)


class OurTraining:
    """gpt4d's training step, on this rank's share of the batch."""

    def __init__(self, config: OneDeviceConfig, compiled: bool):
        sizes = parse_sizes(config.grid)
        train = TrainConfig(
            seq_len=config.length,
            batch_size=config.batch,
            precision=config.precision,
            loss_chunks=config.loss_chunks,
        )
        settings = Config(model=config.model, train=train, parallel=ParallelConfig(cache_layers="all"))
        self.grid, self.units = Grid(sizes), config.batch * config.length
        self.device, self.compiled = torch.device(config.device), compiled
        self.stage = build_stage(settings, self.grid, self.device)
        self.train_step = TrainStep(self.stage, whole_model(lambda module, batch: module.loss_sum(*batch)), OPTIM)
        share = sequences(self.grid.batch_shard, sizes.batch_shards, config.model, config.batch)
        ids, targets = (t.to(self.device) for t in share)
        self.microbatch = ids, targets, torch.arange(len(ids), device=self.device)

    def step(self) -> torch.Tensor:
        compile.enable(self.compiled, self.device)  # for all of this process, in which others take turns
        return self.train_step([self.microbatch], 1, self.units, OPTIM.lr).loss

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what exists between steps."""
        return with_states(self.stage.module.parameters(), self.train_step.optimizer)


class Megatron:
    """megatron-core's training step with the tensor- and data-parallel sizes of the grid."""

    def __init__(self, config: OneDeviceConfig):
        work, tensor = Workload(config.model, config.batch, config.steps), parse_sizes(config.grid).x
        self.training = MegatronTraining(tensor, True, work, initial_weights(config.model))

    def step(self) -> torch.Tensor:
        return torch.tensor(self.training.step()()["loss"])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what exists between steps."""
        yield from (parameter.main_grad for parameter in self.training.parameters)
        yield from with_states(self.training.parameters, self.training.optimizer)


class TransformersGPT(nn.Module):
    """transformers' GPT2LMHeadModel with our weights, from token ids to logits."""

    def __init__(self, config: GPT2Config, weights: Mapping[str, torch.Tensor]):
        from transformers import GPT2LMHeadModel

        super().__init__()
        self.model = GPT2LMHeadModel(hugging_face.hf_config(config))
        state: dict[str, torch.Tensor] = {}
        for name, padded in weights.items():
            tensor = padded[: config.vocab_size] if name == "tokens.weight" else padded
            state |= zip(hugging_face.names(name, config), hugging_face.to_hf(name, tensor, config), strict=True)
        self.model.load_state_dict({**state, "lm_head.weight": state["transformer.wte.weight"]})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def trainings(config: TrainerConfig) -> dict[str, "Training | OurTraining | Megatron"]:
    """Return a trainer's contenders."""
    if config.trainer == "ours":
        return {"eager": OurTraining(config, False), "compiled": OurTraining(config, True)}
    if config.trainer == "megatron-core":
        without_cuda()
        return {"eager": Megatron(config)}
    weights, device = initial_weights(config.model), torch.device(config.device)

    def build() -> nn.Module:
        if config.trainer == "torch":
            return build_torch_gpt(weights, config.model).to(device)
        return TransformersGPT(config.model, weights).to(device)

    eager, compiled = build(), build()
    return {
        "eager": Training(eager, config),
        "compiled": Training(compiled, config, torch.compile(compiled)),
    }


def turn(training: Training | OurTraining | Megatron, steps: int, device: torch.device) -> ContenderStep:
    """Return a turn of ``steps`` steps.

    It answers with the loss, the processor seconds of all ranks per step and the peak of the first rank's memory.
    """
    for _ in range(2):
        training.step()
    standing = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in training.tensors()}.values())
    peak = standing + allocated_peak(training.step, device)

    def run() -> Callable[[], dict]:
        started = time.process_time()
        for _ in range(steps):
            loss = training.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        cpu_s = torch.tensor((time.process_time() - started) / steps)

        def collect_results() -> dict:
            dist.all_reduce(cpu_s)
            return {"loss": loss.item(), "cpu_s": cpu_s.item(), "peak_mib": peak / 2**20, "steps": steps}

        return collect_results

    return run


if __name__ == "__main__":
    answers, config = redirect_stdout_for_answers(), from_arguments(TrainerConfig, sys.argv[1:])
    device = torch.device(config.device)
    with process_group(Launch.from_environment(), device):
        share_process_groups()
        contenders = {name: turn(training, config.steps, device) for name, training in trainings(config).items()}
        serve(contenders, answers)
