"""Plans as jobs of Megatron-LM (core 0.16) and torchtitan (0.2), and their jobs as plans: one table per trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from gpt4d.config import Config, ConfigError, check_at_least, check_choice, divisors, value_of, with_stages
from gpt4d.config.trainer_profiles import PROFILES
from gpt4d.model import registry


@dataclass
class TrainerJob:
    """The planner's arguments that describe a job of another trainer. The text of the command explains them."""

    trainer: str | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    ep: int | None = None
    vp: int | None = None
    replicate: int | None = None
    micro_batch: int | None = None
    recompute: str | None = None

    @property
    def degrees(self) -> dict[str, Any]:
        """The arguments that are given; empty if no job is described."""
        return {field.name: value for field in fields(TrainerJob) if (value := getattr(self, field.name)) is not None}


class Row(NamedTuple):
    """A setting, and the arguments of a trainer that have its meaning.

    ``key`` is a setting or a name of ``_values``. ``arguments`` is a text with {} for the value; or texts by value, and
    a text for all other values (``...``), empty for the trainer's default. Missing values have no equivalent.
    ``name``: the attribute of ``TrainerJob`` that is the setting's value in a job of the trainer.
    """

    key: str
    arguments: str | Mapping[Any, str]
    name: str | None = None


class OtherTrainer(NamedTuple):
    """Another trainer and its arguments. ``PROFILES`` has other settings of a plan that behaves like it.

    ``shards_weights``: its data parallelism shards weights, as z does; else only optimizer states.
    """

    title: str
    rows: Sequence[Row]
    shards_weights: bool


