"""Conversion of the diffusion's settings to settings of a scheduler of diffusers, and back. No torch here."""

import math
from collections.abc import Mapping
from typing import Any

from gpt4d.model.hugging_face_settings import check_sizes, check_supported, unsupported
from gpt4d.model.unet.config import UNetConfig

_SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
_PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction"}
_SPACINGS = "leading", "trailing"
_FILE = "scheduler_config.json"
_MAX_BETA = 0.999
# Supported values of settings whose other values change the samples. The first ones are the defaults of diffusers. The
# variance has no effect on samples without noise, but a learned one is an output of the model.
_SUPPORTED = {
    "_class_name": ("DDIMScheduler", "DDPMScheduler"),
    "rescale_betas_zero_snr": (False, None),
    "thresholding": (False, None),
    "set_alpha_to_one": (True,),
    "steps_offset": (0,),
    "variance_type": ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
}


def to_diffusers(config: UNetConfig) -> dict[str, Any]:
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


def from_diffusers(source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return gpt4d's settings for a ``scheduler_config.json``. Raises ConfigError for an unsupported diffusion.

    The samples equal the samples of a DDIMScheduler with these settings, also for a DDPMScheduler.
    """
    check_supported(source, values, _SUPPORTED, _FILE)
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
            raise unsupported(source, key, value, " or ".join(choices), _FILE)
    clips, clip_range = values.get("clip_sample", True), values.get("clip_sample_range", 1.0)
    if clips and not clip_range > 0:
        raise unsupported(source, "clip_sample_range", clip_range, "a number above 0", _FILE)
    settings = {
        "timesteps": steps,
        "noise_schedule": schedules[schedule],
        "prediction": predictions[prediction],
        "clip_range": float(clip_range) if clips else 0.0,
        "timestep_spacing": spacing,
    }
    ours = to_diffusers(UNetConfig(**settings))
    if values.get("trained_betas") != ours["trained_betas"]:
        raise unsupported(source, "trained_betas", "…", ours["trained_betas"], _FILE)
    for key, default in (("beta_start", 1e-4), ("beta_end", 0.02)) if schedule == "linear" else ():
        if not math.isclose(value := values.get(key, default), ours[key], rel_tol=1e-6):
            raise unsupported(source, key, value, ours[key], _FILE)
    return settings


def _betas(steps: int) -> tuple[float, float]:
    """Return the first and the last β of the linear schedule."""
    scale = 1000 / steps
    return scale * 1e-4, scale * 0.02
