"""Every key of the configuration: another value changes no loss, or a resume refuses or reports it, or it is rejected.

The effect in gpt4d.config.identity decides which of the claims a key has to meet. A key without a row fails.
"""

import functools
import sys
from dataclasses import asdict, fields
from unittest import mock

import pytest

from gpt4d.config import (
    ConfigError,
    Effect,
    changes,
    check_changes,
    effect_of,
    known_keys,
    recorded_settings,
    unused_keys,
)
from gpt4d.data.preparation import identity_of
from gpt4d.model import registry
from gpt4d.validation import validate
from tests.evaluation.offline_tasks import write_tasks
from tests.support.grids import metric_lines, train_in_rank
from tests.support.settings import configured

# Other values of the keys that leave results unchanged, in as few runs as possible: processes and overrides.
NONE_RUN = (
    1,
    ["model.name=other", "data.name=other", "data.processes=1", "data.workers=0",
     "data.validation={a: tests/test_m*.py}", "parallel.timeout_s=600", "checkpoint.keep_best=a",
     "train.max_skipped=3", "train.validate_every=1", "train.validation_batches=1", "checkpoint.every=1",
     "checkpoint.keep=1", "checkpoint.keep_every=2", "checkpoint.async_save=false", "checkpoint.resume=never",
     "checkpoint.allow_changes=[optim.lr]", "run.dry=true", "run.world_size=2", "logging.every=3",
     "logging.trackers=[wandb]", "logging.project=other", "logging.online=true", "logging.sample_prompt=alpha",
     "logging.sample_tokens=2", "profile.steps=3",
     "evaluate.every=1", "evaluate.tasks=", "evaluate.limit=2", "evaluate.num_fewshot=1", "evaluate.batch_size=3",
     "run.name=other", "run.dir=", "data.cache_dir="],
)  # fmt: skip
CLUSTER = [
    "cluster.name=other", "cluster.device=cpu", "cluster.memory_gib=7", "cluster.margin=0.2", "cluster.host_gib=9",
    "cluster.reserved_gib=0.3", "cluster.communicator_gib=0.1",
    "cluster.peak_tflops=1", "cluster.matmul_tflops=0.1", "cluster.attention_tflops=0.05",
    "cluster.fp8_tflops=0.2",
    "cluster.memory_gb_s=6", "cluster.operation_us=10", "cluster.hidden=0.5", "cluster.skew_us=1",
    "cluster.levels=[{group_gb_s: 2}]",
    "cluster.measured=[{local: 2, gb_s: 2}]", "cluster.atp_gb_s={2x1: [1.5, null]}",
]  # fmt: skip
ROUNDING_RUNS = {
    "memory": (
        1,
        ["train.micro_batch_size=8", "train.activation_checkpointing=full", "train.loss_chunks=2",
         "train.compile=false", "train.deterministic=true", "parallel.chunks=2", "model.vocab_multiple=4",
         "parallel.cache_layers=1", "parallel.cache_scope=step"],
    ),
    "x": (2, ["parallel.gx=2", "parallel.sequence_parallel=true", "parallel.rank_order=yx",
              "parallel.overlap.all_reduce=false"]),
    "y": (2, ["parallel.gy=2", "parallel.scatter_heads=false"]),
    "z": (2, ["parallel.gz=2", "parallel.replicated_layers=1", "parallel.overlap.reduce_scatter=false",
              "parallel.overlap.prefetch=1"]),
    "data": (2, ["parallel.gdata=2", "parallel.overlap.data=false", "optim.shard_states=true",
                 "parallel.overlap.all_gather=false"]),
    "context": (2, ["parallel.context=2", "parallel.context_exchange=ring"]),
    "atp": (2, ["parallel.mode=atp", "parallel.d1=2", "parallel.d2=1", *CLUSTER]),
    "stages": (2, ["parallel.pipeline.stages=2", "parallel.pipeline.cuts=[1]", "parallel.pipeline.schedule=gpipe",
                   "parallel.pipeline.stage_grids=[1x1x1x1,1x1x1x1]", "parallel.pipeline.microbatches=4",
                   "parallel.pipeline.strategy=send_recv"]),
    "chunks": (2, ["parallel.pipeline.stages=2", "parallel.pipeline.schedule=interleaved_1f1b", "model.layers=4",
                   "parallel.pipeline.chunks_per_stage=2"]),
    "experts": (4, ["model=moe_tiny", "parallel.gz=2", "parallel.expert_data=true"]),
}  # fmt: skip
OF_THE_MODEL = {"model", "model.layers"}  # the model of such a run
LENGTHS = {"train.steps": "9", "train.tokens": "9e9", "train.epochs": "9"}
ROPE = ["model.rope_scaling=llama3", "model.rope_factor=8", "model.rope_original_positions=32"]
FAMILIES = {
    "gpt2": ["model=gpt_tiny"], "llama": ["model=llama_tiny", *ROPE], "olmo2": ["model=olmo2_tiny", *ROPE],
    "gemma3": ["model=gemma3_tiny"], "moe": ["model=moe_tiny"], "unet": ["model=unet_tiny"],
}  # fmt: skip
BASES = FAMILIES | {"muon": ["optim=muon"]}  # other values of keys are set in addition to these overrides
RESULTS = {
    "gpt2": {
        "model.vocab_size": 301, "model.layers": 3, "model.hidden": 28, "model.heads": 2, "model.max_positions": 64,
        "model.dropout": 0.1, "model.attention_dropout": 0.1, "model.norm_epsilon": 1e-6, "data.shuffle": "false",
        "data.stream": "true", "data.reset_attention": "true", "train.seq_len": 8,
        "train.batch_size": 4, "train.batch_ramp": "[[0,4],[64,8]]", "train.seed": 1,
        "train.precision": "bf16", "train.skip_spikes": "true", "train.z_loss": 1e-3, "optim.lr": 1e-4,
        "optim.min_lr_ratio": 0.2,
        "optim.warmup_steps": 2, "optim.schedule_steps": 30, "optim.schedule": "linear", "optim.decay_fraction": 0.3,
        "optim.decay_shape": "linear", "optim.decay_from": 99, "optim.beta1": 0.8, "optim.beta2": 0.9,
        "optim.epsilon": 1e-6, "optim.weight_decay": 0, "optim.clip_norm": 0, "optim.ema_decay": 0.9,
        "checkpoint.init": "runs/other", "lora.rank": 2, "lora.alpha": 3, "lora.targets": "[qkv]",
        "model.base_hidden": 32, "optim.width_transfer": "true",
        "optim.algorithm": "adamw", "optim.lr_factors.matrices": 2, "optim.lr_factors.embeddings": 2,
        "optim.lr_factors.head": 2, "optim.lr_factors.adapters": 2, "optim.lr_factors.vectors": 2,
        "optim.weight_decays.matrices": 0.2, "optim.weight_decays.embeddings": 0.2, "optim.weight_decays.head": 0.2,
        "optim.weight_decays.adapters": 0.2, "optim.weight_decays.vectors": 0.2,
    },
    "muon": {
        "optim.muon.momentum": 0.9, "optim.muon.nesterov": "false", "optim.muon.steps": 6,
        "optim.muon.coefficients": "[2,-1.5,0.5]", "optim.muon.epsilon": 1e-6, "optim.muon.scale": "original",
    },
    "llama": {
        "model.key_value_heads": 4, "model.head_size": 16, "model.inner": 512, "model.tied": "false",
        "model.qkv_bias": "true", "model.qk_norm": "true", "model.rope_theta": 100, "model.rope_scaling": "none",
        "model.rope_factor": 2, "model.rope_original_positions": 64, "model.rope_low_frequency": 2,
        "model.rope_high_frequency": 5, "model.rope_beta_slow": 2, "model.rope_beta_fast": 16,
        "model.rope_truncate": "false", "model.rope_attention_factor": 2,
    },
    "olmo2": {
        "model.key_value_heads": 4, "model.head_size": 16, "model.inner": 512, "model.norm_epsilon": 1e-5,
        "model.max_positions": 512, "model.rope_theta": 100, "model.rope_scaling": "linear", "model.rope_factor": 2,
        "model.rope_original_positions": 64, "model.rope_low_frequency": 2, "model.rope_high_frequency": 5,
        "model.rope_beta_slow": 2, "model.rope_beta_fast": 16, "model.rope_truncate": "false",
        "model.rope_attention_factor": 2,
    },
    "gemma3": {
        "model.window": 32, "model.global_every": 3, "model.query_pre_attn_scalar": 64,
        "model.rope_linear_factor": 2, "model.rope_local_theta": 100,
    },
    "moe": {
        "model.experts": 4, "model.experts_per_token": 3, "model.shared_inner": 32, "model.router": "sigmoid",
        "model.normalized_weights": "false", "model.balance": "bias", "model.balance_rate": 0.02,
        "model.router_z_loss": 1e-3, "model.qk_norm": "heads",
    },
    "unet": {
        "model.image_size": 16, "model.image_channels": 1, "model.channels": 64, "model.multipliers": "[1,2,2,4]",
        "model.blocks_per_level": 2, "model.attention_at": "[8]", "model.groups": 16, "model.timesteps": 500,
        "model.noise_schedule": "linear", "model.base_channels": 16, "model.prediction": "epsilon",
        "data.flip": "false",
    },
}  # fmt: skip
DATA = {  # a source that reads the key, and another value
    "data.source": (["data=text"], "parquet"),
    "data.path": (["data=text"], "tests/test_m*.py"),
    "data.subset": (["data=c4"], "fr"),
    "data.split": (["data=c4"], "test"),
    "data.column": (["data=jsonl"], "title"),
    "data.skip_empty": (["data=text"], "true"),
    "data.tokenizer": (["data=text", "model.vocab_size=50257"], "gpt2"),
    "data.tokenizer_vocab": (["data=text"], "300"),
    "data.chat_template": (["data=chat", "data.tokenizer=gpt2", "model.vocab_size=50257"], "tests/__init__.py"),
    "data.train_on": (["data=chat", "data.tokenizer=gpt2", "model.vocab_size=50257"], "all"),
    "data.validation_fraction": (["data=text"], "0.2"),
    "data.blend": (["data=blend"], "{b: 1}"),
}
UNUSED_ON_A_CPU = {"train.cuda_graphs": "true"}  # tests/parallel/test_cuda_graphs.py compares the losses
UNUSED_WITHOUT_AVERAGES = {"optim.validate_averages": "true"}  # tests/task/test_validation_sets.py compares losses
OF_THE_PLANNER = {"model.imbalance": "2"}
UNUSED_ON_TEXT = {"data.skip_long": "false", "logging.sample_images": "8", "logging.sample_steps": "8"}


