"""Settings that a run does not read are errors. The files under configs/ contain no such settings."""

import functools
import itertools
import re
import shlex

import pytest

from gpt4d.config import CONFIG_DIR, ConfigError, conditional_keys, known_keys, unused_keys
from gpt4d.model import registry  # noqa: F401 – registers the families' settings
from gpt4d.validation import validate
from tests.support.settings import configured

TEXT, PICTURES = "model=gpt_tiny", "model=unet_tiny"
ADAMW = "optim.algorithm=adamw"
STAGES = "parallel.pipeline.stages=2"
CASES = [  # an unused key, the reason, and the setting that makes a run read it
    ([TEXT, "data.path=book.txt"], "data.source=sotu reads no path; add data=text", ["data=text"]),
    ([TEXT, "data.path=crawl/*.jsonl.gz"], "reads no path; add data=jsonl", ["data=jsonl"]),
    ([TEXT, "data.path=gpt4d"], "reads no path; add data=tokens", ["data=tokens"]),
    ([PICTURES, "data.path=photos"], "data.source=blue_marble reads no path; add data=pictures", ["data=pictures"]),
    ([TEXT, "data=blend", "data.path=tokens/a"], "list token directories or Megatron's prefixes", ["data=tokens"]),
    ([TEXT, "data.subset=en"], "data.source=sotu does not read it; leave it out, or set data.source=hub", ["data=c4"]),
    ([TEXT, "data.split=test"], "set data.source=hub", ["data=c4"]),
    ([TEXT, "data.column=content"], "set data.source=jsonl or csv or parquet or arrow or files or", ["data=parquet"]),
    ([TEXT, "data=tokens", "data.skip_empty=true"], "data.source=tokens was prepared before", ["data=text"]),
    ([TEXT, "data=tokens", "data.validation_fraction=0.1"], "data.source=tokens was prepared", ["data=text"]),
    ([TEXT, "data=tokens", "data.processes=2"], "data.source=tokens was prepared", ["data=text"]),
    ([TEXT, "data=tokens", "data.tokenizer=gpt2"], "has the tokenizer that made its tokens", ["data=text"]),
    ([TEXT, "data.chat_template=a.jinja"], "data.source=sotu does not read it", ["data=chat"]),
    ([TEXT, "data.train_on=all"], "set data.source=chat", ["data=chat"]),
    ([TEXT, "data.skip_long=false"], "set data.source=chat or tokens or blend", ["data=tokens"]),
    ([TEXT, "data=chat", "data.reset_attention=true"], "attention never crosses conversations", ["data=text"]),
    ([TEXT, "data=tokens", "data.stream=true"], "data.source=tokens has tokens already; leave it out", ["data=text"]),
    ([TEXT, "data=chat", "data.stream=true"], "conversations are packed by the lengths of all of them", ["data=text"]),
    ([PICTURES, "data.stream=true"], "model=unet_tiny is trained on images, not on text", [TEXT]),
    ([TEXT, "data.blend={a: 1}"], "data.source=sotu does not read it", ["data=blend"]),
    ([TEXT, "lora.alpha=3"], "lora.rank=0 does not read it; leave it out, or set lora.rank", ["lora.rank=2"]),
    ([TEXT, "lora.targets=[qkv]"], "lora.rank=0 does not read it", ["lora.rank=2"]),
    ([TEXT, "optim.lr_factors.adapters=2"], "lora.rank=0 does not read it", ["lora.rank=2"]),
    ([TEXT, "optim.weight_decays.adapters=0"], "lora.rank=0 does not read it", ["lora.rank=2"]),
    ([TEXT, "optim.lr_factors.head=2"], "is the token embedding; set the group embeddings", [PICTURES]),
    ([TEXT, "optim.weight_decays.head=0"], "is the token embedding; set the group embeddings", [PICTURES]),
    ([TEXT, "data.flip=false"], "data.flip=false: model=gpt_tiny is trained on text, not on images", [PICTURES]),
    ([PICTURES, "data.validation={a: '*.py'}"], "model=unet_tiny is trained on images, not on text", [TEXT]),
    ([TEXT, "checkpoint.keep_best=held_out", "train.validation_batches=0"], "set train.validation_batches",
     ["train.validation_batches=1"]),
    ([PICTURES, "data.reset_attention=true"], "model=unet_tiny is trained on images, not on text", [TEXT]),
    ([PICTURES, "data.tokenizer_vocab=300"], "model=unet_tiny is trained on images", [TEXT]),
    ([TEXT, "cluster=local", "train.cuda_graphs=true"], "cluster.device=cpu does not read it; leave it out",
     ["cluster=dgx_h100"]),
    ([PICTURES, "train.loss_chunks=2"], "model=unet_tiny is trained on images", [TEXT]),
    ([TEXT, "model.base_hidden=32"], "optim.width_transfer=false does not read it", ["optim.width_transfer=true"]),
    ([PICTURES, "model.base_channels=8"], "optim.width_transfer=false does not", ["optim.width_transfer=true"]),
    ([TEXT, "lora.rank=2", "model.base_hidden=32", "optim.width_transfer=true"], "lora.rank=2 trains", ["lora.rank=0"]),
    ([TEXT, "optim.validate_averages=true"], "optim.ema_decay=0.0 does not read it", ["optim.ema_decay=0.9"]),
    ([PICTURES, "train.z_loss=0.1"], "model=unet_tiny is trained on images", [TEXT]),
    ([TEXT, "train.validate_every=9", "train.validation_batches=0"], "=0 does not", ["train.validation_batches=1"]),
    ([PICTURES, "logging.sample_tokens=8"], "model=unet_tiny is trained on images", [TEXT]),
    ([PICTURES, "logging.sample_prompt=So"], "model=unet_tiny is trained on images", [TEXT]),
    ([TEXT, "logging.sample_prompt=So", "logging.sample_tokens=0"], "does not read it", ["logging.sample_tokens=8"]),
    ([TEXT, "logging.sample_tokens=8", "logging.sample_prompt="], "does not read it", ["logging.sample_prompt=So"]),
    ([TEXT, "logging.sample_images=8"], "model=gpt_tiny is trained on text", [PICTURES]),
    ([PICTURES, "logging.sample_steps=8", "logging.sample_images=0"], "does not", ["logging.sample_images=8"]),
    ([PICTURES, "evaluate.every=9"], "model=unet_tiny is trained on images", [TEXT]),
    *[
        ([TEXT, f"evaluate.{key}={value}"], "evaluate.every=0 does not read it", ["evaluate.every=9"])
        for key, value in (("tasks", "[a]"), ("limit", 9), ("num_fewshot", 2), ("batch_size", 4))
    ],
    ([TEXT, "logging.project=a"], "logging.trackers=[] does not read it", ["logging.trackers=[mlflow]"]),
    ([TEXT, "logging.trackers=[tensorboard]", "logging.online=true"], "=[tensorboard] does not read it",
     ["logging.trackers=[tensorboard,wandb]"]),
    *[
        ([TEXT, ADAMW, f"optim.muon.{key}={value}"], "optim.algorithm=adamw does not read it", ["optim.algorithm=muon"])
        for key, value in (("momentum", 0.9), ("nesterov", "false"), ("steps", 6), ("coefficients", "[3,-4,2]"),
                           ("epsilon", 1e-6), ("scale", "original"))
    ],
    ([TEXT, "optim.schedule=constant", "optim.min_lr_ratio=0"], "set optim.schedule=cosine, linear or wsd",
     ["optim.schedule=linear"]),
    (["model=unet_50m", "optim.schedule_steps=9"], "optim.min_lr_ratio=1.0 does not", ["optim.min_lr_ratio=0.1"]),
    ([TEXT, "optim.schedule=inverse_sqrt", "optim.schedule_steps=9"], "=inverse_sqrt does not", ["optim.schedule=wsd"]),
    *[
        ([TEXT, f"optim.{key}={value}"], "optim.schedule=cosine does not read it", ["optim.schedule=wsd"])
        for key, value in (("decay_fraction", 0.1), ("decay_shape", "linear"), ("decay_from", 99))
    ],
    ([TEXT, "optim.schedule=wsd", "optim.decay_from=99", "optim.decay_fraction=0.1"], "until the end of the run",
     ["optim.decay_from=null"]),
    ([TEXT, "parallel.expert_data=true"], "model=gpt_tiny has no experts", ["model=moe_tiny"]),
    ([TEXT, "parallel.context_exchange=ring"], "parallel.context=1 does not read it; leave it out, or set",
     ["parallel.context=2"]),
    ([TEXT, "parallel.overlap.all_gather=false", "parallel.overlap.prefetch=3"], "",
     ["parallel.overlap.all_gather=true"]),
    ([TEXT, "parallel.pipeline.cuts=[2]"], "there is one stage; set parallel.pipeline.stages", [STAGES]),
    ([TEXT, "parallel.pipeline.stage_grids=[1x1x1x1]"], "there is one stage", [STAGES]),
    ([TEXT, "parallel.pipeline.microbatches=2"], "there is one stage", [STAGES]),
    ([TEXT, "parallel.pipeline.chunks_per_stage=2"], "there is one stage", [STAGES]),
    ([TEXT, "parallel.pipeline.schedule=1f1b"], "there is one stage", ["parallel.mode=auto"]),
    ([TEXT, "parallel.pipeline.strategy=send_recv"], "there is one stage", [STAGES]),
    *[
        ([TEXT, STAGES, "parallel.pipeline.stage_grids=[1x1x1x2,2x1x1x1]", f"parallel.{axis}=2"], "of each stage",
         ["parallel.pipeline.stage_grids=null"])
        for axis in ("gx", "gy", "gz", "gdata")
    ],
    *[
        ([f"model={family}_tiny", f"model.rope_{key}={value}"], "rope_scaling=none", ["model.rope_scaling=llama3"])
        for family in ("llama", "olmo2")
        for key, value in (("factor", 8), ("original_positions", 64), ("low_frequency", 2), ("high_frequency", 8))
    ],
    (["model=llama_tiny", "model.rope_factor=8"], "=linear or llama3 or yarn", ["model.rope_scaling=linear"]),
    (["model=llama_tiny", "model.rope_scaling=linear", "model.rope_original_positions=64"], "=linear does not read it",
     ["model.rope_scaling=yarn"]),
    *[
        (["model=llama_1b", f"model.rope_{key}={value}"], "=llama3 does not read it", ["model.rope_scaling=yarn"])
        for key, value in (("beta_slow", 2), ("beta_fast", 8), ("truncate", "false"), ("attention_factor", 2))
    ],
]  # fmt: skip


