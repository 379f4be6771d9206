"""Settings: definitions (``schema``), composition (``composing``) and checks (``fields``, ``checks``)."""

# Other packages import these names from here.
# ruff: noqa: F401

from gpt4d.config.batch_ramp import batch_size_at, batch_sizes, samples_of, steps_for
from gpt4d.config.checks import (
    FLOAT8_MULTIPLE,
    Divisibility,
    check_run,
    check_values,
    chunk_problem,
    grid_problem,
    profiled_steps,
)
from gpt4d.config.composing import (
    CONFIG_DIR,
    compose,
    expand_cluster,
    format_for_hydra,
    from_arguments,
    read_cluster,
    register_model,
    to_config,
    to_config_error,
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
    LARGEST_COUNT,
    LARGEST_SIZE,
    SIZE,
    Effect,
    check_limits,
    redefined,
    setting,
)
from gpt4d.config.identity import (
    Change,
    changes,
    check_allowed,
    check_changes,
    effect_of,
    is_allowed,
    recorded_settings,
)
from gpt4d.config.keys import known_keys
from gpt4d.config.length import length_key, samples_of_run, with_epochs, with_steps
from gpt4d.config.overrides import asks_for_help, flag_error
from gpt4d.config.pipeline import (
    check_pipeline,
    pipeline_microbatches,
    possible_microbatches,
    stage_sizes,
    with_stages,
)
from gpt4d.config.reference import train_help
from gpt4d.config.schema import (
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
from gpt4d.config.unused import check_unused, conditional_keys, unused_keys
from gpt4d.config.values import (
    check_at_least,
    check_choice,
    check_image_format,
    divisors,
    flattened,
    shortened,
    value_of,
)
from gpt4d.runtime.errors import ConfigError, NodeError, printable
