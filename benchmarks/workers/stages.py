"""The workload of ``benchmarks.pipeline``, equal for all workers: a model in stages, its microbatches, its groups."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.planner import plain_rates
from benchmarks.settings import DeviceConfig, parse_sizes
from benchmarks.workers.training import sequences
from gpt4d.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.model.unet.config import UNetConfig
from gpt4d.plan import ParallelPlan
from gpt4d.planner.resolve import resolve

_VOCABULARY = 512
# Keys of an answer's seconds of actions, besides the actions themselves, such as B0, on a virtual stage.
LAST = " last"  # ends the key of an action on the last microbatch
END = "end"  # the rest of the step, from the end of the last action of all ranks


@dataclass
class StagesConfig(DeviceConfig):
    """Stages of equal grids on consecutive ranks, and the GPT-2 or the U-Transformer that they train."""

    stages: int = 2
    grid: str = "2x1x1x2"  # of each stage: gx·gy·gz·gdata
    microbatches: int = 8
    chunks_per_stage: int = 2  # of interleaved_1f1b
    contenders: str = ""  # that a worker runs, separated by commas
    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    length: int = 128  # tokens of a sequence
    samples: int = 4  # sequences or pictures of a microbatch, over all ranks of a stage
    channels: int = 0  # of the first level of a U-Transformer; 0: a GPT-2
    picture: int = 32  # its height and width

    @property
    def model(self) -> ModelConfig:
        if self.channels:
            sizes = [self.picture >> level for level in range(4)]
            return UNetConfig(
                "benchmark", self.picture, channels=self.channels, blocks_per_level=1, attention_at=sizes, head_size=64
            )
        return self.gpt

    @property
    def gpt(self) -> GPT2Config:
        return GPT2Config("benchmark", self.layers, self.hidden, self.heads, _VOCABULARY, max_positions=self.length)

    @property
    def seq_len(self) -> int:
        """Units of a sample: tokens, or one picture."""
        return 1 if self.channels else self.length

    @property
    def batch(self) -> int:
        return self.samples * self.microbatches

    def plan(self, schedule: str, strategy: str) -> ParallelPlan:
        """Return our plan. Raises ConfigError if the stages do not fit the ranks or the model."""
        sizes = parse_sizes(self.grid)
        chunks = self.chunks_per_stage if schedule == "interleaved_1f1b" else 1
        pipeline = PipelineConfig(
            stages=self.stages,
            schedule=schedule,
            strategy=strategy,
            microbatches=self.microbatches,
            chunks_per_stage=chunks,
        )
        config = Config(
            model=self.model,
            train=TrainConfig(seq_len=self.seq_len, batch_size=self.batch),
            parallel=ParallelConfig(
                gx=sizes.x, gy=sizes.y, gz=sizes.z, gdata=sizes.data, cache_layers="all", pipeline=pipeline
            ),
            cluster=plain_rates(self),
        )
        return resolve(config, self.hosts * self.ranks)

    def share(self, index: int, shares: int) -> list[tuple[torch.Tensor, ...]]:
        """Return what the model takes of each microbatch on this rank; a stage splits it into ``shares``.

        For a GPT-2 these are token ids, targets and sample ids, for a U-Transformer noisy pictures, timesteps, sample
        ids and targets.
        """
        size = self.samples // shares
        own = [
            torch.arange(m * self.samples + index * size, m * self.samples + (index + 1) * size)
            for m in range(self.microbatches)
        ]
        if self.channels:
            generator = torch.Generator().manual_seed(0)
            shape = self.batch, self.picture, self.picture, 3
            noisy, targets = (torch.randn(shape, generator=generator) for _ in range(2))
            return [(noisy[rows], rows, rows, targets[rows]) for rows in own]
        ids, targets = sequences(0, 1, self.gpt, self.batch)
        return [(ids[rows], targets[rows], rows) for rows in own]


class LinkGroups:
    """Process groups of the links between stages. The n-th of some ranks serves the n-th link of every contender.

    Contenders take turns, so they can share groups; the links of one contender cannot.
    """

    def __init__(self):
        self._new_group, self._groups = dist.new_group, defaultdict(list)

    @contextmanager
    def of_contender(self) -> Iterator[None]:
        """Let ``torch.distributed.new_group`` return these groups."""
        used: defaultdict[tuple[int, ...], int] = defaultdict(int)

        def new_or_shared(ranks: list[int], **options) -> dist.ProcessGroup:
            key = tuple(ranks)
            if used[key] == len(self._groups[key]):
                self._groups[key].append(self._new_group(ranks, **options))
            used[key] += 1
            return self._groups[key][used[key] - 1]

        with patch.object(dist, "new_group", new_or_shared):
            yield
