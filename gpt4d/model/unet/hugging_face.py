"""Weights under the names and shapes of diffusers' UNet2DModel, its settings, and those of its scheduler.

diffusers stores linear weights as [out, in], and queries, keys and values as separate tensors. It orders
concatenated channels by part; gpt4d interleaves them (gpt4d.parallel.layers.sharding.interleaved_order).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpt4d.config import ConfigError
from gpt4d.model.hugging_face import check_sizes, check_supported, unsupported
from gpt4d.model.unet.config import UNetConfig, blocks
from gpt4d.parallel.layers.sharding import interleaved_order
from gpt4d.parallel.lazy import torch

FOLDER, FILE = "unet", "diffusion_pytorch_model"
CLASS = "diffusers.DDIMPipeline"
PIPELINE_TAG = "unconditional-image-generation"
USAGE = """from diffusers import DDIMPipeline

pipeline = DDIMPipeline.from_pretrained("PATH")
pipeline(num_inference_steps=50, use_clipped_model_output=True).images[0].save("image.png")
"""
HAS_TOKENIZER = False
kinds = ("UNet2DModel",)
BASE, BUFFERS = "", ""

_OUTSIDE = {
    "time.up": "time_embedding.linear_1",
    "time.down": "time_embedding.linear_2",
    "input": "conv_in",
    "norm": "conv_norm_out",
    "output": "conv_out",
}
_RESNET = {
    "first_norm": "norm1",
    "first": "conv1",
    "time.linear": "time_emb_proj",
    "second_norm": "norm2",
    "second": "conv2",
    "shortcut": "conv_shortcut",
}
_ATTENTION = {
    "attention.norm": ("group_norm",),
    "attention.qkv": ("to_q", "to_k", "to_v"),
    "attention.output": ("to_out.0",),
}
_LINEAR = ("time.up", "time.down", "time.linear", "attention.output")
_IN_FIRST = ("shortcut", "output")  # convolutions whose weight is stored [in, out, kh, kw]
_OF_INPUT = ("first_norm", "first", "shortcut")  # layers whose input has the channels of the block's input
_REQUIRED = {
    "resnet_time_scale_shift": "scale_shift",
    "time_embedding_type": "positional",
    "time_embedding_dim": None,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "center_input_sample": False,
    "act_fn": "silu",
    "downsample_type": "conv",
    "upsample_type": "conv",
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2D",
    "add_attention": True,
    "class_embed_type": None,
    "num_class_embeds": None,
}
_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}
_SPACINGS = "leading", "trailing"
_SCHEDULER_FILE = "scheduler_config.json"
_MAX_BETA = 0.999
# Supported values of settings whose other values change the samples. The first ones are the defaults of diffusers. The
# variance has no effect on samples without noise, but a learned one is an output of the model.
_SCHEDULERS = {
    "_class_name": ("DDIMScheduler", "DDPMScheduler"),
    "rescale_betas_zero_snr": (False, None),
    "thresholding": (False, None),
    "set_alpha_to_one": (True,),
    "steps_offset": (0,),
    "variance_type": ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
}


def names(name: str, config: UNetConfig) -> list[str]:
    """Return diffusers' names of gpt4d's parameter ``name``: three names for queries, keys and values."""
    layer, kind = _layer(name)
    if (number := _block(name)) is None:
        return [f"{_OUTSIDE[layer]}.{kind}"]
    place = _places(len(config.multipliers), config.blocks_per_level)[number]
    if layer == "conv":
        return [f"{place.sampler}.conv.{kind}"]
    if layer in _ATTENTION:
        return [f"{place.attention}.{part}.{kind}" for part in _ATTENTION[layer]]
    return [f"{place.resnet}.{_RESNET[layer]}.{kind}"]


def copies(config: UNetConfig) -> dict[str, str]:
    """Return no names: files of diffusers contain every tensor once."""
    return {}


def to_hf(name: str, tensor: torch.Tensor, config: UNetConfig) -> list[torch.Tensor]:
    """Return gpt4d's global tensor in diffusers' format: one tensor for each of ``names``."""
    layer, kind = _layer(name)
    if (order := _stored_order(name, config)) is not None:
        tensor = tensor.index_select(_channel_dim(layer, kind), order.argsort().to(tensor.device))
    if layer == "attention.qkv":
        return [part.t().contiguous() if kind == "weight" else part for part in tensor.unbind(-2)]
    if layer in _LINEAR:
        return [tensor.flatten(1).t().contiguous() if kind == "weight" else tensor.flatten()]
    if layer in _IN_FIRST and kind == "weight":
        tensor = tensor.transpose(0, 1)
    return [tensor.contiguous()]


def from_hf(name: str, tensors: Sequence[torch.Tensor], shape: tuple[int, ...], config: UNetConfig) -> torch.Tensor:
    """Return diffusers' tensors as gpt4d's global tensor of ``shape``: the inverse of ``to_hf``."""
    layer, kind = _layer(name)
    if layer == "attention.qkv":
        return torch.stack([part.t() if kind == "weight" else part for part in tensors], -2).contiguous()
    (tensor,) = tensors
    if layer in _LINEAR:
        return (tensor.t() if kind == "weight" else tensor).reshape(shape)
    if layer in _IN_FIRST and kind == "weight":
        tensor = tensor.transpose(0, 1)
    if (order := _stored_order(name, config)) is not None:
        tensor = tensor.index_select(_channel_dim(layer, kind), order.to(tensor.device))
    return tensor.contiguous()


def documents(config: UNetConfig, source: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the files of a DDIMPipeline."""
    return {
        "model_index.json": {
            "_class_name": "DDIMPipeline",
            "scheduler": ["diffusers", "DDIMScheduler"],
            "unet": ["diffusers", "UNet2DModel"],
        },
        "unet/config.json": hf_config(config),
        "scheduler/scheduler_config.json": scheduler_to_hf(config),
    }


