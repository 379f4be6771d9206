"""All keys of the configuration, and errors for keys that do not exist."""

import difflib
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any, NamedTuple, cast, get_type_hints

from gpt4d.config.fields import ConfigError
from gpt4d.config.schema import Config, ModelConfig

model_schemas: dict[str, type[ModelConfig]] = {}  # settings of each model family, by its name

# Names that other trainers give to a key. Only the part after the last dot of a typed name counts.
_RENAMED = {
    "parallel.gdata": "dp data_parallel data_parallel_size data_parallel_degree dp_replicate ddp",
    "parallel.gz": "fsdp fsdp_size dp_shard data_parallel_shard_degree zero zero_stage",
    "parallel.pipeline.stages": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size "
    "pipeline_parallel_degree num_stages",
    "parallel.sequence_parallel": "sp",
    "parallel.context": "cp context_parallel context_parallel_size context_parallel_degree",
    "parallel.rank_order": "innermost",
    "parallel.replicated_layers": "whole_layers",
    "train.steps": "steps max_steps num_steps total_steps train_steps iterations num_iterations max_iters train_iters",
    "train.epochs": "num_epochs max_epochs num_train_epochs",
    "train.tokens": "max_tokens num_tokens total_tokens train_tokens",
    "train.seq_len": "seq_length sequence_length max_seq_len block_size context_length max_length",
    "train.batch_size": "batch_size global_batch_size total_batch_size train_batch_size",
    "train.micro_batch_size": "device_batch_size local_batch_size per_device_batch_size per_device_train_batch_size",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint recompute recompute_granularity",
    "train.precision": "dtype mixed_precision amp",
    "train.compile": "torch_compile",
    "train.validate_every": "eval_every eval_interval eval_steps val_every",
    "optim.lr": "learning_rate max_lr base_lr",
    "optim.warmup_steps": "warmup warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "optim.schedule": "schedule scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay_style",
    "optim.weight_decay": "wd",
    "optim.epsilon": "eps adam_epsilon adam_eps",
    "optim.clip_norm": "grad_clip clip_grad max_grad_norm max_norm gradient_clip_val gradient_clipping",
    "optim.shard_states": "zero1 distributed_optimizer use_distributed_optimizer",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.hidden": "n_embd hidden_size d_model dim embed_dim",
    "data.path": "data_path dataset_path train_data train_files",
    "data.tokenizer": "tokenizer_path tokenizer_name",
    "data.workers": "num_workers dataloader_num_workers",
    "checkpoint.every": "save_steps save_interval save_every",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.resume": "resume_from resume_from_checkpoint",
    "checkpoint.init": "init_from init_checkpoint pretrained pretrained_checkpoint load_path finetune_from",
    "logging.every": "log_interval log_every logging_steps",
    "logging.trackers": "report_to tracker loggers",
    "logging.project": "logging.wandb.project wandb.project wandb_project project_name",
    "run.name": "run_name experiment_name wandb_run_name",
    "run.dir": "output_dir out_dir save_dir",
}
_EXPLAINED = {
    "use parallel.gx, and parallel.gy for a second dimension": "tp tensor_parallel tensor_parallel_size "
    "tensor_model_parallel_size tensor_parallel_degree model_parallel_size",
    "use train.micro_batch_size, a device's samples per forward and backward; the rest of train.batch_size is "
    "accumulated": "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps grad_acc_steps "
    "accumulate_grad_batches batch_accumulation_per_replica",
    "use optim.min_lr_ratio, a fraction of optim.lr": "min_lr min_learning_rate final_lr lr_min",
    "use optim.warmup_steps, a number of steps": "warmup_ratio warmup_fraction",
    "use optim.beta1 and optim.beta2": "betas",
    "use optim=muon, or optim=adamw with optim.lr and other keys of optim": "optimizer optimizer_name optim.name "
    "optim.type muon",
    "a GPU is used where torch finds one; set the environment variable CUDA_VISIBLE_DEVICES to an empty text for the "
    "CPU": "device",
    "use train.precision=bf16": "bf16 fp16",
    "use train.precision=fp8": "fp8 float8",
    "use logging.trackers=[wandb], and logging.online=true to log to its server": "logging.wandb logging.wandb.mode "
    "wandb use_wandb wandb.mode wandb_mode",
    "use logging.trackers=[tensorboard]": "tensorboard use_tensorboard tensorboard_dir",
    "use logging.trackers=[mlflow]": "mlflow use_mlflow",
    "use data=text data.path='books/*.txt', or another choice of data": "dataset dataset_name",
}
OTHER_NAMES = {name: key for key, names in _RENAMED.items() for name in names.split()}
REMEDIES = {name: remedy for remedy, names in _EXPLAINED.items() for name in names.split()}
_GENERIC = ("name", "kind", "mode", "every")  # say too little for a guess in another group