_ONLY_HERE = [
    Row("parallel.gy", {1: ""}),
    Row("parallel.chunks", {1: ""}),
    Row("parallel.expert_data", {False: ""}),
    Row("parallel.pipeline.cuts", {None: ""}),
    Row("train.loss_chunks", {1: ""}),
]
_FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy=optim_grads_params --use-distributed-optimizer "
    "--no-gradient-accumulation-fusion --ckpt-format=fsdp_dtensor"
)
_FULL = "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1"
_SELECTIVE = "--recompute-granularity=selective --recompute-modules=layernorm"
_LLAMA = (
    "--swiglu --normalization=RMSNorm --disable-bias-linear --position-embedding-type=rope --hidden-dropout=0 "
    "--attention-dropout=0"
)
_MEGATRON = OtherTrainer(
    "Megatron-LM",
    [
        Row("parallel.gx", "--tensor-model-parallel-size={}", "tp"),
        Row("parallel.sequence_parallel", {None: "", True: "--sequence-parallel", False: ""}),
        Row("parallel.pipeline.stages", "--pipeline-model-parallel-size={}", "pp"),
        Row("parallel.pipeline.schedule", {None: "", "1f1b": "", "interleaved_1f1b": ""}),
        Row("parallel.pipeline.chunks_per_stage", {1: "", ...: "--num-virtual-stages-per-pipeline-rank={}"}, "vp"),
        Row("parallel.context", "--context-parallel-size={}", "cp"),
        Row("parallel.context_exchange", {None: "", "all_gather": "--cp-comm-type=all_gather", "ring": ""}),
        Row("ranks of experts", {1: "", ...: "--expert-model-parallel-size={}"}, "ep"),
        Row("parallel.replicated_layers", {None: "", "all": "", 0: _FSDP}),
        Row("replicas of sharded weights", {1: "", ...: "--num-distributed-optimizer-instances={}"}),
        Row("optim.shard_states", {True: "--use-distributed-optimizer", False: ""}),
        Row("optim.algorithm", {"adamw": "--optimizer=adam", "muon": "--optimizer=muon"}),
        Row("parallel.overlap.data", {True: "--overlap-grad-reduce", False: ""}),
        Row("train.micro_batch_size", "--micro-batch-size={}", "micro_batch"),
        Row("train.batch_size", "--global-batch-size={}"),
        Row("train.activation_checkpointing", {"none": "", "selective": _SELECTIVE, "full": _FULL}, "recompute"),
        Row("train.precision", {"fp32": "", "bf16": "--bf16", "fp8": "--bf16 --fp8-format=hybrid"}),
        Row("model family", {"gpt2": "", "llama": _LLAMA, "moe": _LLAMA}),
        Row("model.layers", "--num-layers={}"),
        Row("model.hidden", "--hidden-size={}"),
        Row("model.heads", "--num-attention-heads={}"),
        Row("model.key_value_heads", "--group-query-attention --num-query-groups={}"),
        Row("model.head_size", "--kv-channels={}"),
        Row("model.inner", "--ffn-hidden-size={}"),
        Row("model.experts", "--num-experts={}"),
        Row("model.experts_per_token", "--moe-router-topk={}"),
        Row("model.shared_inner", {0: "", ...: "--moe-shared-expert-intermediate-size={}"}),
        Row("model.qkv_bias", {False: "", True: "--add-qkv-bias"}),
        Row("model.qk_norm", {False: "", "none": "", True: "--qk-layernorm", "heads": "--qk-layernorm"}),
        Row("model.rope_theta", "--rotary-base={:.0f}"),
        Row("model.rope_scaling", {"none": "", "llama3": "--use-rope-scaling"}),
        Row("model.dropout", "--hidden-dropout={}"),
        Row("model.attention_dropout", "--attention-dropout={}"),
        Row("model.tied", {True: "", False: "--untie-embeddings-and-output-weights"}),
        Row("model.vocab_size", "--vocab-size={}"),
        Row("model.max_positions", "--max-position-embeddings={}"),
        Row("train.seq_len", "--seq-length={}"),
        *_ONLY_HERE,
    ],
    False,
)
_DEGREE, _RESHARD = "--parallelism.{}_parallel_degree={{}}".format, "--parallelism.fsdp_reshard_after_forward="
_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}
_SCHEDULES = {name: f"--parallelism.pipeline_parallel_schedule={theirs}" for name, theirs in _SCHEDULES.items()}
_TORCHTITAN = OtherTrainer(
    "torchtitan",
    [
        Row("model.name", {"llama3_8b": "--model.name=llama3 --model.flavor=8B"}),
        Row("parallel.gx", _DEGREE("tensor"), "tp"),
        Row("parallel.sequence_parallel", {None: "", True: ""}),
        Row("parallel.pipeline.stages", _DEGREE("pipeline"), "pp"),
        Row("parallel.pipeline.schedule", {None: "", **_SCHEDULES}),
        Row("blocks of a chunk", {None: "", ...: "--parallelism.pipeline_parallel_layers_per_stage={}"}),
        Row("microbatch of a stage", {None: "", ...: "--parallelism.pipeline_parallel_microbatch_size={}"}),
        Row("parallel.pipeline.chunks_per_stage", {...: ""}, "vp"),
        Row("parallel.context", _DEGREE("context"), "cp"),
        Row("parallel.context_exchange", {None: "", "all_gather": ""}),
        Row("parallel.gz / parallel.context", "--parallelism.data_parallel_shard_degree={}", "dp"),
        Row("parallel.gdata", "--parallelism.data_parallel_replicate_degree={}", "replicate"),
        Row("ranks of experts", {1: "", ...: _DEGREE("expert")}, "ep"),
        Row("parallel.cache_layers", {None: "", 0: f"{_RESHARD}always", "all": f"{_RESHARD}never"}),
        Row("parallel.cache_scope", {None: "", "microbatch": ""}),
        Row("parallel.replicated_layers", {None: "", 0: ""}),
        Row("optim.shard_states", {False: ""}),
        Row("optim.algorithm", {"adamw": "--optimizer.name=AdamW"}),
        Row("samples of a pass", "--training.local_batch_size={}"),
        Row("train.micro_batch_size", {...: ""}, "micro_batch"),
        Row("train.batch_size", "--training.global_batch_size={}"),
        Row("train.seq_len", "--training.seq_len={}"),
        Row("train.activation_checkpointing", "--activation_checkpoint.mode={}", "recompute"),
        Row("train.precision", {"bf16": "", "fp8": "--model.converters=quantize.linear.float8"}),
        Row("train.compile", {True: "--compile.enable", False: ""}),
        *_ONLY_HERE,
    ],
    True,
)
TRAINERS = {"megatron": _MEGATRON, "torchtitan": _TORCHTITAN}


def arguments(name: str, config: Config) -> str:
    """Return the arguments of a trainer for a plan, and a line with the settings that have no equivalent.

    ``config`` has the plan's grid and number of microbatches. Raises ConfigError if its stages have different grids.
    """
    if config.parallel.pipeline.stage_grids:
        raise ConfigError(f"format={name}: the plan's stages have different grids; ask for a grid: grid=1x1x8x1")
    config = with_stages(config, config.parallel.pipeline.stages or 1)
    known, words, missing = _values(config), [], []
    for key, texts, _ in TRAINERS[name].rows:
        try:
            value = known[key] if key in known else value_of(config, key)
        except AttributeError:  # a setting of other models
            continue
        texts = {...: texts} if isinstance(texts, str) else texts
        text = texts.get(value, None if value is None else texts.get(...))
        if text is None:
            missing.append(key if value is None else f"{key}={value}")
        elif text:
            words.append(text.format(value))
    note = f"\n# without an equivalent in {TRAINERS[name].title}: {', '.join(missing)}" if missing else ""
    return " ".join(words) + note