def keys_of(overrides):
    return {override.partition("=")[0] for override in overrides}


def test_every_key_has_a_row_for_its_effect():
    rows = {
        Effect.NONE: keys_of(NONE_RUN[1])
        | {*UNUSED_ON_TEXT, *UNUSED_ON_A_CPU, *UNUSED_WITHOUT_AVERAGES, *OF_THE_PLANNER},
        Effect.ROUNDING: {key for _, words in ROUNDING_RUNS.values() for key in keys_of(words)} - OF_THE_MODEL,
        Effect.LENGTH: set(LENGTHS),
        Effect.RESULTS: {key for values in RESULTS.values() for key in values},
        Effect.DATA: set(DATA),
    }
    # Other tests register families of their own, and known_keys() includes their settings.
    own = {f"model.{field.name}" for family in FAMILIES for field in fields(registry.get(family).config)}
    possible = {key for key in known_keys() if not key.startswith("model.") or key in own}
    for effect, keys in rows.items():
        assert keys == {key for key in possible if effect_of(key) is effect}, effect


@functools.cache
def default_of(base):
    return configured(BASES[base])


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [(base, key, value) for base, values in RESULTS.items() for key, value in values.items()],
)
def test_another_value_of_a_key_with_results_is_refused_or_rejected(base, key, value):
    before = default_of(base)
    try:
        after = configured([*BASES[base], f"{key}={value}"])
        validate(after, 1)
    except ConfigError as error:
        assert key in str(error)
        return
    found = changes(recorded_settings(asdict(before)), recorded_settings(asdict(after)))
    with pytest.raises(ConfigError, match=rf"{key}=.*checkpoint\.allow_changes=\[.*{key}"):
        check_changes(found, [], "runs/a")


