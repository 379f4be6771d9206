"""Configurations of tests."""

from gpt4d.config import Config, compose
from gpt4d.data.completion import complete


def configured(overrides: list[str] | None = None) -> Config:
    """Return the completed configuration of command-line overrides, as the commands do."""
    return complete(compose(overrides))
