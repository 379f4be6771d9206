"""Checks of the settings of diffusion. No torch here."""

from typing import Any

from gpt4d.config import Config, ConfigError
from gpt4d.data.checks import check_image_data


def check(config: Config) -> None:
    """Raise ConfigError unless the data can be read and samples can be drawn."""
    model: Any = config.model  # any family; all diffusion models have settings of images and of the diffusion
    check_image_data(config.data, model.name)
    if config.logging.sample_steps > model.timesteps:
        raise ConfigError(
            f"logging.sample_steps={config.logging.sample_steps}: more than model.timesteps={model.timesteps}; lower it"
        )