def hf_config(config: UNetConfig) -> dict[str, Any]:
    """Return the settings of such a UNet2DModel. Raises ConfigError if diffusers has no such model."""
    if (first := config.multipliers[0]) != 1:
        raise ConfigError(
            f"model.multipliers={config.multipliers}: the first convolution of diffusers' UNet2DModel needs "
            f"model.channels={config.channels} to equal the channels of the first level; export a model "
            f"whose first multiplier is 1, such as model.channels={first * config.channels}"
        )
    sizes = [config.image_size >> level for level in range(len(config.multipliers))]
    attended = [size in config.attention_at for size in sizes]
    return {
        "_class_name": "UNet2DModel",
        "sample_size": config.image_size,
        "in_channels": config.image_channels,
        "out_channels": config.image_channels,
        "block_out_channels": [config.channels * multiplier for multiplier in config.multipliers],
        "down_block_types": ["AttnDownBlock2D" if attention else "DownBlock2D" for attention in attended],
        "up_block_types": ["AttnUpBlock2D" if attention else "UpBlock2D" for attention in reversed(attended)],
        "layers_per_block": config.blocks_per_level,
        "attention_head_dim": config.head_size,
        "norm_num_groups": config.groups,
        "attn_norm_num_groups": config.groups,  # otherwise the attention in the middle has no norm
        "norm_eps": config.norm_epsilon,
        "dropout": config.dropout,
        **_REQUIRED,
    }


