"""Every key of the configuration: another value changes no loss, or a resume refuses or reports it, or it is rejected.

The effect in gpt4d.config.keys decides which of the claims a key has to meet. A key without a row fails.
"""

import sys
from dataclasses import asdict, fields, replace
from unittest import mock

import hydra
import pytest
from omegaconf import OmegaConf

from gpt4d.config import (
    CONFIG_DIR,
    ConfigError,
    Effect,
    changes,
    check_changes,
    effect_of,
    known_keys,
    recorded_settings,
    value_of,
)
from gpt4d.config.composing import to_config
from gpt4d.config.keys import settings
from gpt4d.data.completion import complete
from gpt4d.data.preparation import identity_of
from gpt4d.model import registry
from gpt4d.validation import validate
from tests.evaluation.offline_tasks import write_tasks
from tests.support.chat import write_tokenizer
from tests.support.grids import metric_lines, train_in_rank
from tests.support.settings import configured

# Other values of the keys that leave results unchanged, in as few runs as possible: processes and overrides.
NONE_RUN = (
    1,
    ["model.name=other", "data.name=other", "data.processes=1", "data.workers=0",
     "data.validation=", "parallel.timeout_s=600", "checkpoint.keep_best=a",
     "train.max_skipped=3", "train.validate_every=1", "train.validation_batches=1", "checkpoint.every=1",
     "checkpoint.keep=1", "checkpoint.keep_every=2", "checkpoint.async_save=false", "checkpoint.resume=never",
     "checkpoint.allow_changes=[optim.lr]", "run.dry=true", "run.world_size=2", "logging.every=3",
     "logging.trackers=[wandb]", "logging.project=other", "logging.online=true", "logging.sample_prompt=alpha",
     "logging.sample_tokens=2", "profile.steps=3",
     "evaluate.every=1", "evaluate.tasks=", "evaluate.limit=2", "evaluate.num_fewshot=1", "evaluate.batch_size=3",
     "evaluate.allow_code=true",
     "run.name=other", "run.dir=", "data.cache_dir="],
)  # fmt: skip
CLUSTER = [
    "cluster.name=other", "cluster.device=cpu", "cluster.memory_gib=7", "cluster.margin=0.2", "cluster.host_gib=9",
    "cluster.reserved_gib=0.3", "cluster.communicator_gib=0.1",
    "cluster.rates=other", "cluster.peak_tflops=1", "cluster.matmul_tflops=0.1", "cluster.attention_tflops=0.05",
    "cluster.fp8_tflops=0.2",
    "cluster.memory_gb_s=6", "cluster.operation_us=10", "cluster.hidden=0.5", "cluster.skew_us=1",
    "cluster.product_hidden=0.5", "cluster.spread=0.01", "cluster.trainer=megatron",
    "cluster.levels=[{group_gb_s: 2}, {ranks: 1}]", "cluster.nodes=4", "cluster.devices_per_node=2",
    "cluster.measured=[{local: 2, gb_s: 2}]", "cluster.atp_gb_s={2x1: [1.5, null]}",
]  # fmt: skip
ROUNDING_RUNS = {
    "x, z and context": (
        4,
        ["parallel.gx=2", "parallel.sequence_parallel=true", "parallel.rank_order=yx",
         "parallel.overlap.all_reduce=false", "parallel.gz=2", "parallel.replicated_layers=1",
         "parallel.overlap.reduce_scatter=false", "parallel.overlap.prefetch=1", "parallel.context=2",
         "parallel.context_exchange=ring"],
    ),
    "y, data and memory": (
        4,
        ["parallel.gy=2", "parallel.scatter_heads=false", "parallel.gdata=2", "parallel.overlap.data=false",
         "optim.shard_states=true", "parallel.overlap.all_gather=false", "train.micro_batch_size=4",
         "train.activation_checkpointing=full", "train.loss_chunks=2", "train.compile=false",
         "train.deterministic=true", "parallel.chunks=2", "model.vocab_multiple=4", "parallel.cache_layers=1",
         "parallel.cache_scope=step"],
    ),
    "atp": (2, ["parallel.mode=atp", "parallel.d1=2", "parallel.d2=1", *CLUSTER]),
    "stages": (
        2,
        ["parallel.pipeline.stages=2", "parallel.pipeline.cuts=[1,2,3]", "model.layers=4",
         "parallel.pipeline.schedule=interleaved_1f1b", "parallel.pipeline.chunks_per_stage=2",
         "parallel.pipeline.stage_grids=[1x1x1x1,1x1x1x1]", "parallel.pipeline.microbatches=4",
         "parallel.pipeline.strategy=broadcast"],
    ),
    "experts": (4, ["model=moe_tiny", "parallel.gz=2", "parallel.expert_data=true"]),
}  # fmt: skip
OF_THE_MODEL = {"model", "model.layers"}  # the model of such a run
LENGTHS = {"train.steps": "9", "train.tokens": "9e9", "train.epochs": "9"}
ROPE = ["model.rope_scaling=llama3", "model.rope_factor=8", "model.rope_original_positions=32"]
FAMILIES = {
    "gpt2": ["model=gpt_tiny"], "llama": ["model=llama_tiny", *ROPE], "olmo2": ["model=olmo2_tiny", *ROPE],
    "gemma3": ["model=gemma3_tiny"], "moe": ["model=moe_tiny"], "unet": ["model=unet_tiny"],
}  # fmt: skip
GIVEN = {  # values of keys with results whose other value does not follow from their type
    "train.seq_len": 8, "train.batch_ramp": [[0, 4], [64, 8]], "optim.schedule_steps": 30, "optim.decay_from": 99,
    "optim.muon.coefficients": [2, -1.5, 0.5], "checkpoint.init": "runs/other",
    **{f"optim.weight_decays.{group}": 0.2 for group in ("matrices", "embeddings", "head", "router", "adapters")},
    "lora.alpha": 3, "lora.targets": ["qkv"], "model.base_hidden": 32, "model.base_channels": 16,
    "model.multipliers": [1, 2, 2, 4], "model.attention_at": [8],
}  # fmt: skip
SOURCES = {
    "text": "data=text data.path={directory}/a.* data.tokenizer_vocab=50257 model.vocab_size=50257",
    "chat": "data=chat data.path={directory}/a.jsonl data.tokenizer=gpt2 model.vocab_size=50257",
    "first": "data=text data.path={directory}/a.* data.tokenizer={directory}/first model.vocab_size=300",
    "jsonl": "data=jsonl data.path={directory}/a.jsonl",
    "c4": "data=c4",
}
DATA = {  # a source that reads the key, and another value
    "data.source": ("text", "parquet"),
    "data.path": ("text", "{directory}/a.t*"),
    "data.subset": ("c4", "fr"),
    "data.split": ("c4", "test"),
    "data.column": ("jsonl", "title"),
    "data.skip_empty": ("text", True),
    "data.strip": ("text", False),
    "data.tokenizer": ("text", "gpt2"),
    "data.tokenizer_vocab": ("text", 300),
    "data.begin_of_text": ("first", False),
    "data.chat_template": ("chat", "{directory}/a.txt"),
    "data.train_on": ("chat", "all"),
    "data.validation_fraction": ("text", 0.2),
}
UNREAD = {  # keys without results of which tests/test_unused.py checks that a text on a CPU does not read them
    "train.cuda_graphs",  # tests/parallel/test_cuda_graphs.py compares the losses
    "optim.validate_averages",  # tests/task/test_validation_sets.py compares the losses
    "data.retry_s", "data.skip_long", "logging.sample_images", "logging.sample_steps",
    "model.imbalance",  # only the planner reads it
}  # fmt: skip


