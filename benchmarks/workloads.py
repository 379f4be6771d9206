"""The workloads of the benchmarks, equal for all frameworks: models, batches, initial weights and AdamW."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.settings import DeviceConfig, WorkerSettings, parse_sizes, plain_rates
from gpt4d.config import Config, GridSizes, ModelConfig, OptimConfig, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.llama import LlamaConfig
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.stage import Stage
from gpt4d.plan import one_stage
from gpt4d.planner.resolve import resolve
from gpt4d.planner.stages import PlanEstimate
from gpt4d.step import build_stage

OPTIM = OptimConfig()  # used with a constant learning rate and gradient clipping
_VOCABULARY = 512
# Keys of an answer's seconds of actions, besides the actions themselves, such as B0, on a virtual stage.
LAST = " last"  # ends the key of an action on the last microbatch
END = "end"  # the rest of the step, from the end of the last action of all ranks


class Workload(NamedTuple):
    """A model, the samples of a step over all ranks, and the consecutive steps of a run.

    A run has several steps where a step defers work to the next step, so that this work is measured.
    """

    model: Any  # GPT2Config, LlamaConfig or UNetConfig
    batch: int
    steps: int

    @property
    def units(self) -> int:
        """Tokens or images of a step."""
        return self.batch * (1 if isinstance(self.model, UNetConfig) else self.model.max_positions)

    def share(self, index: int, shares: int) -> tuple[torch.Tensor, ...]:
        """Return share number ``index`` of the batch: the inputs of the model, sample ids included, and targets."""
        if isinstance(self.model, UNetConfig):
            return images(index, shares, self.model, self.batch)
        ids, targets = sequences(index, shares, self.model, self.batch)
        return ids, targets, torch.arange(len(ids))


def gpt_workload(config: DeviceConfig) -> Workload:
    """Return the training of ``peers``, which is larger on virtual devices, with the settings of ``config``."""
    hidden, length, batch, steps = (1024, 256, 16, 2) if config.virtual else (512, 128, 8, 3)
    model = GPT2Config(
        "benchmark", config.layers or 4, hidden, hidden // 64, vocab_size=_VOCABULARY, max_positions=length
    )
    return Workload(model, config.sequences or batch, config.steps or steps)


# As in the 4D paper's experiments, a device has few small images and many weights.
UNET = Workload(
    UNetConfig("benchmark", image_size=16, channels=128, blocks_per_level=1, attention_at=[8, 4], head_size=64),
    batch=16,
    steps=2,
)


def block_workload(virtual: bool) -> Workload:
    """Return transformer blocks, for ranks that share this machine's cores or have virtual devices."""
    hidden, length, batch = (1024, 256, 16) if virtual else (512, 128, 8)
    # The rest of the model is built but never run, so the vocabulary is as small as possible.
    vocabulary = {"vocab_size": 8, "vocab_multiple": 8}
    model = GPT2Config("blocks", 4, hidden, heads=hidden // 64, max_positions=length, **vocabulary)
    return Workload(model, batch, steps=1)


@dataclass
class OneDeviceConfig(WorkerSettings):
    """A model and its batch, the same for all trainers."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 8192
    length: int = 256  # tokens of a sequence
    batch: int = 8  # sequences of a step
    loss_chunks: int = 1  # train.loss_chunks of gpt4d
    precision: str = "fp32"  # or bf16, which is autocast in torch
    steps: int = 2  # steps of a run
    grid: str = "1x1x1x1"  # gx·gy·gz·gdata; gy and gz are 1
    device: str = "cpu"  # or cuda

    @property
    def model(self) -> GPT2Config:
        return GPT2Config("benchmark", self.layers, self.hidden, self.heads, self.vocabulary, max_positions=self.length)

    @property
    def work(self) -> Workload:
        return Workload(self.model, self.batch, self.steps)


@dataclass
class StagesConfig(DeviceConfig):
    """Stages of equal grids on consecutive ranks, and the GPT-2 or the U-Transformer that they train."""

    stages: int = 2
    grid: str = "2x1x1x2"  # grid of each stage, gx·gy·gz·gdata
    microbatches: int = 8
    chunks_per_stage: int = 2  # for interleaved_1f1b
    contenders: str = ""  # contenders that a worker runs, separated by commas
    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    length: int = 128  # tokens of a sequence
    samples: int = 4  # sequences or images of a microbatch, over all ranks of a stage
    channels: int = 0  # channels of the first level of a U-Transformer; 0: a GPT-2
    image: int = 32  # its height and width

    @property
    def model(self) -> ModelConfig:
        if self.channels:
            sizes = [self.image >> level for level in range(4)]
            return UNetConfig(
                "benchmark", self.image, channels=self.channels, blocks_per_level=1, attention_at=sizes, head_size=64
            )
        return self.gpt

    @property
    def gpt(self) -> GPT2Config:
        return GPT2Config("benchmark", self.layers, self.hidden, self.heads, _VOCABULARY, max_positions=self.length)

    @property
    def seq_len(self) -> int:
        """Units of a sample: tokens, or one image."""
        return 1 if self.channels else self.length

    @property
    def batch(self) -> int:
        return self.samples * self.microbatches

    def plan(self, schedule: str) -> PlanEstimate:
        """Return our plan. Raises ConfigError if the stages do not fit the ranks or the model."""
        sizes = parse_sizes(self.grid)
        chunks = self.chunks_per_stage if schedule == "interleaved_1f1b" else 1
        pipeline = PipelineConfig(
            stages=self.stages,
            schedule=schedule,
            microbatches=self.microbatches,
            chunks_per_stage=chunks,
        )
        config = Config(
            model=self.model,
            train=TrainConfig(seq_len=self.seq_len, batch_size=self.batch),
            parallel=ParallelConfig(cache_layers="all", pipeline=pipeline).on_grid(sizes),
            cluster=plain_rates(self),
        )
        return resolve(config, self.hosts * self.ranks)

    def share(self, index: int, shares: int) -> list[tuple[torch.Tensor, ...]]:
        """Return this rank's input of each microbatch, share number ``index`` of ``shares``.

        For a GPT-2 these are token ids, targets and sample ids, for a U-Transformer noisy images, timesteps, sample
        ids and targets.
        """
        size = self.samples // shares
        own = [
            torch.arange(m * self.samples + index * size, m * self.samples + (index + 1) * size)
            for m in range(self.microbatches)
        ]
        if self.channels:
            generator = torch.Generator().manual_seed(0)
            shape = self.batch, self.image, self.image, 3
            noisy, targets = (torch.randn(shape, generator=generator) for _ in range(2))
            return [(noisy[rows], rows, rows, targets[rows]) for rows in own]
        ids, targets = sequences(0, 1, self.gpt, self.batch)
        return [(ids[rows], targets[rows], rows) for rows in own]


def our_stage(grid: Grid, model: ModelConfig, device: torch.device | None = None, **parallel: Any) -> Stage:
    """Return gpt4d's model on ``grid``. As in all adapters, gathered weights stay until the backward."""
    train = TrainConfig(seq_len=1) if isinstance(model, UNetConfig) else TrainConfig()
    config = Config(model=model, train=train, parallel=ParallelConfig(cache_layers="all", **parallel))
    return build_stage(one_stage(config, grid.sizes), grid, device or torch.device("cpu"))


def initial_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the global tensors with which all frameworks start."""
    return {name: p.detach() for name, p in our_stage(Grid.single_device(), model).module.named_parameters()}


def with_states(parameters: Iterable[torch.Tensor], optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters and the tensors of the optimizer's states."""
    yield from parameters
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def sequences(share: int, shares: int, config: GPT2Config | LlamaConfig, batch: int) -> tuple[torch.Tensor, ...]:
    """Return token ids and targets [batch / shares, positions]: share number ``share`` of the batch.

    The tokens are random and the same in each step: the model memorizes them, and the loss falls fast enough to show
    that two workers compute the same function.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (batch, config.max_positions + 1), generator=generator)
    tokens = tokens[share * batch // shares : (share + 1) * batch // shares]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def images(share: int, shares: int, config: UNetConfig, batch: int) -> tuple[torch.Tensor, ...]:
    """Return noisy images [batch / shares, size, size, channels], timesteps, sample ids and targets of a share."""
    generator = torch.Generator().manual_seed(0)
    shape = batch, config.image_size, config.image_size, config.image_channels
    noisy, targets = (torch.randn(shape, generator=generator) for _ in range(2))
    timesteps = torch.randint(0, config.timesteps, (batch,), generator=generator)
    rows = torch.arange(batch).chunk(shares)[share]
    return noisy[rows], timesteps[rows], rows, targets[rows]


def inputs_and_upstream(work: Workload, sizes: GridSizes, z: int, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the first block and the gradient of the last block's output.

    Both are the shard [batch / z, positions, hidden / y] of the rank with indices ``z`` and ``y`` along these axes.
    """
    rows, columns = work.batch // sizes.z, work.model.hidden // sizes.y
    shard = (slice(z * rows, (z + 1) * rows), slice(None), slice(y * columns, (y + 1) * columns))
    generator = torch.Generator().manual_seed(0)
    shape = work.batch, work.model.max_positions, work.model.hidden
    inputs, upstream = torch.randn(2, *shape, generator=generator)
    return inputs[shard].contiguous().requires_grad_(), upstream[shard].contiguous()


def take_gradient_norms(inputs: torch.Tensor, matrices: Iterable[torch.Tensor], sizes: GridSizes) -> dict[str, float]:
    """Return the norms of the global gradients of the input and of all matrices, and clear ``inputs.grad``.

    The norms show that all workers compute the same function. Ranks along x hold the same shard of the input. No two
    ranks hold the same shard of a matrix.
    """
    squares = torch.stack((inputs.grad.square().sum() / sizes.x, sum(m.grad.square().sum() for m in matrices)))
    dist.all_reduce(squares)
    inputs.grad = None
    input_norm, weight_norm = squares.sqrt().tolist()
    return {"input_gradient": input_norm, "weight_gradient": weight_norm}