@functools.cache
def unused(*overrides: str) -> dict[str, str]:
    """Return the unused keys of a run, with their reasons."""
    return unused_keys(configured(overrides))


def keys_of(overrides):
    return [override.partition("=")[0] for override in overrides]


@pytest.mark.parametrize(("overrides", "reason", "added"), CASES, ids=lambda value: value[-1] if value else "")
def test_a_key_that_nothing_reads_is_reported_until_something_does(overrides, reason, added):
    found = unused(*overrides)
    (key,) = found
    assert key in keys_of(overrides)
    assert reason in f"{key}={overrides[-1].partition('=')[2]}: {found[key]}"
    assert not unused_keys(configured([*overrides, *added]))


def test_the_cases_have_every_key_that_only_some_runs_read():
    tried = {key for overrides, _, _ in CASES for key in unused(*overrides)}
    assert tried == set(conditional_keys())
    assert tried <= set(known_keys())


def test_an_unused_key_ends_the_run_before_it_starts():
    message = r"data\.path=book\.txt: data\.source=sotu reads no path; add data=text"
    with pytest.raises(ConfigError, match=message):
        validate(configured(["data.path=book.txt"]), 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=llama_1b", "model.rope_scaling=none"],  # rope_factor has its value in configs/model/llama_1b.yaml
        ["data=c4", "data.source=tokens", "data.path=tokens/c4"],
        [PICTURES, "logging.sample_tokens=0", "train.loss_chunks=1"],
        [TEXT, "logging.sample_images=0", "logging.sample_tokens=0", "train.validation_batches=0"],
        [TEXT, "train.validate_every=0", "train.validation_batches=0"],
        ["data=tokens", "data.cache_dir=/scratch"],
        ["model=unet_tiny", "optim.schedule=constant"],  # min_lr_ratio has its value in the model's file
        ["model=unet_50m", "optim.schedule=inverse_sqrt"],  # min_lr_ratio has its value in configs/optim
    ],
)
def test_presets_and_values_that_switch_off_are_no_unused_keys(overrides):
    assert not unused_keys(configured(overrides))


