"""Settings that a run does not read are errors. The files under configs/ contain no such settings."""

import itertools
from dataclasses import make_dataclass

import pytest

from gpt4d.config import CONFIG_DIR, Config, ModelConfig, known_keys, setting
from gpt4d.config.checks import conditional_keys, unused_keys
from gpt4d.config.keys import model_schemas
from gpt4d.model import registry  # noqa: F401 – registers the families' settings
from tests.support.config_overrides import configured_quickly
from tests.support.grids import full
from tests.support.settings import configured

CASES = [  # a model with settings | unused settings, a part of each reason, and settings with which a run reads them
    ("gpt_tiny | data.path=book.txt", "data.source=sotu reads no path; add data=text", "data=text"),
    ("gpt_tiny | data.path=crawl/*.jsonl.gz", "reads no path; add data=jsonl", "data=jsonl"),
    ("gpt_tiny | data.path={tokens}", "reads no path; add data=tokens", "data=tokens"),
    ("unet_tiny | data.path=photos", "data.source=blue_marble reads no path; add data=pictures", "data=pictures"),
    ("gpt_tiny data=blend | data.path=tokens/a", "list token directories or Megatron's prefixes", "data=tokens"),
    ("gpt_tiny | data.subset=en", "data.source=sotu does not read it; leave it out, or set data.source=hub", "data=c4"),
    ("gpt_tiny | data.split=test", "set data.source=hub", "data=c4"),
    ("gpt_tiny | data.column=content", "set data.source=jsonl or csv or parquet or arrow or files", "data=parquet"),
    ("gpt_tiny data=tokens | data.skip_empty=true data.validation_fraction=0.1 data.processes=2",
     "data.source=tokens was prepared before", "data=text"),
    ("gpt_tiny data=tokens | data.tokenizer=gpt2", "has the tokenizer that made its tokens", "data=text"),
    ("gpt_tiny | data.chat_template=a.jinja data.train_on=all",
     "data.source=sotu does not read it; leave it out, or set data.source=chat", "data=chat"),
    ("gpt_tiny | data.skip_long=false", "set data.source=chat or tokens or blend", "data=tokens"),
    ("gpt_tiny data=text data.path=a.txt | data.retry_s=9", "data.path=a.txt has no URL; leave it out",
     "data.path=https://a.b/c.txt"),
    ("gpt_tiny data=chat | data.strip=false", "data.source=chat does not read it; leave it out", "data=text"),
    ("gpt_tiny data=chat | data.begin_of_text=true", "the chat template renders the first token", "data=text"),
    ("gpt_tiny data=chat | data.reset_attention=true", "attention never crosses conversations", "data=text"),
    ("gpt_tiny data=tokens | data.stream=true", "data.source=tokens has tokens already; leave it out", "data=text"),
    ("gpt_tiny data=chat | data.stream=true", "conversations are packed by the lengths of all of them", "data=text"),
    ("gpt_tiny | data.blend={a:1}", "data.source=sotu does not read it", "data=blend"),
    ("gpt_tiny | lora.alpha=3 lora.targets=[qkv] optim.lr_factors.adapters=2 optim.weight_decays.adapters=0",
     "lora.rank=0 does not read it; leave it out, or set lora.rank", "lora.rank=2"),
    ("gpt_tiny | optim.lr_factors.head=2 optim.weight_decays.head=0",
     "is the token embedding; set the group embeddings", "model=unet_tiny"),
    ("moe_tiny model.tied=false optim.algorithm=adamw lora.rank=2 | optim.lr_factors.matrices=2 "
     "optim.lr_factors.embeddings=2 optim.lr_factors.head=2 optim.lr_factors.router=2 optim.lr_factors.vectors=2 "
     "optim.weight_decays.matrices=0.2 optim.weight_decays.embeddings=0.2 optim.weight_decays.head=0.2 "
     "optim.weight_decays.router=0.2 optim.weight_decays.vectors=0.2", "lora.rank=2 trains", "lora.rank=0"),
    ("gpt_tiny | optim.lr_factors.router=2 optim.weight_decays.router=0", "model=gpt_tiny has no experts; leave it out",
     "model=moe_tiny"),
    ("gpt_tiny | data.flip=false logging.sample_images=8", "model=gpt_tiny is trained on text, not on images",
     "model=unet_tiny"),
    ("unet_tiny | data.validation={a:'*.py'} data.stream=true data.reset_attention=true data.tokenizer_vocab=300 "
     "train.loss_chunks=2 train.z_loss=0.1 logging.sample_tokens=8 logging.sample_prompt=So evaluate.every=9",
     "model=unet_tiny is trained on images, not on text", "model=gpt_tiny"),
    ("gpt_tiny train.validation_batches=0 | checkpoint.keep_best=held_out train.validate_every=9",
     "set train.validation_batches", "train.validation_batches=1"),
    ("gpt_tiny cluster=local | train.cuda_graphs=true", "cluster.device=cpu does not read it; leave it out",
     "cluster=dgx_h100"),
    ("gpt_tiny | model.base_hidden=32", "optim.width_transfer=false does not read it", "optim.width_transfer=true"),
    ("unet_tiny | model.base_channels=8", "optim.width_transfer=false does not", "optim.width_transfer=true"),
    ("gpt_tiny lora.rank=2 model.base_hidden=32 | optim.width_transfer=true", "lora.rank=2 trains", "lora.rank=0"),
    ("gpt_tiny | optim.validate_averages=true", "optim.ema_decay=0.0 does not read it", "optim.ema_decay=0.9"),
    ("gpt_tiny logging.sample_tokens=0 | logging.sample_prompt=So", "does not read it", "logging.sample_tokens=8"),
    ("gpt_tiny logging.sample_prompt= | logging.sample_tokens=8", "does not read it", "logging.sample_prompt=So"),
    ("unet_tiny logging.sample_images=0 | logging.sample_steps=8", "does not", "logging.sample_images=8"),
    ("gpt_tiny | evaluate.tasks=[a] evaluate.limit=9 evaluate.num_fewshot=2 evaluate.batch_size=4 "
     "evaluate.allow_code=true",
     "evaluate.every=0 does not read it", "evaluate.every=9"),
    ("gpt_tiny | logging.project=a", "logging.trackers=[] does not read it", "logging.trackers=[mlflow]"),
    ("gpt_tiny logging.trackers=[tensorboard] | logging.online=true", "=[tensorboard] does not read it",
     "logging.trackers=[tensorboard,wandb]"),
    ("gpt_tiny optim.algorithm=adamw | optim.muon.momentum=0.9 optim.muon.nesterov=false optim.muon.steps=6 "
     "optim.muon.coefficients=[3,-4,2] optim.muon.epsilon=1e-6 optim.muon.scale=original",
     "optim.algorithm=adamw does not read it", "optim.algorithm=muon"),
    ("gpt_tiny optim.schedule=constant | optim.min_lr_ratio=0", "set optim.schedule=cosine, linear or wsd",
     "optim.schedule=linear"),
    ("unet_50m | optim.schedule_steps=9", "optim.min_lr_ratio=1.0 does not", "optim.min_lr_ratio=0.1"),
    ("gpt_tiny optim.schedule=inverse_sqrt | optim.schedule_steps=9", "=inverse_sqrt does not", "optim.schedule=wsd"),
    ("gpt_tiny | optim.decay_fraction=0.1 optim.decay_shape=linear", "optim.schedule=cosine does not read it",
     "optim.schedule=wsd"),
    ("gpt_tiny | optim.decay_from=99", "optim.schedule=cosine does not read it", "optim.schedule=wsd"),
    ("gpt_tiny optim.schedule=wsd optim.decay_from=99 | optim.decay_fraction=0.1", "until the end of the run",
     "optim.decay_from=null"),
    ("gpt_tiny | parallel.expert_data=true", "model=gpt_tiny has no experts", "model=moe_tiny"),
    ("gpt_tiny | parallel.context_exchange=ring", "parallel.context=1 does not read it; leave it out, or set",
     "parallel.context=2"),
    ("gpt_tiny parallel.overlap.all_gather=false | parallel.overlap.prefetch=3", "",
     "parallel.overlap.all_gather=true"),
    ("gpt_tiny | parallel.pipeline.cuts=[2] parallel.pipeline.stage_grids=[1x1x1x1] parallel.pipeline.microbatches=2 "
     "parallel.pipeline.chunks_per_stage=2",
     "there is one stage; set parallel.pipeline.stages", "parallel.pipeline.stages=2"),
    ("gpt_tiny | parallel.pipeline.schedule=1f1b", "there is one stage", "parallel.mode=auto"),
    ("gpt_tiny parallel.pipeline.stages=2 parallel.pipeline.stage_grids=[1x1x1x2,2x1x1x1] | "
     "parallel.gx=2 parallel.gy=2 parallel.gz=2 parallel.gdata=2", "of each stage",
     "parallel.pipeline.stage_grids=null"),
    *[
        (f"{family}_tiny | model.rope_factor=8 model.rope_original_positions=64 model.rope_low_frequency=2 "
         "model.rope_high_frequency=8", "rope_scaling=none", "model.rope_scaling=llama3")
        for family in ("llama", "olmo2")
    ],
    ("llama_tiny | model.rope_factor=8", "=linear or llama3 or yarn", "model.rope_scaling=linear"),
    ("llama_tiny model.rope_scaling=linear | model.rope_original_positions=64", "=linear does not read it",
     "model.rope_scaling=yarn"),
    ("llama_1b | model.rope_beta_slow=2 model.rope_beta_fast=8 model.rope_truncate=false model.rope_attention_factor=2",
     "=llama3 does not read it", "model.rope_scaling=yarn"),
]  # fmt: skip


