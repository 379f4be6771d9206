"""Settings: definitions (``schema``), composition (``composing``) and checks (``fields``, ``checks``)."""

# Other packages import these names from here.
# ruff: noqa: F401

from gpt4d.config.checks import Divisibility, check_run, check_unused, check_values, grid_problem, profiled_steps
from gpt4d.config.composing import (
    CONFIG_DIR,
    asks_for_help,
    compose,
    flag_error,
    from_arguments,
    read_cluster,
    to_config,
)
from gpt4d.config.data_files import (
    CHECKPOINT,
    HEADER,
    PREPARED,
    BlendStage,
    blend_paths,
    blend_stages,
    file_source,
    is_megatron,
    is_remote,
    matching_files,
    newest_file,
    patterns,
    suffix_source,
    tokenizer_file,
    written_source,
)
from gpt4d.config.fields import (
    COUNT,
    FRACTION,
    SIZE,
    Effect,
    check_at_least,
    check_choice,
    check_image_format,
    check_limits,
    divisors,
    flattened,
    redefined,
    setting,
    shortened,
    value_of,
)
from gpt4d.config.keys import Change, changes, check_changes, effect_of, known_keys, recorded_settings
from gpt4d.config.length import batch_size_at, batch_sizes, length_key, samples_of_run, with_epochs
from gpt4d.config.pipeline import check_pipeline, possible_microbatches, with_stages
from gpt4d.config.reference import train_help
from gpt4d.config.schema import (
    GRID_KEYS,
    HELD_OUT,
    LORA_TARGETS,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    GridSizes,
    LevelConfig,
    LoraConfig,
    MeasuredConfig,
    ModelConfig,
    MuonConfig,
    OptimConfig,
    OverlapConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from gpt4d.runtime.errors import ConfigError