def _values(config: Config) -> dict[str, Any]:
    """Return the values of rows that differ from the setting of their key, or whose key is not a setting."""
    parallel, train, model = config.parallel, config.train, config.model
    pipeline, (x, _, z, data), context = parallel.pipeline, parallel.sizes, parallel.context
    stages, layers = pipeline.stages or 1, getattr(model, "layers", 0)
    share = train.batch_size * context // (z * data)
    micro_batch = share // (pipeline.microbatches or 1) if stages > 1 else train.micro_batch_size or share
    whole = "all" if parallel.replicated_layers == layers else parallel.replicated_layers
    values = {
        "model family": registry.of(model).name,
        "parallel.sequence_parallel": parallel.sequence_parallel if x > 1 else None,
        "blocks of a chunk": -(-layers // (stages * pipeline.chunks_per_stage)) if stages > 1 else None,
        "microbatch of a stage": micro_batch if stages > 1 else None,
        "train.micro_batch_size": micro_batch,
        "samples of a pass": share if stages > 1 else micro_batch,
        "parallel.context_exchange": parallel.context_exchange or "all_gather" if context > 1 else None,
        "parallel.gz / parallel.context": None if z % context else z // context,
        "parallel.cache_layers": parallel.cache_layers or 0 if z > 1 else None,
        "parallel.cache_scope": parallel.cache_scope if z > 1 else None,
        "parallel.replicated_layers": whole if z > 1 else None,
        "replicas of sharded weights": data if z > 1 and whole == 0 else 1,
        "ranks of experts": z if hasattr(model, "experts") else 1,
        "optim.shard_states": config.optim.shard_states and data > 1,
        "train.precision": "bf16" if train.precision == "auto" else train.precision,
        "train.compile": train.compile is not False,
    }
    return values if hasattr(model, "inner") else values | {"model.inner": 4 * getattr(model, "hidden", 0)}


def as_plan(job: TrainerJob, config: Config, world_size: int | None, overrides: list[str]) -> tuple[str, list[str]]:
    """Return the plan that equals another trainer's job: its grid, as for ``grid=``, and all overrides.

    ``config`` has the model and the batch. ``overrides`` replace settings of the trainer. Raises ConfigError if gpt4d
    has no such plan. Without ``world_size``, the degrees determine the number of devices.
    """
    given = job.degrees
    if job.trainer is None:
        key, value = next(iter(given.items()))
        raise ConfigError(f"{key}={value}: belongs to a job of another trainer; add trainer=megatron or torchtitan")
    check_choice("trainer", job.trainer, tuple(TRAINERS))
    trainer, experts = TRAINERS[job.trainer], hasattr(config.model, "experts")
    keys = {row.name: row.key for row in trainer.rows if row.name}
    for name, value in given.items():
        if name not in {*keys, "trainer", "dp"}:
            raise ConfigError(f"{name}={value}: {trainer.title} has no such degree; leave it out")
        if isinstance(value, int):
            check_at_least(name, value, 1)
    tp, pp, cp, ep, replicate = (given.get(name, 1) for name in ("tp", "pp", "cp", "ep", "replicate"))
    inner = tp * pp * cp * replicate
    if world_size and world_size % inner:
        raise ConfigError(f"world_size={world_size}: not a multiple of the product of the degrees, {inner}; change one")
    dp = given.get("dp") or (world_size or inner) // inner
    z, data = (dp * cp, replicate) if trainer.shards_weights else (ep, dp * cp // ep)
    possible = [1] if not experts else [z] if trainer.shards_weights else divisors(dp * cp)
    if ep not in possible:
        use = ", ".join(map(str, possible)) if experts else "1, because the model has no experts"
        raise ConfigError(f"ep={ep}: z splits experts over all its ranks; use {use}")
    if given.get("vp", 1) > 1 and pp == 1:
        raise ConfigError(f"vp={given['vp']}: needs several stages; set pp, or leave vp out")
    settings: dict[str, Any] = {"optim.algorithm": "adamw", "parallel.sequence_parallel": str(tp > 1).lower()}
    settings["cluster.trainer"] = job.trainer
    share = config.train.batch_size // (dp * replicate)
    several = given.get("micro_batch", 1 if pp > 1 else share) < share
    profile = PROFILES[job.trainer].overrides(trainer.shards_weights, several)
    settings |= dict(override.split("=") for override in profile)
    if trainer.shards_weights:  # torchtitan keeps the weights of a stage until its last backward
        settings["parallel.cache_layers"] = "all" if pp > 1 else "0"
    settings |= {keys[name]: given[name] for name in ("pp", "cp", "vp", "micro_batch", "recompute") if name in given}
    if ep > 1 and not trainer.shards_weights:
        settings["parallel.replicated_layers"] = value_of(config, "model.layers")
    if pp > 1:
        samples = dp * replicate * settings.pop("train.micro_batch_size", 1)
        if config.train.batch_size % samples:
            raise ConfigError(f"train.batch_size={config.train.batch_size}: use a multiple of {samples} samples")
        settings["parallel.pipeline.microbatches"] = config.train.batch_size // samples
        settings["parallel.pipeline.schedule"] = "interleaved_1f1b" if given.get("vp", 1) > 1 else "1f1b"
    named = {override.partition("=")[0] for override in overrides}
    added = [f"{key}={value}" for key, value in settings.items() if key not in named]
    return f"{tp}x1x{z}x{data}", [*overrides, *added]