def config_from_hf(source: str, values: dict) -> UNetConfig:
    """Return gpt4d's settings for a ``config.json``. Raises ConfigError for unsupported settings.

    ``values["scheduler"]`` has the settings of a pipeline's scheduler. Without it the diffusion has its defaults.
    """
    widths, layers = values.get("block_out_channels") or [0], values.get("layers_per_block")
    size, attention = values.get("sample_size"), values.get("attention_head_dim")
    attended = ["Attn" in kind for kind in values.get("down_block_types") or []]
    plain = {False: ("DownBlock2D", "UpBlock2D"), True: ("AttnDownBlock2D", "AttnUpBlock2D")}
    required = dict(_REQUIRED) | {
        "down_block_types": [plain[flag][0] for flag in attended],
        "up_block_types": [plain[flag][1] for flag in reversed(attended)],
        "in_channels": values.get("out_channels"),
        "attn_norm_num_groups": values.get("norm_num_groups"),
    }
    for key, value in required.items():
        if values.get(key) != value:
            raise unsupported(source, key, values.get(key), repr(value))
    check_sizes(source, {"sample_size": size, "layers_per_block": layers, "attention_head_dim": attention})
    if any(width % widths[0] for width in widths):
        raise ConfigError(f"{source}: block_out_channels={widths} in config.json: not multiples of the first one")
    assert size is not None and layers is not None and attention is not None
    return UNetConfig(
        name=source,
        image_size=size,
        image_channels=values["in_channels"],
        channels=widths[0],
        multipliers=[width // widths[0] for width in widths],
        blocks_per_level=layers,
        attention_at=[size >> level for level, flag in enumerate(attended) if flag],
        head_size=attention,
        groups=values.get("norm_num_groups", 32),
        dropout=values.get("dropout", 0.0),
        norm_epsilon=values.get("norm_eps", 1e-5),
        **(scheduler_from_hf(source, values["scheduler"]) if "scheduler" in values else {}),
    )


class _Place(NamedTuple):
    """Names of diffusers' modules."""

    resnet: str
    attention: str
    sampler: str


@functools.cache
def _places(levels: int, blocks_per_level: int) -> list[_Place]:
    """Return the location of each of gpt4d's blocks in a UNet2DModel."""

    def place(kind: str, number: int, layer: int) -> _Place:
        block = f"{kind}_blocks.{number}" if kind != "mid" else "mid_block"
        return _Place(f"{block}.resnets.{layer}", f"{block}.attentions.{layer}", f"{block}.{kind}samplers.0")

    down = [
        place("down", level, layer)
        for level in range(levels)
        for layer in range(blocks_per_level + (level < levels - 1))  # the last one is the change of level
    ]
    up = [
        place("up", number, layer)
        for number in range(levels)
        for layer in range(blocks_per_level + 1 + (number < levels - 1))
    ]
    return [*down, place("mid", 0, 0), place("mid", 0, 1), *up]


def _block(name: str) -> int | None:
    """Return the index of the block that owns a parameter; None outside the blocks."""
    return int(name.split(".")[1]) if name.startswith("blocks.") else None


def _layer(name: str) -> tuple[str, str]:
    """Return the layer's name, relative to its block inside the blocks, and "weight" or "bias"."""
    layer, _, kind = name.rpartition(".")
    return (layer if _block(name) is None else layer.split(".", 2)[2]), kind


def _channel_dim(layer: str, kind: str) -> int:
    """Return the dim of a stored tensor that contains the channels of a layer's input."""
    return 1 if layer == "first" and kind == "weight" else 0


def _stored_order(name: str, config: UNetConfig) -> torch.Tensor | None:
    """Return the index in diffusers' order of each stored input channel; None if both orders are equal."""
    layer, kind = _layer(name)
    number = _block(name)
    if number is None or layer not in _OF_INPUT or (kind == "bias" and layer != "first_norm"):
        return None
    channels = blocks(config)[number].in_channels
    return torch.tensor(interleaved_order(channels)) if len(channels) > 1 else None


def scheduler_to_hf(config: UNetConfig) -> dict[str, Any]:
    """Return the settings of a DDIMScheduler with the same timesteps and updates as gpt4d.task.diffusion_process.

    They are equal if the number of sampling steps divides ``model.timesteps``, or if the timesteps are leading.
    """
    start, end = _betas(config.timesteps)
    betas = None
    if config.noise_schedule == "linear" and end > _MAX_BETA:  # diffusers does not clamp
        last = config.timesteps - 1
        betas = [min(start + (end - start) * step / max(last, 1), _MAX_BETA) for step in range(config.timesteps)]
    return {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": config.timesteps,
        "beta_schedule": _SCHEDULES[config.noise_schedule],
        "beta_start": start,
        "beta_end": end,
        "trained_betas": betas,
        "prediction_type": _PREDICTIONS[config.prediction],
        "clip_sample": config.clip_range > 0,
        "clip_sample_range": config.clip_range or 1.0,
        "thresholding": False,
        "set_alpha_to_one": True,
        "steps_offset": 0,
        "timestep_spacing": config.timestep_spacing,
        "rescale_betas_zero_snr": False,
    }


def scheduler_from_hf(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return gpt4d's settings for a ``scheduler_config.json``. Raises ConfigError for an unsupported diffusion.

    The samples equal the samples of a DDIMScheduler with these settings, also for a DDPMScheduler.
    """
    check_supported(source, values, _SCHEDULERS, _SCHEDULER_FILE)
    steps = values.get("num_train_timesteps", 1000)
    check_sizes(source, {"num_train_timesteps": steps})
    schedules = {theirs: ours for ours, theirs in _SCHEDULES.items()}
    predictions = {theirs: ours for ours, theirs in _PREDICTIONS.items()}
    schedule, prediction = values.get("beta_schedule", "linear"), values.get("prediction_type", "epsilon")
    spacing = values.get("timestep_spacing", "leading")
    for key, value, choices in (
        ("beta_schedule", schedule, [*schedules]),
        ("prediction_type", prediction, [*predictions]),
        ("timestep_spacing", spacing, _SPACINGS),
    ):
        if value not in choices:
            raise unsupported(source, key, value, " or ".join(choices), _SCHEDULER_FILE)
    clips, clip_range = values.get("clip_sample", True), values.get("clip_sample_range", 1.0)
    if clips and not clip_range > 0:
        raise unsupported(source, "clip_sample_range", clip_range, "a number above 0", _SCHEDULER_FILE)
    settings = {
        "timesteps": steps,
        "noise_schedule": schedules[schedule],
        "prediction": predictions[prediction],
        "clip_range": float(clip_range) if clips else 0.0,
        "timestep_spacing": spacing,
    }
    ours = scheduler_to_hf(UNetConfig(**settings))
    if values.get("trained_betas") != ours["trained_betas"]:
        raise unsupported(source, "trained_betas", "…", ours["trained_betas"], _SCHEDULER_FILE)
    for key, default in (("beta_start", 1e-4), ("beta_end", 0.02)) if schedule == "linear" else ():
        if not math.isclose(value := values.get(key, default), ours[key], rel_tol=1e-6):
            raise unsupported(source, key, value, ours[key], _SCHEDULER_FILE)
    return settings


def _betas(steps: int) -> tuple[float, float]:
    """Return the first and the last β of the linear schedule."""
    scale = 1000 / steps
    return scale * 1e-4, scale * 0.02