def known_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Return all keys of a config class, such as ``parallel.gx``."""
    return list(key_types(schema, prefix))


class Setting(NamedTuple):
    """Key, type and field of one setting. ``family``: the model family that has it; empty for settings of all runs."""

    key: str
    type: Any
    field: Field
    family: str = ""


def settings(schema: type = Config, prefix: str = "", family: str = "") -> Iterator[Setting]:
    """Yield all settings of a config class. Several model families may have settings with one key."""
    fields_by_name = {each.name: each for each in fields(schema)}
    for name, kind in get_type_hints(schema).items():
        if fields_by_name[name].metadata.get("derived"):
            continue
        if not is_dataclass(kind):
            yield Setting(prefix + name, kind, fields_by_name[name], family)
        elif kind is ModelConfig and model_schemas:
            for each, group in model_schemas.items():
                yield from settings(group, f"{prefix}{name}.", each)
        else:
            yield from settings(cast(type, kind), f"{prefix}{name}.")


def key_types(schema: type = Config, prefix: str = "") -> dict[str, type]:
    """Return the type of every key of a config class."""
    return {each.key: each.type for each in settings(schema, prefix)}


def groups(schema: type = Config, prefix: str = "") -> dict[str, type]:
    """Return the dataclass of every group of keys of a config class, such as ``parallel.pipeline``."""
    found: dict[str, type] = {}
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and isinstance(kind, type):
            found |= {prefix + name: kind, **groups(kind, f"{prefix}{name}.")}
    return found


def meant_key(key: str, schema: type = Config) -> str | None:
    """Return the key for another trainer's name of a setting, or for a key without its group; None if unknown."""
    keys = known_keys(schema)
    key = key.lower().replace("-", "_")
    name = key.rpartition(".")[2]
    renamed = OTHER_NAMES.get(key) or OTHER_NAMES.get(name)
    if renamed in keys:
        return renamed
    elsewhere = [k for k in keys if k.endswith("." + name)] if name not in _GENERIC else []
    return elsewhere[0] if len(elsewhere) == 1 else None


def unknown_key(key: str, schema: type = Config) -> ConfigError:
    """Return the error for a key that ``schema`` lacks, with the key that is probably meant."""
    keys = known_keys(schema)
    prefix, _, name = key.rpartition(".")
    group = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == prefix}
    similar = difflib.get_close_matches(name, group, n=1)
    if key in keys:  # another model family has this key
        families = [family for family, settings in model_schemas.items() if name in get_type_hints(settings)]
        return ConfigError(f"{key}: the chosen model has no such key; it is one of {' and '.join(families)}")
    if schema is Config and (remedy := REMEDIES.get(key) or REMEDIES.get(name)):
        return ConfigError(f"{key}: there is no such key; {remedy}")
    if similar:
        remedy = f"did you mean {group[similar[0]]}?"
    elif meant := meant_key(key, schema):
        remedy = f"did you mean {meant}?"
    else:
        remedy = f"use one of {', '.join(group or sorted({k.partition('.')[0] + '.…' for k in keys}))}"
    return ConfigError(f"{key}: there is no such key; {remedy}")