def keys_of(overrides):
    return {override.partition("=")[0] for override in overrides}


def test_every_key_has_a_row_for_its_effect():
    rows = {
        Effect.NONE: keys_of(NONE_RUN[1]) | UNREAD,
        Effect.ROUNDING: {key for _, words in ROUNDING_RUNS.values() for key in keys_of(words)} - OF_THE_MODEL,
        Effect.LENGTH: set(LENGTHS),
        Effect.DATA: {*DATA, "data.blend"},
    }
    # Other tests register families of their own, and known_keys() includes their settings.
    own = {f"model.{field.name}" for family in FAMILIES for field in fields(registry.get(family).config)}
    possible = {key for key in known_keys() if not key.startswith("model.") or key in own}
    for effect, keys in rows.items():
        assert keys == {key for key in possible if effect_of(key) is effect}, effect


# Families that other tests register have fields without limits.
CHOICES = {each.key: each.field.metadata["limits"].choices for each in settings() if "limits" in each.field.metadata}


def found_changes(before, after):
    return changes(recorded_settings(asdict(before)), recorded_settings(asdict(after)))


def other_value(key, value, choices):
    if key in GIVEN:
        return GIVEN[key]
    if isinstance(value, bool):
        return not value
    if value in choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, int):
        return value // 2 if value > 1 else value + 1
    return value / 2 or 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_another_value_of_a_key_with_results_is_refused_or_rejected(family):
    """Settings outside the model are tried with a GPT, and settings of the data also with images."""
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        composed = hydra.compose("train", overrides=FAMILIES[family])
    before = complete(to_config(composed))
    prefix = {"gpt2": "", "unet": "data."}.get(family, "model.")
    keys = [key for key in known_keys() if key.startswith(prefix) and not key.startswith("model.")]
    keys += known_keys(type(before.model), "model.")
    for key in (key for key in keys if effect_of(key) is Effect.RESULTS):
        other = composed.copy()  # composing for each key takes longer
        value = value_of(before, key)
        OmegaConf.update(other, key, other_value(key, value, CHOICES[key]))
        try:
            after = complete(to_config(other))
            validate(after, 1)
        except ConfigError as error:
            assert key in str(error)
            continue
        assert value_of(after, key) != value
        with pytest.raises(ConfigError, match=rf"{key}=.*checkpoint\.allow_changes=\[.*{key}"):
            check_changes(found_changes(before, after), [], "runs/a")