@pytest.mark.parametrize(("key", "value"), LENGTHS.items())
def test_another_length_is_found_and_not_refused(key, value):
    before, after = configured(), configured([f"{key}={value}"])
    found = changes(recorded_settings(asdict(before)), recorded_settings(asdict(after)))
    assert key in found
    check_changes(found, [], "runs/a")


@pytest.mark.parametrize(("key", "value"), (UNUSED_ON_TEXT | UNUSED_ON_A_CPU | UNUSED_WITHOUT_AVERAGES).items())
def test_keys_that_a_text_on_a_cpu_does_not_read_are_rejected(key, value):
    assert key in unused_keys(configured(["cluster=local", f"{key}={value}"]))


@pytest.mark.parametrize(("key", "source", "value"), [(key, *row) for key, row in DATA.items()])
def test_another_value_of_a_key_of_the_data_makes_other_data(key, source, value, tmp_path):
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        (tmp_path / name).write_text("words")
    lines = f"data.path={tmp_path}/a.jsonl"
    paths = {"data=text": f"data.path={tmp_path}/a.*", "data=jsonl": lines, "data=chat": lines}
    base = [*source, *([paths[source[0]]] if source[0] in paths else [])]
    before, after = configured(base).data, configured([*base, f"{key}={value}"]).data
    if key == "data.blend":
        assert before.blend != after.blend  # the fingerprints of the directories are compared by Task.identity
    else:
        assert identity_of(before) != identity_of(after)


