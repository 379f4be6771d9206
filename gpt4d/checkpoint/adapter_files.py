"""Low-rank adapters in the format of peft, and merged into the weights of a model."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gpt4d.checkpoint import storage
from gpt4d.config import LORA_TARGETS, ConfigError, LoraConfig, ModelConfig
from gpt4d.model import registry
from gpt4d.parallel.layers import lora_kernels
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.lora import A, B

# Supported values of settings whose other values change the computation; the first one is the default.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False,),
    "use_dora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "lora_bias": (False,),
}
_SETTINGS, _WEIGHTS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


Reader = Callable[[str], torch.Tensor]  # returns a global tensor by its name


def merging(read: Reader, model: ModelConfig) -> Reader:
    """Return a reader of the parameters in float32, with the product of its adapters added to each adapted weight."""
    layers = _adapted_layers(model)

    def merged(name: str) -> torch.Tensor:
        weight, layer = read(name), name.removesuffix(".weight")
        if layer == name or layer not in layers:
            return weight
        spec = layers[layer]
        b = lora_kernels.spread(read(f"{layer}.{B}").float(), model.lora.scale, spec.pattern(spec.out_features))
        return weight.float() + (read(f"{layer}.{A}").float() @ b.flatten(1)).view(weight.shape)

    return merged


def write(out: Path, read: Reader, model: ModelConfig) -> None:
    """Write the adapters of a model into the directory ``out``, in the format of peft.

    Args:
        out: existing directory.
        read: returns a global tensor by its name.
        model: the settings of the model.
    """
    adapter, tensors, modules = registry.of(model).hugging_face(), dict[str, torch.Tensor](), set()
    transposed = False
    for layer in _adapted_layers(model):
        weight = f"{layer}.weight"
        names = [name.removesuffix(".weight") for name in adapter.names(weight, model)]
        a, b = read(f"{layer}.{A}").float(), read(f"{layer}.{B}").float()
        transposed |= _stores_rows_first(layer, b, adapter, model)
        for name, part, columns in zip(names, a.chunk(len(names), 1), adapter.to_hf(weight, b, model), strict=True):
            modules.add(".".join(name.split(".")[-2:]))
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = part.t().contiguous()
            columns = columns.t() if transposed else columns
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = columns.contiguous()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": model.lora.rank,
        "lora_alpha": model.lora.scale * model.lora.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    (out / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, out / _WEIGHTS, {"format": "pt"})
    (out / _WEIGHTS).chmod((out / _SETTINGS).stat().st_mode)  # safetensors creates it unreadable for others


def read(directory: Path, model: ModelConfig) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return the settings and the tensors of adapters that peft has saved, as gpt4d's adapters of ``model``.

    A fused layer of which only some matrices have adapters, such as queries and values, gets zeros for its further
    matrices. Zeros remain zeros in a training. Raises ConfigError for settings and tensors without an equivalent.
    """
    settings, tensors = _load(directory)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise ConfigError(f"adapter={directory}: r={rank} and lora_alpha={alpha} in {_SETTINGS}; correct them")
    found, targets = dict[str, torch.Tensor](), set[str]()
    for layer, spec in _adapted_layers(replace(model, lora=LoraConfig(rank, float(alpha)))).items():
        own = _read_layer(directory, tensors, layer, spec, model)
        if own:
            targets.add(layer.rpartition(".")[2])
            found |= own
    if tensors or not found:
        problem = f"{min(tensors)} is not an adapter of a layer" if tensors else "no adapters of layers"
        raise ConfigError(
            f"adapter={directory}: {problem} that gpt4d supports; use adapters of linear layers of blocks"
        )
    used = LoraConfig(rank, float(alpha), [target for target in LORA_TARGETS if target in targets])
    order = [name for name in storage.shapes(replace(model, lora=used)) if name.endswith((A, B))]
    if missing := [name for name in order if name not in found]:
        raise ConfigError(f"adapter={directory}: {missing[0]} is missing; all blocks must have the same adapters")
    return used, {name: found[name] for name in order}


def _load(directory: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the settings and the tensors in a directory. Raises ConfigError if they cannot be used."""
    try:
        settings, tensors = dict(json.loads((directory / _SETTINGS).read_bytes())), load_file(directory / _WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"adapter={directory}: no adapters of peft ({error}); use a directory with {_SETTINGS} and {_WEIGHTS}"
        ) from None
    for key, possible in _SUPPORTED.items():
        if settings.get(key, possible[0]) not in possible:
            raise ConfigError(f"adapter={directory}: {key}={settings[key]} is not supported; use {possible[0]}")
    return settings, tensors


def _read_layer(
    directory: Path, tensors: dict[str, torch.Tensor], layer: str, spec: LinearSpec, model: ModelConfig
) -> dict[str, torch.Tensor]:
    """Take the adapters of a layer from ``tensors`` and return gpt4d's parameters; empty if there are none."""
    adapter, weight, b_shape = registry.of(model).hugging_face(), f"{layer}.weight", spec.own_parameters[B].shape
    names = [f"{_PREFIX}{name.removesuffix('.weight')}" for name in adapter.names(weight, model)]
    if not any(f"{name}.lora_A.weight" in tensors for name in names):
        return {}
    transposed, rows, columns = _stores_rows_first(layer, torch.empty(b_shape), adapter, model), [], []
    for name, zeros in zip(names, adapter.to_hf(weight, torch.zeros(b_shape), model), strict=True):
        a = tensors.pop(f"{name}.lora_A.weight", torch.zeros(b_shape[0], spec.in_features)).float()
        b = tensors.pop(f"{name}.lora_B.weight", zeros.t() if transposed else zeros).float()
        b = b.t().contiguous() if transposed else b
        if a.shape != (b_shape[0], spec.in_features) or b.shape != zeros.shape:
            raise ConfigError(f"adapter={directory}: {name} has adapters of other shapes; use adapters of this model")
        rows.append(a.t())
        columns.append(b)
    b = adapter.from_hf(weight, columns, b_shape, model)
    return {f"{layer}.{A}": torch.cat(rows, 1).contiguous(), f"{layer}.{B}": b.contiguous()}


def _stores_rows_first(layer: str, b: torch.Tensor, adapter: Any, model: ModelConfig) -> bool:
    """Return whether transformers stores the weight of a layer as [in, out], as GPT-2's layers are."""
    one_row = b[:1]
    return adapter.to_hf(f"{layer}.weight", one_row, model)[0].shape[0] == 1


def _adapted_layers(model: ModelConfig) -> dict[str, LinearSpec]:
    """Return the layers of a model that have adapters, by name."""
    if model.lora is None:
        return {}

    def layers(spec: Any, prefix: str) -> Iterator[tuple[str, LinearSpec]]:
        if isinstance(spec, LinearSpec) and spec.adapter is not None:
            yield prefix.removesuffix("."), spec
        for name, child in spec.children.items():
            yield from layers(child, f"{prefix}{name}.")

    return dict(layers(registry.describe(model).spec, ""))
