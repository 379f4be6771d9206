"""Reports of invalid settings: one line with the key, the value and the remedy, before any process group exists."""

import importlib
import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec

import pytest
import yaml

from gpt4d.checkpoint import storage
from gpt4d.checkpoint.__main__ import ReadConfig
from gpt4d.config import (
    CONFIG_DIR,
    ConfigError,
    GridSizes,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    from_arguments,
    grid_problem,
    keys,
    known_keys,
)
from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.config_overrides import configured_quickly
from tests.support.environment import REPOSITORY
from tests.support.grids import full
from tests.support.settings import configured

SHIPPED_MODELS = sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml"))
_FIRST = {model.partition("_")[0]: model for model in reversed(SHIPPED_MODELS)}.values()  # one model of each family
ONE_OF_EACH_FAMILY = [model if model in _FIRST else full(model) for model in SHIPPED_MODELS]


BAD_NAMES = ("..", ".", "../x", "a/../../x", "a//b", "/a", "a/", "a\x1b[31mb", "a\x7fb", "a\u202eb", "a\u200fb")
YARN = "model=llama_tiny model.rope_scaling=yarn model.rope_factor=2 model.rope_original_positions=128"
MISTAKES_OF_WORDS = [  # settings that cannot be composed, and a part of the message
    ("parallel.gxx=2", "parallel.gxx: there is no such key; did you mean parallel.gx?"),
    ("steps=3", "steps: there is no such key; did you mean train.steps?"),
    ("+foo=2", "foo: there is no such key"),
    ("+parallel.depth=2", "parallel.depth: there is no such key; use one of mode, gx, gy, gz, gdata"),
    ("parallel.gx=two", "parallel.gx: Value 'two' of type 'str' could not be converted to Integer"),
    ("model=gpt_unheard_of", "gpt_125m"),
    ("train.steps=[3", "'train.steps=[3': not a valid override"),
    ("train.steps=1.5", "train.steps: Value '1.5' of type 'float' could not be converted to Integer"),
    ("model=gpt_125M", "model=gpt_125M: there is no such choice; did you mean gpt_125m?"),
    ("cluster=rtx409", "cluster=rtx409: there is no such choice; did you mean rtx4090?"),
    ("cluster=H100", "did you mean h100?"),
    ("cluster=local cluster.nodes=2", "cluster.nodes=2: cluster.levels of local states no nodes; set it, or use"),
    ("cluster=gb200 cluster.nodes=20", "cluster.nodes=20: gb200 has groups of 18 nodes; use a multiple"),
    ("train=foo", "use one of default, finetune, long_context, seq_8192"),
    ("optim=lion", "use optim=adamw or optim=muon"),
    ("parallel.tp=2", "use parallel.gx, and parallel.gy for a second dimension"),
    ("parallel.pp=2", "did you mean parallel.pipeline.stages?"),
    ("parallel.pipeline=2", "parallel.pipeline=2: a group of keys; set parallel.pipeline.stages=2"),
    ("parallel.overlap=false", "a group of keys; set parallel.overlap.all_reduce, parallel.overlap.reduce_scatter"),
    ("train.gradient_accumulation_steps=4", "use train.micro_batch_size"),
    ("train.max_steps=4", "did you mean train.steps?"),
    ("learning_rate=1e-4", "did you mean optim.lr?"),
    ("batch_size=8", "did you mean train.batch_size?"),
    ("optim.min_lr=1e-4", "use optim.min_lr_ratio, a fraction of optim.lr"),
    ("lr_scheduler_type=linear", "did you mean optim.schedule?"),
    ("optim.name=muon", "use optim=muon, or optim=adamw"),
    ("logging.wandb.mode=offline", "logging.wandb.mode: there is no such key; use logging.trackers=[wandb], and"),
    ("wandb=offline", "wandb: there is no such key; use logging.trackers=[wandb], and logging.online=true to log"),
    ("logging.wandb.project=a", "logging.wandb.project: there is no such key; did you mean logging.project?"),
    ("device=cpu", "a GPU is used where torch finds one; set the environment variable CUDA_VISIBLE_DEVICES"),
    ("name=a", "name: there is no such key; use one of checkpoint.…"),
    ("model.dropout=0.1", "model.dropout: the chosen model has no such key; it is one of gpt2 and unet"),
    ("=4", "=4: no key before the =; use train.steps=100, for example"),
    ("model=4", "model=4: a choice of model is a name; train.py --help lists them"),
    ("cluster=null", "cluster=null: a choice of cluster is a name"),
    ("logging.sample_prompt=a\udcff", "'logging.sample_prompt=a\\udcff': not UTF-8; write it in that encoding"),
    ("--steps 10", "^--steps: settings are key=value; use train.steps=10"),
    ("--steps=10", "--steps=10: settings are key=value; use train.steps=10"),
]  # fmt: skip
MISTAKES = [  # settings of a run on one device that can be composed, and a part of the message
    ("parallel.gx=2",
     "parallel.gx·gy·gz=2·1·1=2: does not divide the 1 process(es) of this job; start more of them: torchrun "
     "--nproc-per-node 2 train.py parallel.gx=2"),
    ("train.loss_chunks=3", "train.loss_chunks=3: does not divide train.seq_len="),
    ("model=unet_tiny train.loss_chunks=2", "train.loss_chunks=2: an image has no logits"),
    ("train.seq_len=512", "train.seq_len=512: longer than model.max_positions=256"),
    ("model=gpt_tiny model.heads=5", "model.heads=5: does not divide model.hidden=128; use one of 1, 2, 4"),
    ("train.precision=fp16", "train.precision=fp16: use one of auto, fp32, bf16"),
    ("train.precision=fp8 model=unet_tiny", "train.precision=fp8: multiplies matrices, and most products"),
    ("train.precision=fp8 cluster=dgx_a100",
     "train.precision=fp8: dgx_a100 has no float8 products (cluster.fp8_tflops=null); use train.precision=bf16"),
    ("train.precision=fp8 model.hidden=72",
     "train.precision=fp8: the 72 input features of blocks.0.attention.qkv.weight are not a multiple of 16; "),
    ("train.precision=fp8 train.seq_len=12 train.micro_batch_size=2",
     "train.precision=fp8: multiplies multiples of 16 tokens, and a chunk of a device's microbatch has 24; "),
    ("parallel.cache_layers=true", "parallel.cache_layers=True: not a number of blocks; use all, or 0 to 2"),
    ("parallel.cache_scope=run", "parallel.cache_scope=run: use one of microbatch, step"),
    ("parallel.cache_scope=step", "parallel.cache_scope=step: no weights are kept; use parallel.cache_layers=all"),
    ("parallel.replicated_layers=5", "parallel.replicated_layers=5: not a number of blocks; use 0 to 2"),
    ("model=gpt_tiny model.dropout=1.0", "model.dropout=1.0"),
    ("model.vocab_size=4096 data.tokenizer_vocab=5000", "data.tokenizer_vocab=5000: more than model.vocab_size=4096"),
    ("data=text", "data.path=null: data.source=text needs a path; set a glob"),
    ("data=text data.path=/no/such/*.txt", "data.path='/no/such/*.txt': matches no file"),
    ("data=text data.path=tests", "data.path='tests': matches directories only; use 'tests/*.txt'"),
    ("data.source=tape", "data.source=tape: use one of sotu, text"),
    ("data=blue_marble", "data.source=blue_marble: images, but model=llama_tiny trains on text; use data=sotu"),
    ("checkpoint.resume=/no/such", "checkpoint.resume='/no/such'"),
    ("checkpoint.resume=true", "checkpoint.resume=true: not a way to resume; use auto, the default"),
    ("profile.steps=ten", "profile.steps='ten': neither a step nor a range; use 10 or 10-12, for example"),
    ("cluster=dgx_h100 train.cuda_graphs=true data.reset_attention=true",
     "train.cuda_graphs=true: data.reset_attention=true gives attention other shapes in each batch; set one"),
    ("cluster=dgx_h100 train.cuda_graphs=true profile.steps=3",
     "train.cuda_graphs=true: profile.steps=3 records layers, which do not run when a graph is replayed; leave"),
    ("profile.steps=1-2-3", "profile.steps='1-2-3': neither a step nor a range"),
    ("profile.steps=0", "profile.steps=0: the first step of a run is 1; use steps from 1 to 600"),
    ("profile.steps=12-10", "profile.steps=12-10: the range ends before it begins; use 10-12"),
    ("profile.steps=601-700", "profile.steps=601-700: the run ends with step train.steps=600"),
    ("optim=muon optim.muon.coefficients=[2,-1]", "optim.muon.coefficients=[2.0, -1.0]: 2 numbers; use three"),
    ("model=unet_tiny model.blocks_per_level=1000000000000", "use a value of at most 10,000"),
    ("model=unet_tiny model.image_channels=2", "model.image_channels=2: use one of 1, 3"),
    ("model=unet_tiny model.multipliers=[1,0]", "model.multipliers[1]=0: use a value of at least 1"),
    ("model=unet_tiny model.multipliers=[]", "model.multipliers=[]: each level needs one"),
    (f"{YARN} model.rope_attention_factor=nan", "model.rope_attention_factor=nan: use a value of at least 0"),
    (f"{YARN} model.rope_beta_fast=inf", "model.rope_beta_fast=inf: use a value of at most"),
    ("data.tokenizer_vocab=10000000000", "data.tokenizer_vocab=10000000000: "),
    ("data.name=../../x", "data.name='../../x': it names a directory in data.cache_dir; use a name without /"),
    ("data.name=..", "data.name='..': it names a directory"),
    ("data.name=''", "data.name='': it names a directory"),
    ("run.name=''", "run.name='': a run needs one; set it, or leave it out"),
    *((f"run.name='{name}'", f"^run.name={ascii(name)[1:-1]}: has a part") for name in BAD_NAMES),
    *((f"run.dir='{path}'", f"^run.dir={path}: the root directory; use") for path in ("/", "//", "/tmp/..")),
    ("run.name='a\0b'", r"^run.name='a\x00b': has the character NUL"),
    ("data=text data.path='a\0b'", r"^data.path='a\x00b': has the character NUL"),
    ("run.dir=''", "run.dir='': a run needs one"),
    ("run.dry=true run.world_size=1000000000000", "run.world_size=1000000000000: use a value of at most"),
    ("cluster=local cluster.atp_gb_s={2x4:[inf,1]}", "not a map of meshes to two bandwidths"),
    ("data.path=book.txt", "data.path=book.txt: data.source=sotu reads no path; add data=text"),
    ("run.world_size=8", "run.world_size=8: a run has as many devices as processes; add --dry-run"),
    ("model=gpt_tiny train.seq_len=512 cluster=local",
     "and learned positions cannot be extended; lower it, or train a new model with model.max_positions=512"),
]  # fmt: skip
LIMITS = {  # limits, and settings outside them
    "of at most 1": "optim.epsilon=inf model.norm_epsilon=inf optim.min_lr_ratio=2 cluster.hidden=1.5",
    "of at most 1,000,000": "optim.lr=1e30 optim.lr=inf optim.weight_decay=inf parallel.timeout_s=inf",
    "of at most 10,000,000": "train.batch_size=999999999999 model.vocab_size=10000000000",
    "of at most 10,000": "model.layers=1000000000000",
    "of at most 256": "data.workers=100000",
    "of at most ": "optim.clip_norm=inf model.rope_theta=inf parallel.pipeline.stages=1000000000000 "
    "cluster.matmul_tflops=inf cluster.levels=[{latency_us:inf}] cluster.levels=[{group_gb_s:inf}]",
    "of at least 0": "data.workers=-1",
    "of at least 1": "parallel.gx=0 train.steps=0",
    "above 0": "optim.epsilon=0",
    "above 1": "model.rope_theta=nan",
    "below 1": "data.validation_fraction=1",
}
MISTAKES_OF_GRIDS = [  # number of devices, settings, and a part of the message
    (8, "parallel.gx=2 parallel.gdata=2", "use parallel.gdata=4"),
    (3, "parallel.gx=3", "parallel.gx=3: does not divide model.heads=4; use one of 1, 2, 4"),
    (3, "parallel.gy=3", "parallel.gy·gz=3: does not divide model.hidden=128"),
    (3, "parallel.gdata=3", "train.batch_size=8: cannot be split over parallel.gdata·gz=3; use a multiple of 3"),
    (2, "train.micro_batch_size=3", "train.micro_batch_size=3: does not divide"),
    (4, "model=gpt_tiny train.precision=fp8 model.hidden=96 parallel.gx=4",
     "parallel.gx=4: does not divide (output features of blocks.0.attention.qkv.weight)/16=18; use one of 1, 2"),
]  # fmt: skip