@pytest.mark.parametrize(("key", "value"), LENGTHS.items())
def test_another_length_is_found_and_not_refused(key, value):
    found = found_changes(configured(), configured([f"{key}={value}"]))
    assert key in found
    check_changes(found, [], "runs/a")


def test_another_value_of_a_key_of_the_data_makes_other_data(tmp_path):
    """The fingerprints of the directories of a blend are compared by Task.identity."""
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        (tmp_path / name).write_text("words")
    write_tokenizer(tmp_path / "first", first=["<|im_start|>"])
    sources = {name: configured(words.format(directory=tmp_path).split()).data for name, words in SOURCES.items()}
    for key, (source, value) in DATA.items():
        value = value.format(directory=tmp_path) if isinstance(value, str) else value
        other = replace(sources[source], **{key.removeprefix("data."): value})
        assert identity_of(other) != identity_of(sources[source]), key


def train_with_a_tracker_that_ignores(config):
    """Trains with a stand-in of wandb, which needs no network and no process."""
    with mock.patch.dict(sys.modules, wandb=mock.MagicMock(__spec__=mock.sentinel.spec)):
        train_in_rank(config)


def losses_of(ranks, tiny, directory, name, world, words):
    run_dir, held_out = directory / name, directory / "held_out.txt"
    held_out.write_text("words of a validation set " * 50)
    given = {
        "run.dir=": f"run.dir={run_dir}",
        "data.cache_dir=": f"data.cache_dir={directory / 'cache'}",
        "data.validation=": f"data.validation={{a: {held_out}}}",
        "evaluate.tasks=": f"evaluate.tasks=[{write_tasks(directory)['choices']}]",
    }
    words = [given.get(word, word) for word in words]
    config = tiny("train.steps=3", "optim.warmup_steps=1", f"run.dir={run_dir}", *words)
    ranks.run(world, train_with_a_tracker_that_ignores, config)
    return {line["step"]: line["loss"] for line in metric_lines(run_dir)}


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """Return a function from ``tiny`` and a model to the losses on one device, which trains once per model."""
    made = {}

    def losses(tiny, *words):
        if words not in made:
            made[words] = losses_of(ranks, tiny, tmp_path_factory.mktemp("reference"), "run", 1, words)
        return made[words]

    return losses


def test_keys_without_effect_change_no_bit_of_a_loss(ranks, tiny, reference, tmp_path):
    expected = reference(tiny)
    assert set(expected) == {1, 2, 3}
    found = losses_of(ranks, tiny, tmp_path, "other", *NONE_RUN)
    assert found and found == {step: expected[step] for step in found}


@pytest.mark.parametrize("name", ROUNDING_RUNS)
def test_keys_that_change_rounding_change_losses_no_further(ranks, tiny, reference, tmp_path, name):
    world, words = ROUNDING_RUNS[name]
    expected = reference(tiny, *(word for word in words if word.partition("=")[0] in OF_THE_MODEL))
    assert losses_of(ranks, tiny, tmp_path, "other", world, words) == pytest.approx(expected, rel=1e-5)