def test_keys_that_nothing_reads_are_reported_until_something_does(tmp_path):
    """The cases contain every key that only some runs read."""
    tried = set()
    for settings, reason, added in CASES:
        base, unused = (words.split() for words in f"model={settings.replace('{tokens}', str(tmp_path))}".split(" | "))
        found = unused_keys(configured_quickly([*base, *unused]))
        assert found.keys() == {word.partition("=")[0] for word in unused}, settings
        for word in unused:
            assert reason in f"{word}: {found[word.partition('=')[0]]}", settings
        assert not unused_keys(configured_quickly([*base, *unused, *added.split()])), settings
        tried |= found.keys()
    assert tried == set(conditional_keys())
    assert tried <= set(known_keys())


@pytest.mark.parametrize(
    "settings",
    [
        "model=llama_1b model.rope_scaling=none",  # rope_factor has its value in configs/model/llama_1b.yaml
        "data=c4 data.source=tokens data.path=tokens/c4",
        "model=unet_tiny logging.sample_tokens=0 train.loss_chunks=1",
        "model=gpt_tiny logging.sample_images=0 logging.sample_tokens=0 train.validation_batches=0",
        "model=gpt_tiny train.validate_every=0 train.validation_batches=0",
        "data=tokens data.cache_dir=/scratch",
        "model=unet_tiny optim.schedule=constant",  # min_lr_ratio has its value in the model's file
        "model=unet_50m optim.schedule=inverse_sqrt",  # min_lr_ratio has its value in configs/optim
    ],
)
def test_presets_and_values_that_switch_off_are_no_unused_keys(settings):
    assert not unused_keys(configured(settings.split()))


def test_a_condition_holds_for_the_family_of_its_field(monkeypatch):
    family = make_dataclass(
        "Plain", [("rope_factor", float, setting(1.0, "without rope_scaling"))], bases=(ModelConfig,)
    )
    monkeypatch.setitem(model_schemas, "plain", family)
    assert not unused_keys(Config(model=family(rope_factor=3.0)))


GROUPS = sorted({path.parent.name for path in CONFIG_DIR.glob("*/*.yaml")} - {"model"})


# One model of each family is checked by tests/test_config.py.
@pytest.mark.parametrize("groups", [GROUPS, full(["model"])], ids=" ".join)
def test_no_file_under_configs_sets_an_unused_key(groups):
    paths = [sorted((CONFIG_DIR / group).glob("*.yaml"), reverse=True) for group in groups]
    files = [[f"{path.parent.name}={path.stem}" for path in paths_of_group] for paths_of_group in paths]
    for choices in map(set, itertools.zip_longest(*files)):
        model = ["model=unet_tiny"] if choices & {"data=blue_marble", "data=cifar10", "data=pictures"} else []
        assert not unused_keys(configured([*model, *(choices - {None})])), choices
