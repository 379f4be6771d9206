"""Configurations of many overrides: Hydra composes each choice of files once, which takes 0.1 s."""

from copy import deepcopy
from functools import cache

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from gpt4d.config import CONFIG_DIR, Config
from gpt4d.config.composing import to_config
from gpt4d.data.completion import complete


@cache
def _composed(choices: tuple[str, ...]):
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose("train", overrides=list(choices))


def configured_quickly(overrides: list[str]) -> Config:
    """Return what ``configured`` returns for overrides that are well-formed, with keys and types that exist."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    settings = [each for each in parsed if "." in each.key_or_group]
    choices = {each.key_or_group: each.input_line for each in parsed if each not in settings}
    values = deepcopy(_composed(tuple(choices.values())))
    for each in settings:
        OmegaConf.update(values, each.key_or_group, each.value())
    return complete(to_config(values))
