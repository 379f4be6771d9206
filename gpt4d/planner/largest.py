"""The models of ``configs/model`` that a machine can pretrain, fine-tune and adapt, with their speed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpt4d.config import CONFIG_DIR, ClusterConfig, Config, LoraConfig, check_values, compose
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.planner.duration import Duration, duration
from gpt4d.planner.options import open_keys
from gpt4d.planner.search import rank
from gpt4d.planner.stages import PlanEstimate
from gpt4d.planner.tables import rates_line, render, titled

_MODELS = sorted(path.stem for path in CONFIG_DIR.glob("model/*.yaml") if not path.stem.endswith("_tiny"))
_BATCH = 8  # samples per step and device, unless the user sets train.batch_size
_LENGTH = 2048  # maximum tokens of a sequence in fine-tuning
_RANK = 16  # of adapters, which every family of text can have in attention
_KINDS = "pretrain", "fine-tune", "LoRA"  # in descending order of memory


@dataclass(frozen=True)
class Trainable:
    """A model, and the fastest plan of each kind of training that fits in memory, with its speed."""

    config: Config
    plans: dict[str, tuple[PlanEstimate, Duration]]

    @property
    def description(self) -> Description:
        return registry.describe(self.config.model)

    def as_dict(self) -> dict[str, Any]:
        """Return the values of a JSON object."""
        kinds = {
            kind: {
                f"{run.unit}_per_s": run.units_per_s,
                "memory_gib": plan.memory_gib,
                "overrides": plan.overrides,
            }
            for kind, (plan, run) in self.plans.items()
        }
        return {"model": self.config.model.name, "parameters": self.description.num_parameters, **kinds}


def trainable(overrides: Sequence[str], devices: int) -> list[Trainable]:
    """Return all models except the tiny ones, in ascending order of their parameters."""
    words = [f"train.batch_size={_BATCH * devices}", "parallel.pipeline.stages=1", *overrides]
    found = []
    for name in _MODELS:
        config = compose([f"model={name}", *words])
        check_values(config, registry.of(config.model))
        plans = {}
        for kind in reversed(_KINDS if registry.of(config.model).unit == "tokens" else _KINDS[:1]):
            trained = _trained(config, kind, any(word.startswith("train.seq_len=") for word in overrides))
            ranking = rank(trained, devices, 1, keys=open_keys(trained, words))
            if not ranking.plans:
                break  # the remaining kinds need more memory
            (plan,) = ranking.plans
            plans[kind] = plan, duration(trained, devices, plan.step_time_s)
        found.append(Trainable(config, plans))
    return sorted(found, key=lambda each: each.description.num_parameters)


def _trained(config: Config, kind: str, fixed_length: bool) -> Config:
    """Return the configuration of a kind of training. ``fixed_length``: the user chooses the length of sequences."""
    if kind == "pretrain":
        return config
    if not fixed_length:
        config = replace(config, train=replace(config.train, seq_len=min(_LENGTH, config.train.seq_len)))
    if kind == "LoRA":
        lora = LoraConfig(rank=_RANK, targets=["qkv", "output"])
        config = replace(config, lora=lora, model=replace(config.model, lora=lora))
    return config


def as_json(found: list[Trainable]) -> str:
    """Return a JSON list of all models; a kind of training that does not fit is absent."""
    return json.dumps([each.as_dict() for each in found], indent=1)


def table(found: list[Trainable], cluster: ClusterConfig, devices: int) -> str:
    """Return a table of the models that fit, and the names of those that do not."""
    rows = titled(f"models that {devices} device(s) of {cluster.name} can train")
    rows.add_column("model")
    for heading in ("parameters", *_KINDS):
        rows.add_column(heading, justify="right")
    for each in found:
        if each.plans:
            speeds = (each.plans[kind][1].speed if kind in each.plans else "" for kind in _KINDS)
            rows.add_row(each.config.model.name, each.description.size.replace(" parameters", ""), *speeds)
    large = [each.config.model.name for each in found if not each.plans]
    lines = [render(rows)] + [f"{len(large)} models do not fit: {', '.join(large)}"] * bool(large)
    lines.append(f"fine-tuning and LoRA: sequences of up to {_LENGTH:,} tokens, adapters of rank {_RANK} in attention")
    lines.append(rates_line(cluster, devices))
    return "\n".join(lines)