def check(settings, world_size=1):
    return validate(configured_quickly(settings.split()), world_size)


def test_an_invalid_value_is_reported_in_one_line_with_a_remedy(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not wrong_messages(MISTAKES_OF_WORDS, lambda settings: configured(settings.split()))
    assert not wrong_messages(MISTAKES, check)
    for limit, settings in LIMITS.items():
        cases = [(setting, f"^{setting.partition('=')[0]} … use a value {limit}") for setting in settings.split()]
        assert not wrong_messages(cases, check)
    assert not wrong_messages(MISTAKES_OF_GRIDS, lambda world_size, settings: check(settings, world_size))
    assert not wrong_messages([(ReadConfig, ["checkpoint="], "^checkpoint=: empty; give a value")], from_arguments)


def test_a_path_that_is_no_regular_file_is_reported_as_such(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    for name in ("pipe.txt", "broken.txt", "loop.txt"):
        with pytest.raises(ConfigError, match=rf"{name} is a broken link, a pipe or a device; use regular files"):
            validate(configured(["data=text", f"data.path={tmp_path / name}"]), 1)


@pytest.mark.parametrize(("value", "steps"), [("1e3", 1000), ("2.0", 2), ("1.5e1", 15), ("7", 7)])
def test_whole_numbers_may_have_an_exponent_or_a_point(value, steps):
    assert configured([f"train.steps={value}"]).train.steps == steps


def test_a_name_of_other_trainers_is_no_key_and_leads_to_one_key_or_one_remedy():
    aliases = {(name, each.key) for each in keys.settings() for name in each.field.metadata.get("aliases", "").split()}
    names = [name for name, _ in aliases] + [*keys.REMEDIES]
    assert len(aliases) > 130 and len(names) == len({*names})
    assert not {*names} & {*known_keys()}


@pytest.mark.parametrize("family", ["gpt2", "moe", *map(full, ("llama", "olmo2", "gemma3"))])
def test_a_model_family_needs_a_size(family):
    assert validate(configured([f"model={family}", "model.layers=1"]), 1).sizes == GridSizes()
    with pytest.raises(ConfigError, match=f"model={family}: a family of models, not a size; choose one of"):
        configured([f"model={family}"])


PUBLIC = (
    "generate", "chat", "evaluate", "runs", "config", "checkpoint", "data.prepare", "planner", "planner.calibrate",
    "parallel.resharding", "parallel.pipeline",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_python_m_of_a_command_prints_the_description_of_the_command(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with suppress(SystemExit):
        runpy.run_module(f"gpt4d.{name}", run_name="__main__")
    package = find_spec(f"gpt4d.{name}").submodule_search_locations is not None
    description = importlib.import_module(f"gpt4d.{name}.__main__" if package else f"gpt4d.{name}").__doc__
    assert capsys.readouterr().out.strip().startswith(description.strip().splitlines()[0])


@pytest.mark.parametrize("model", ONE_OF_EACH_FAMILY)
def test_every_shipped_model_can_be_split_over_eight_devices(model):
    config = configured([f"model={model}", "cluster.memory_gib=1e4", "parallel.gx=2", "parallel.gy=2", "parallel.gz=2"])
    assert config.model.name == model
    assert validate(config, 16).sizes == GridSizes(2, 2, 2, 2)


def test_grid_problem_accepts_exactly_the_grids_with_equal_parts():
    """GPT-2's rules accept a grid if, and only if, it splits every dim of its parameters and the batch evenly."""
    model = GPT2Config(layers=1, hidden=24, heads=12, vocab_size=48, vocab_multiple=12, max_positions=8)
    rules, allowed = registry.describe(model).rules, 0
    for sizes in itertools.starmap(GridSizes, itertools.product(range(1, 7), repeat=3)):
        fits = grid_problem(rules, TrainConfig(batch_size=60, seq_len=8), ParallelConfig(), sizes) is None
        extents = {  # extents of the split dims: rows of normal and transposed layers, columns, heads, vocabulary
            (24, sizes.y * sizes.z), (24, sizes.x * sizes.z), (96, sizes.x * sizes.z), (24, sizes.y), (24, sizes.x),
            (96, sizes.x), (12, sizes.x), (48, sizes.x * sizes.z), (60, sizes.z),
        }  # fmt: skip
        assert fits == all(extent % parts == 0 for extent, parts in extents), sizes
        allowed += fits
    assert allowed > 10


def test_every_config_group_has_a_default():
    groups = {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()}
    composed = yaml.safe_load((CONFIG_DIR / "train.yaml").read_text())
    named = {key for entry in composed["defaults"] if isinstance(entry, dict) for key in entry if "/" not in key}
    assert named == groups


def test_a_model_can_choose_the_data_that_the_user_does_not(tmp_path, monkeypatch):
    configs = shutil.copytree(CONFIG_DIR, tmp_path / "configs")
    monkeypatch.setattr("gpt4d.config.composing.CONFIG_DIR", configs)
    defaults = ["gpt2", "_self_", {"override /data@_global_.data": "blue_marble"}]
    (configs / "model/seeing.yaml").write_text(yaml.dump({"defaults": defaults, "name": "seeing"}))
    (configs / "model/seeing_more.yaml").write_text(yaml.dump({"defaults": ["seeing", "_self_"], "layers": 3}))
    for settings, data in (
        ("model=seeing", "blue_marble"), ("model=seeing_more", "blue_marble"), ("model=seeing data=cifar10", "cifar10"),
        ("data=cifar10 model=seeing", "cifar10"), ("model=gpt_tiny", "sotu"), ("", "sotu"),
    ):  # fmt: skip
        config = configured(settings.split())
        assert config.data.name == data
        assert config.run.name == f"{config.model.name}-{data}"


OPTIMIZERS = [  # settings, optim.lr, optim.warmup_steps, optim.ema_decay
    (["model=gpt_10b"], 1.1e-4, 700, 0),
    (["model=unet_1b"], 1e-4, 500, 0.9999),
    (["model=utransformer_tiny"], 6e-3, 30, 0.95),
    (["model=gpt_10b", "optim.lr=5e-4"], 5e-4, 700, 0),
    (["optim.lr=5e-4", "model=unet_1b"], 5e-4, 500, 0.9999),
    (["model=unet_1b", "optim=finetune"], 2e-5, 50, 0),
    (["optim=finetune", "model=unet_1b", "optim.lr=1e-5"], 1e-5, 50, 0),
    (["model=unet_1b", "optim=unet"], 1e-4, 500, 0.9999),
    (["model=unet_1b", "train=finetune"], 2e-5, 50, 0),
    (["train=finetune", "optim.lr=1e-5"], 1e-5, 50, 0),
    (["train=finetune", "optim=unet", "model=gpt_10b"], 1e-4, 500, 0.9999),
]


@pytest.mark.parametrize(("overrides", "lr", "warmup_steps", "ema_decay"), OPTIMIZERS, ids=lambda value: str(value))
def test_a_model_sets_the_optimizer_unless_the_user_does(overrides, lr, warmup_steps, ema_decay):
    optim = configured(overrides).optim
    assert (optim.lr, optim.warmup_steps, optim.ema_decay) == (lr, warmup_steps, ema_decay)


@pytest.mark.parametrize("model", [m if m in ("gpt_125m", "unet_1b") else full(m) for m in SHIPPED_MODELS])
def test_optim_adamw_replaces_all_optimizer_settings_of_a_model(model):
    assert configured([f"model={model}"]).optim != OptimConfig()
    assert configured([f"model={model}", "optim=adamw"]).optim == OptimConfig()


def test_validation_and_every_module_with_kernels_or_specs_import_no_torch():
    files = {path: path.read_text(encoding="utf-8") for path in REPOSITORY.glob("gpt4d/**/*.py")}
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path, code in files.items()
        if re.search(r"from gpt4d.parallel.lazy import|\(LayerSpec\)", code)
    ]
    assert len(modules) > 20
    imports = "import sys; from tests.support.settings import configured; from gpt4d.validation import validate"
    script = f"{imports}; validate(configured([]), 1); import {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_first_use_of_torch_replaces_its_stand_in_in_all_modules():
    use = "import sys; from gpt4d.parallel.layers import linear, norm; linear.torch.float32; found = sys.modules.get"
    replaced = "norm.torch is linear.torch is found('torch') and norm.F is found('torch.nn.functional')"
    script = f"{use}; sys.exit(not ({replaced}))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_each_plan_pads_the_vocabulary_as_its_grids_need():
    model = ["model=gpt_tiny", "model.hidden=480", "model.heads=15", "model.vocab_size=259", "train.batch_size=15"]
    stages = ["parallel.pipeline.stages=2", "parallel.pipeline.stage_grids=[5x1x1x1,1x1x3x1]", "model.layers=4"]
    for world_size, grid, multiple in ((1, [], 128), (15, ["parallel.gx=5", "parallel.gz=3"], 1920), (8, stages, 1920)):
        config = validate(configured([*model, *grid]), world_size).config
        assert config.model.vocab_multiple == multiple
        assert config.model.padded_vocab_size == max(multiple, 384)
        assert storage.shapes(config.model)["tokens.weight"] == (259, 480)
