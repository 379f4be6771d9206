"""The commands that continue the training of an imported model, with settings that fit this machine. No torch here."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpt4d.checkpoint.checkpoint_dir import Checkpoint
from gpt4d.config import GridSizes, ModelConfig, compose
from gpt4d.data import tokenizers, transformers_tokenizer
from gpt4d.model import registry
from gpt4d.planner.candidates import fewest_microbatches
from gpt4d.planner.options import levels
from gpt4d.planner.topology import for_devices
from gpt4d.task import registry as tasks

_MAX_LENGTH = 1024  # tokens; longer sequences need memory that few machines have


def commands(imported: Path, model: ModelConfig) -> dict[str, str]:
    """Return the commands that train the import in ``imported`` in a separate run directory, by the kind of data.

    A model with a chat template has a second command, for conversations.
    """
    family = registry.of(model)
    defaults = asdict(type(model)(name=model.name, lora=model.lora, width=model.width))
    changed = {key: value for key, value in asdict(model).items() if value != defaults[key]}
    if not changed:  # A family without any size is not a choice of model.
        changed = {key: getattr(model, key) for key in family.structure}
    settings = [f"model={family.name}", *(f"model.{key}={_text(value)}" for key, value in changed.items())]
    if model.lora:
        settings += [f"lora.{key}={_text(value)}" for key, value in asdict(model.lora).items()]
    most = getattr(model, "max_positions", None)  # only text models have it
    if most:
        settings.append(f"train.seq_len={min(most, _MAX_LENGTH)}")
    settings += _fitting([*settings, "optim=finetune"])
    files = Checkpoint.open(imported).model_files()
    tokenizer = [f"data.tokenizer={imported}"] if tokenizers.FILE in files else []
    task = tasks.get(family.task)
    choices = {task.data: ["optim=finetune", task.own_data]}
    if tokenizer and transformers_tokenizer.load(files, imported).chat_template:
        choices["conversations"] = ["train=finetune", "data=chat data.path='…'"]
    start = f"python train.py checkpoint.init={imported} run.dir={imported}-finetuned"
    return {kind: " ".join([start, *settings, *choice, *tokenizer]) for kind, choice in choices.items()}


def first_tokens(imported: Path) -> str:
    """Return the tokens that the tokenizer of an import puts before a text; empty if it adds none."""
    files = Checkpoint.open(imported).model_files()
    if tokenizers.FILE not in files:
        return ""
    tokenizer = tokenizers.parse(files, imported)
    return " ".join(str(tokenizer.id_to_token(token)) for token in tokenizers.first_tokens(tokenizer))


def _fitting(settings: list[str]) -> list[str]:
    """Return overrides with which a step fits on one device: the microbatch and, if necessary, recomputation."""
    for recomputation in ([], ["train.activation_checkpointing=full"]):
        config = compose([*settings, *recomputation])
        config = replace(config, cluster=for_devices(config.cluster, 1))
        if step := fewest_microbatches(levels(config)[0], (GridSizes(),)):
            break
    micro_batch = config.train.batch_size // step.microbatches if step else 1
    share = [] if micro_batch == config.train.batch_size else [f"train.micro_batch_size={micro_batch}"]
    return [*recomputation, *share]


def _text(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if value is None:
        return "null"
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