@pytest.mark.parametrize("group", sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir()))
def test_no_file_under_configs_sets_an_unused_key(group):
    for path in sorted((CONFIG_DIR / group).glob("*.yaml")):
        model = [PICTURES] if group == "data" and path.stem in ("blue_marble", "cifar10", "pictures") else []
        assert not unused_keys(configured([*model, f"{group}={path.stem}"])), path


def documented_commands():
    """Arguments of every train.py in README and docs, by its line."""
    for page in [CONFIG_DIR.parent / "README.md", *sorted((CONFIG_DIR.parent / "docs").rglob("*.md"))]:
        for line in re.sub(r"\\\n\s*", " ", page.read_text()).splitlines():
            command = re.search(r"train\.py ([^`|]+)", line)
            if command and "…" not in command[1] and not command[1].startswith("--"):
                words = shlex.split(command[1], comments=True)
                known = itertools.takewhile(lambda word: re.match(r"[\w.]+=\S", word), words)
                overrides = [word.rstrip(",") for word in known if not word.startswith("cluster=")]
                yield pytest.param(overrides, id=f"{page.name}: {' '.join(overrides)}")


@pytest.mark.parametrize("command", list(documented_commands()))
def test_no_documented_command_has_an_unknown_or_unused_key(command):
    trained = [word for word in command if word.startswith("data.tokenizer=runs/")]  # by an earlier command
    assert not unused_keys(configured([*command, *(["model.vocab_size=4096"] if trained else [])]))
