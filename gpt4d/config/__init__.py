"""The settings: ``schema`` says which there are, ``composing`` reads them, ``checks`` refuses what cannot be."""

from gpt4d.config.checks import check_data, grid_problem, profiled_steps, tokenizer_file, validate, value_of
from gpt4d.config.composing import CONFIG_DIR, compose, explained, from_arguments, known_keys, typed
from gpt4d.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    ConfigError,
    DataConfig,
    GridSizes,
    LevelConfig,
    MeasuredConfig,
    ModelConfig,
    NodeError,
    OptimConfig,
    OverlapConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [
    "CONFIG_DIR",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "GridSizes",
    "LevelConfig",
    "MeasuredConfig",
    "ModelConfig",
    "NodeError",
    "OptimConfig",
    "OverlapConfig",
    "ParallelConfig",
    "TrainConfig",
    "check_data",
    "compose",
    "explained",
    "from_arguments",
    "grid_problem",
    "known_keys",
    "profiled_steps",
    "tokenizer_file",
    "typed",
    "validate",
    "value_of",
]
