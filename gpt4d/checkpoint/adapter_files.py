"""Low-rank adapters in the format of peft, and merged into the weights of a model."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpt4d.checkpoint import storage
from gpt4d.checkpoint.model_directory import read_json
from gpt4d.checkpoint.source_weights import TensorFiles
from gpt4d.config import LORA_TARGETS, ConfigError, LoraConfig, ModelConfig, check_limits
from gpt4d.model import registry
from gpt4d.parallel.layers import lora
from gpt4d.parallel.layers.linear import LinearSpec
from gpt4d.parallel.layers.lora import A, B

# Settings of peft that gpt4d reads, and settings without an effect on saved adapters of linear layers.
_READ = "r", "lora_alpha", "target_modules"
_WITHOUT_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",  # peft reads it from the layer
    "inference_mode",
    "lora_dropout",
    "peft_version",
    "revision",
)
# Values of settings with which peft computes the same as gpt4d. All other settings must be ``_OFF``.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # other kinds change the weights of the model
    "layers_to_transform": (None,),  # false is the first layer
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "loftq_config": ({}, None),
    "megatron_core": ("megatron.core", None),
    "qalora_group_size": (16,),
}
_OFF: tuple[Any, ...] = None, False, [], ""  # not {}: some methods of peft are on with their default settings
SETTINGS, _WEIGHTS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


Reader = Callable[[str], torch.Tensor]  # returns a global tensor by its name


def merging(read: Reader, model: ModelConfig) -> Reader:
    """Return a reader of the parameters in float32, with the product of its adapters added to each adapted weight."""
    layers = _adapted_layers(model)

    def merged(name: str) -> torch.Tensor:
        weight, layer = read(name), name.removesuffix(".weight")
        if layer == name or layer not in layers:
            return weight
        spec = layers[layer]
        b = lora.spread(read(f"{layer}.{B}").float(), model.lora.scale, spec.pattern(spec.out_features))
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
        transposed |= _stores_rows_first(layer, b.shape, adapter, model)
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
    (out / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, out / _WEIGHTS, {"format": "pt"})
    (out / _WEIGHTS).chmod((out / SETTINGS).stat().st_mode)  # safetensors creates it unreadable for others


def read(directory: Path, model: ModelConfig) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return the settings and the tensors of adapters that peft has saved, as gpt4d's adapters of ``model``.

    If only some matrices of a fused layer have adapters, such as queries and values, its other matrices get zeros,
    which remain zeros in a training. Raises ConfigError for settings and tensors without an equivalent.
    """
    source = f"adapter={directory}"
    lora, modules = _read_settings(source, read_json(source, directory / SETTINGS))
    files = TensorFiles(source, [directory / _WEIGHTS])
    files.check_dtypes(files.names)
    found, targets, unread = dict[str, torch.Tensor](), set[str](), {*files.names}
    for layer, spec in _adapted_layers(replace(model, lora=lora)).items():
        own = _read_layer(files, modules, unread, layer, spec, model)
        if own:
            targets.add(layer.rpartition(".")[2])
            found |= own
    if unread or not found:
        problem = f"{min(unread)} is not an adapter of a layer" if unread else "no adapters of layers"
        raise ConfigError(f"{source}: {problem} that gpt4d supports; use adapters of linear layers of blocks")
    used = replace(lora, targets=[target for target in LORA_TARGETS if target in targets])
    order = [name for name in storage.shapes(replace(model, lora=used)) if name.endswith((A, B))]
    if missing := [name for name in order if name not in found]:
        raise ConfigError(f"{source}: {missing[0]} is missing; all blocks must have the same adapters")
    return used, {name: found[name] for name in order}


def _read_settings(source: str, settings: dict[str, Any]) -> tuple[LoraConfig, list[str]]:
    """Return gpt4d's settings and the target modules. Raises ConfigError if peft computes something else with them."""
    for key, value in settings.items():
        supported = _SUPPORTED.get(key, _OFF)
        known = any(type(value) is type(other) and value == other for other in supported)
        if key not in (*_READ, *_WITHOUT_EFFECT) and not known:
            raise ConfigError(f"{source}: {key}={value!r:.80} is not supported; use adapters with {supported[0]!r}")
    rank, alpha = settings.get("r", 8), settings.get("lora_alpha", 8)
    if type(rank) is not int or type(alpha) not in (int, float):
        raise ConfigError(f"{source}: r={rank!r:.80} and lora_alpha={alpha!r:.80} are not both numbers; correct them")
    lora, modules = LoraConfig(rank, alpha), settings.get("target_modules")
    try:
        check_limits(lora, "lora.")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error!s:.200}") from None
    if rank < 1 or not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ConfigError(f"{source}: r={rank}, target_modules={modules!r:.80}; use a rank above 0 and a list of names")
    return replace(lora, alpha=float(alpha)), modules


def _read_layer(
    files: TensorFiles, modules: list[str], unread: set[str], layer: str, spec: LinearSpec, model: ModelConfig
) -> dict[str, torch.Tensor]:
    """Return gpt4d's parameters of a layer, and remove peft's tensors from ``unread``; empty if there are none.

    Raises ConfigError unless the layers in ``modules`` have tensors, and no others.
    """
    adapter, weight, b_shape = registry.of(model).hugging_face(), f"{layer}.weight", spec.own_parameters[B].shape
    names = [name.removesuffix(".weight") for name in adapter.names(weight, model)]
    adapted = [any(f".{name}".endswith(f".{module}") for module in modules) for name in names]
    for name, targeted in zip(names, adapted, strict=True):
        for tensor in (f"{_PREFIX}{name}.lora_A.weight", f"{_PREFIX}{name}.lora_B.weight"):
            if targeted != (tensor in files.names):
                problem = "is missing" if targeted else "belongs to no target module"
                raise ConfigError(f"{files.source}: {tensor} {problem}, see target_modules; use an intact copy")
    if not any(adapted):
        return {}
    rank, rows, columns = b_shape[0], [], []
    transposed = _stores_rows_first(layer, b_shape, adapter, model)
    shapes = [part.shape for part in adapter.to_hf(weight, torch.empty(b_shape, device="meta"), model)]
    for name, shape, targeted in zip(names, shapes, adapted, strict=True):
        a, b = torch.zeros(rank, spec.in_features), torch.zeros(shape)
        if targeted:
            pair = [f"{_PREFIX}{name}.lora_{half}.weight" for half in "AB"]
            unread -= {*pair}
            a = files.read(pair[0], a.shape)
            b = files.read(pair[1], shape[::-1] if transposed else shape)
            b = b.t().contiguous() if transposed else b
        rows.append(a.t())
        columns.append(b)
    b = adapter.from_hf(weight, columns, b_shape, model)
    return {f"{layer}.{A}": torch.cat(rows, 1).contiguous(), f"{layer}.{B}": b.contiguous()}


def _stores_rows_first(layer: str, b_shape: Sequence[int], adapter: Any, model: ModelConfig) -> bool:
    """Return whether transformers stores the weight of a layer as [in, out], as GPT-2's layers are."""
    one_row = torch.empty(1, *b_shape[1:], device="meta")
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
