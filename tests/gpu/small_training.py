"""Training of a small GPT-2 on grids and over pipeline stages, compared with one rank. Checks 5 and 9 run it."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import Config, GridSizes, OptimConfig, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import Documents
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.planner.resolve import resolve
from gpt4d.step import TrainStep, build_stage, connect_stages
from tests.gpu import compiling
from tests.gpu.check import Check, largest_difference
from tests.support.stages import RandomTokens

_STEPS = 3
_BOUND = 1e-4  # relative difference to one rank
_LENGTH, _BATCH = 32, 8
_MODEL = GPT2Config(
    "grids", layers=2, hidden=64, heads=4, vocab_size=500, max_positions=_LENGTH, dropout=0.1, attention_dropout=0.1
)


@dataclass(frozen=True)
class GridCase:
    """A grid, or a pipeline of two stages with this grid, on which to train."""

    sizes: GridSizes = GridSizes()  # noqa: RUF009
    stages: int = 1
    microbatches: int = 1  # per step
    shard_states: bool = False  # over data
    compiled: bool = False  # compile fused kernels
    parallel: Mapping[str, Any] = field(default_factory=dict)  # further settings
    train: Mapping[str, Any] = field(default_factory=dict)  # further settings

    def __str__(self) -> str:
        settings = [f"{key}={value}" for key, value in {**self.parallel, **self.train}.items()]
        words = ["sharded states"] * self.shard_states + ["compiled"] * self.compiled
        stages = f"{self.stages} stages of " * (self.stages > 1)
        return " ".join([f"{stages}{self.sizes}", *settings, *words])

    def config(self, device: torch.device) -> Config:
        """Return the configuration of a training on ``device``."""
        parallel = {"gx": self.sizes.x, "gy": self.sizes.y, "gz": self.sizes.z, "gdata": self.sizes.data}
        pipeline = PipelineConfig(stages=self.stages, microbatches=self.microbatches, schedule="eager_1f1b")
        train = {
            "seq_len": _LENGTH, "batch_size": _BATCH, "precision": "fp32", "activation_checkpointing": "full",
            "micro_batch_size": _BATCH // self.microbatches // self.sizes.batch_shards,
            "compile": self.compiled and device.type == "cuda",
        }  # fmt: skip
        return Config(
            model=_MODEL,
            train=TrainConfig(**(train | self.train)),
            parallel=ParallelConfig(**(parallel | self.parallel), pipeline=pipeline),
            optim=replace(OptimConfig(), shard_states=self.shard_states),
        )


class Answer(NamedTuple):
    """Loss and gradient norm of each step, and hashes of a rank's shards after the last step, by name and region."""

    values: list[float]
    shards: dict[str, str]


def compare(check: Check, answers: Sequence[Mapping[str, Answer]]) -> str:
    """Require the ranks' answers to agree with one rank, and replicas to have equal bits. Return a short text."""
    reference = answers[0]["one rank"].values
    differences = check.values.setdefault("differences", {})
    cases = list(answers[-1])
    for name in cases:
        difference = max(largest_difference(answer[name].values, reference) for answer in answers)
        differences[name] = difference
        check.require(difference < _BOUND, f"on {name} the relative difference is {difference:.1e}")
        hashes = defaultdict[str, set[str]](set)
        for answer in answers:
            for shard, digest in answer[name].shards.items():
                hashes[shard].add(digest)
        differing = [shard for shard, digests in hashes.items() if len(digests) > 1]
        check.require(not differing, f"on {name} replicas have different bits: {', '.join(differing[:3])}")
    largest = max(differences[name] for name in cases)
    return f"{', '.join(cases)} within {largest:.1e} of one rank with equal replicas"


def train_on_grids(cases: Sequence[GridCase], device: torch.device) -> dict[str, Answer]:
    """Return this rank's answer for each case. Rank 0 also trains alone, as ``one rank``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = {"one rank": train(GridCase(), device, alone=True)} if dist.get_rank() == 0 else {}
    return alone | {str(case): train(case, device) for case in cases}


def train(case: GridCase, device: torch.device, alone: bool = False) -> Answer:
    """Train for a few steps, in fp32, with dropout, documents and recomputation. ``alone``: without a process group."""
    plan, step = build_step(case, device, alone)
    batches, values = local_batches(plan, step.stage), list[float]()
    for _ in range(_STEPS):
        result = step(batches, plan.microbatches, _BATCH * _LENGTH, 1e-3)
        values += [result.loss.item(), result.norm.item()]
    step.reducer.wait_params()
    step.stage.wait_for_copies()
    if step.stage.exchange:
        step.stage.exchange.close()
    return Answer(values, _hashes(step.stage))


def build_step(case: GridCase, device: torch.device, alone: bool = False) -> tuple[ParallelPlan, TrainStep]:
    """Return the plan of a case, and this rank's training step. All ranks call it together unless ``alone``."""
    plan = resolve(case.config(device), 1 if alone else dist.get_world_size())
    own = plan.stage_of(0 if alone else dist.get_rank())
    grid = Grid.single_device() if alone else Grid(own.sizes, device.type, own.ranks)
    stage = build_stage(plan, grid, device)
    if case.compiled:
        compiling.enable(device)
    if case.stages > 1:
        connect_stages(plan, stage, ranks_per_host=dist.get_world_size())
    return plan, TrainStep(stage, RandomTokens.compute, plan.config.optim)


def local_batches(plan: ParallelPlan, stage: Stage) -> list[tuple]:
    """Return this rank's microbatches of a batch: ids, targets, sample ids and documents."""
    batches = RandomTokens(plan.config, plan, stage).batches(0)
    on_device = [[tensor.to(stage.weights.device) for tensor in batch] for batch in batches]
    return [(*batch, Documents.ending_with(0, batch[0] // 20)) for batch in on_device]


def _hashes(stage: Stage) -> dict[str, str]:
    hashes = {}
    for name, parameter in stage.module.named_parameters():
        shard = LocalShard(parameter, cast(Any, parameter).spec)
        content = shard.stored(stage.grid).detach().cpu().contiguous().numpy().tobytes()
        hashes[f"{name} {shard.region(stage.grid)}"] = hashlib.sha256(content).hexdigest()
    return hashes
