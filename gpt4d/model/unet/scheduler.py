"""Conversion of the diffusion's settings to settings of a scheduler of diffusers, and back. No torch here."""

import math
from collections.abc import Mapping
from typing import Any

from gpt4d.model.hugging_face_settings import check_sizes, unsupported
from gpt4d.model.unet.config import UNetConfig

_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}
_MAX_BETA = 0.999


def to_diffusers(config: UNetConfig) -> dict[str, Any]:
    """Return the settings of a DDIMScheduler with the same timesteps and updates as gpt4d.task.diffusion_process.

    They are equal if the number of sampling steps divides ``model.timesteps``.
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
        "clip_sample": True,
        "clip_sample_range": 1.0,
        "thresholding": False,
        "set_alpha_to_one": True,
        "steps_offset": 0,
        "timestep_spacing": "trailing",
        "rescale_betas_zero_snr": False,
    }


def from_diffusers(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return gpt4d's settings for a ``scheduler_config.json``. Raises ConfigError for an unsupported diffusion."""
    steps = values.get("num_train_timesteps", 1000)
    check_sizes(source, {"num_train_timesteps": steps})
    schedules = {theirs: ours for ours, theirs in _SCHEDULES.items()}
    predictions = {theirs: ours for ours, theirs in _PREDICTIONS.items()}
    schedule, prediction = values.get("beta_schedule", "linear"), values.get("prediction_type", "epsilon")
    for key, value, choices in (
        ("beta_schedule", schedule, schedules),
        ("prediction_type", prediction, predictions),
        ("rescale_betas_zero_snr", values.get("rescale_betas_zero_snr", False), (False,)),
    ):
        if value not in choices:
            raise unsupported(source, key, value, " or ".join(map(str, choices)))
    settings = {
        "timesteps": steps,
        "noise_schedule": schedules[schedule],
        "prediction": predictions[prediction],
    }
    ours = to_diffusers(UNetConfig(**settings))
    if values.get("trained_betas") != ours["trained_betas"]:
        raise unsupported(source, "trained_betas", "…", ours["trained_betas"])
    for key in ("beta_start", "beta_end") if schedule == "linear" else ():
        if not math.isclose(value := values.get(key, ours[key]), ours[key], rel_tol=1e-6):
            raise unsupported(source, key, value, ours[key])
    return settings


def _betas(steps: int) -> tuple[float, float]:
    """Return the first and the last β of the linear schedule."""
    scale = 1000 / steps
    return scale * 1e-4, scale * 0.02