def train_with_a_tracker_that_ignores(config):
    """Trains with a stand-in of wandb, which needs no network and no process."""
    imported = sys.modules.get("wandb")
    sys.modules["wandb"] = mock.MagicMock(__spec__=mock.sentinel.spec)
    try:
        train_in_rank(config)
    finally:
        if imported:
            sys.modules["wandb"] = imported
        else:
            del sys.modules["wandb"]


def losses_of(ranks, tiny, directory, name, world, words):
    run_dir = directory / name
    given = {
        "run.dir=": f"run.dir={run_dir}",
        "data.cache_dir=": f"data.cache_dir={directory / 'cache'}",
        "evaluate.tasks=": f"evaluate.tasks=[{write_tasks(directory)['choices']}]",
    }
    words = [given.get(word, word) for word in words]
    config = tiny("train.steps=3", "optim.warmup_steps=1", f"run.dir={run_dir}", *words)
    ranks.run(world, train_with_a_tracker_that_ignores, config)
    return {line["step"]: line["loss"] for line in metric_lines(run_dir)}


@pytest.fixture(scope="module")
def references():
    return {}


def reference(references, ranks, tiny, directory, *words):
    if words not in references:
        references[words] = losses_of(ranks, tiny, directory, "reference", 1, words)
    return references[words]


def test_keys_without_effect_change_no_bit_of_a_loss(ranks, tiny, references, tmp_path):
    expected = reference(references, ranks, tiny, tmp_path)
    assert set(expected) == {1, 2, 3}
    found = losses_of(ranks, tiny, tmp_path, "other", *NONE_RUN)
    assert found and found == {step: expected[step] for step in found}


@pytest.mark.parametrize("name", ROUNDING_RUNS)
def test_keys_that_change_rounding_change_losses_no_further(ranks, tiny, references, tmp_path, name):
    world, words = ROUNDING_RUNS[name]
    model = [word for word in words if word.partition("=")[0] in OF_THE_MODEL]
    expected = reference(references, ranks, tiny, tmp_path, *model)
    found = losses_of(ranks, tiny, tmp_path, "other", world, words)
    assert found == pytest.approx(expected, rel=1e-5)
