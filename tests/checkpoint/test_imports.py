"""An import computes what the library computes that has written the files, or is refused in one line."""

import copy
import inspect
import json
import os
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import peft
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from gpt4d.checkpoint import adapter_files, importer, storage
from gpt4d.config import ConfigError, GridSizes
from gpt4d.model import registry
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.unet import hugging_face as unet
from gpt4d.model.unet.config import UNetConfig
from gpt4d.task.diffusion_process import DiffusionProcess
from tests.support.checkpoint_sources import GEMMA3, LLAMA3, MIXTRAL, MODEL, OLMO2, OLMOE, QWEN2, QWEN3_MOE, YARN, save
from tests.support.checkpoints import tensors_of
from tests.support.grids import build_model, fill_from_hf, full, to_hf

IDS = torch.arange(24).view(2, 12)
ABSENT = object()  # a value of a key that the file does not have


def imported(read: Callable[[], Any]) -> Any:
    """Return the result of an import, or None if it is refused in one line."""
    try:
        return read()
    except ConfigError as error:
        assert len(str(error)) < 500 and "\n" not in str(error)
        return None


def changed(values, changes):
    return {key: value for key, value in {**values, **changes}.items() if value is not ABSENT}


# ------------------------------------------------------------------------------------------------- adapters of peft

GPT2 = GPT2Config(layers=2, hidden=32, heads=4, vocab_size=50, max_positions=64)
ADAPTED = [(MODEL, ("q_proj", "v_proj", "down_proj")), (GPT2, ("attn.c_attn", "c_fc"))]
VALUES = ABSENT, None, False, True, 0, 1, 2.5, "x", [], [0], {}, {"q_proj": 1}
KINDS = "gaussian", "eva", "olora", "pissa", "pissa_niter_4", "corda", "loftq", "orthogonal", "mica"
OTHER_VALUES: dict[str, tuple] = {
    "r": (3,),
    "bias": ("all", "lora_only"),
    "init_lora_weights": KINDS,
    "peft_type": ("LOHA", "LORA"),
    "task_type": ("SEQ_CLS", "CAUSAL_LM"),
    "target_modules": (
        ["q_proj"],
        "q_proj",
        ".*q_proj",
        "all-linear",
        ["self_attn.q_proj", *ADAPTED[0][1][1:]],
        ["c_attn", "c_fc"],
    ),
    "layers_to_transform": ([1],),
    "use_a_later_method": (),
}


@pytest.fixture(scope="module", params=ADAPTED, ids=["llama", "gpt2"])
def base(request, tmp_path_factory):
    """Return a model of transformers, its weights as gpt4d's, gpt4d's settings and the adapted layers."""
    config, targets = request.param
    directory = tmp_path_factory.mktemp("base")
    save(directory, config)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    adapter, state = registry.of(config).hugging_face(), model.state_dict()
    weights = {
        name: adapter.from_hf(name, [state[key] for key in adapter.names(name, config)], shape, config)
        for name, shape in storage.shapes(config).items()
    }
    return model, weights, config, targets


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": [*base[3]], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(copy.deepcopy(base[0]), peft.LoraConfig(**settings, init_lora_weights=False))
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def change(saved, tmp_path):
    """Return a function that writes the adapters to ``tmp_path`` with some settings changed."""
    settings = json.loads((saved / "adapter_config.json").read_text())
    save_file(load_file(saved / "adapter_model.safetensors"), tmp_path / "adapter_model.safetensors")

    def write(**changes):
        (tmp_path / "adapter_config.json").write_text(json.dumps(changed(settings, changes)))
        return tmp_path

    return write


def first(tensors, half="A"):
    return min(name for name in tensors if f"lora_{half}" in name)


def with_adapters(base, directory):
    """Return the logits of the model with imported adapters."""
    model, weights, config, _ = base
    lora, adapters = adapter_files.read(directory, config)
    merged = adapter_files.merging((weights | adapters).__getitem__, replace(config, lora=lora))
    ours = copy.deepcopy(model)
    ours.load_state_dict(to_hf({name: merged(name) for name in weights}, config), strict=False)
    return ours(IDS).logits


@pytest.mark.parametrize(
    "keys",
    [("use_dora", "init_lora_weights", "layers_to_transform", "target_modules"), full(None, id="all")],
    ids=["sample", "all"],
)
def test_adapters_with_any_changed_setting_compute_what_peft_computes_or_are_refused(base, change, keys):
    wrong, equal = [], set()
    every = [field.name for field in fields(peft.LoraConfig)]
    for key in keys or dict.fromkeys([*every, *OTHER_VALUES]):
        for value in (*VALUES, *OTHER_VALUES.get(key, ())) if keys is None else OTHER_VALUES.get(key, (True,)):
            directory = change(**{key: value})
            ours = imported(lambda directory=directory: with_adapters(base, directory))
            if ours is None:
                continue
            try:  # Where peft itself fails there is nothing to equal.
                theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base[0]), directory).eval()(IDS).logits
            except (TypeError, ValueError, KeyError, AttributeError):
                continue
            equal.add(key)
            if not torch.allclose(ours, theirs, rtol=0, atol=1e-5):
                wrong.append((key, value))
    assert not wrong
    assert keys or equal >= {*every}, "the default of each setting is imported"


@pytest.mark.parametrize("seed", [0, *map(full, range(1, 20))], ids=str)
def test_damaged_adapters_compute_what_peft_computes_or_are_one_line(base, saved, tmp_path, seed):
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(30):
        for file in saved.glob("adapter_*"):
            content = bytearray(file.read_bytes())
            for _ in range(draw.randrange(3)):
                place = draw.randrange(min(len(content), 2000))
                content[place : place + draw.randrange(3)] = draw.choice([b"", b"0", b'"', b",", draw.randbytes(1)])
            (tmp_path / file.name).write_bytes(content)
        ours = imported(lambda: with_adapters(base, tmp_path))
        if ours is not None:
            theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base[0]), tmp_path).eval()(IDS).logits
            assert not theirs.isfinite().all() or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported; use adapters with True"),
        ({"r": True}, "r=True and lora_alpha=5 are not both numbers"),
        ({"r": 10**9}, "lora.rank=1000000000: use a value"),
        ({"r": 4}, r"lora_A.weight must be of shape \[4, 32\], but is \[3, 32\]"),
        ({"lora_alpha": 10**400}, "lora.alpha=1000"),
        ({"lora_alpha": float("nan")}, "lora.alpha=nan"),
        ({"target_modules": ["v_proj", "c_fc"]}, "lora_A.weight belongs to no target module"),
        ({"target_modules": "q_proj"}, "target_modules='q_proj'; use a rank above 0 and a list of names"),
    ],
)
def test_impossible_settings_of_adapters_are_one_line(base, change, settings, message):
    with pytest.raises(ConfigError, match=rf"^adapter=\S+: .*{message}") as raised:
        adapter_files.read(change(**settings), base[2])
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((lambda t, half=half: t.pop(first(t, half)), rf"lora_{half}\.weight is missing") for half in "AB"),
        *(
            (lambda t, dtype=dtype: t.update({first(t): t[first(t)].to(dtype)}), "has dtype")
            for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)
        ),
        *((lambda t, value=value: t[first(t)].fill_(value), "not finite") for value in (float("nan"), float("inf"))),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(3, 32)}), "is not an adapter of a"),
    ],
)
def test_damaged_tensors_of_adapters_are_one_line(base, change, damage, message):
    file = change() / "adapter_model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"^adapter=\S+: .*{message}"):
        adapter_files.read(file.parent, base[2])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_or_nested_brackets_instead_of_a_file_of_adapters_are_one_line(base, change, name):
    directory = change()
    (directory / name).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=f"no readable {name}|{name}: damaged"):
        adapter_files.read(directory, base[2])
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(ConfigError, match=f"{name}.* not a regular file"):
        adapter_files.read(directory, base[2])


# --------------------------------------------------------------------------------------- configurations of transformers

FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA3,
    "qwen2": QWEN2,
    "qwen3": YARN,
    "olmo2": OLMO2,
    "gemma3": GEMMA3,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen3_moe": QWEN3_MOE,
}
YARN_SCALING = {"factor": 4.0, "original_max_position_embeddings": 16}
# Keys that only older files have, and values of keys whose type does not suggest one.
OLDER = (
    "rope_scaling",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
OLDER += "sliding_window_pattern", "torch_dtype", "num_labels", "attn_implementation", "per_layer_config"
OLDER += ("configuration_files",)
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
CHANGED: dict[str, list] = {
    "rope_scaling": [
        {"type": "yarn"} | YARN_SCALING,
        {"rope_type": "yarn", "rope_theta": 77.0} | YARN_SCALING,
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "low_freq_factor": 0.5, "high_freq_factor": 2.0} | YARN_SCALING,
        {"rope_type": "yarn", "attention_factor": 0.0} | YARN_SCALING,
        {"rope_type": "yarn", "attention_factor": 1.5, "truncate": False, "beta_fast": 8} | YARN_SCALING,
        {"rope_type": "yarn", "mscale": 0.5, "mscale_all_dim": 0.7} | YARN_SCALING,
        {"rope_type": "yarn", "partial_rotary_factor": 0.5} | YARN_SCALING,
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "default", "factor": 2.0},
        {},
    ],
    "rope_parameters": [
        {"rope_theta": 100.0},
        {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
        {"full_attention": {"rope_type": "default", "rope_theta": 50.0, "factor": 3.0}},
        {"sliding_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
        {},
    ],
    "layer_types": [LAYERS[:2], LAYERS[:1] * 2, LAYERS, LAYERS[1:2] * 3],
    "hidden_act": ["gelu"],
    "hidden_activation": ["gelu", "gelu_new"],
    "activation_function": ["gelu", "gelu_pytorch_tanh"],
    "n_inner": [128, 64],
    "dtype": ["bfloat16"],
    "torch_dtype": ["bfloat16"],
    "attn_implementation": ["eager"],
    "mlp_only_layers": [[0]],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.5, "layer_norm_epsilon": 0.5}}, {}],
    "sliding_window_pattern": [2, 3, 0],
    "transformers_weights": ["other.safetensors"],
    "configuration_files": [["config.5.0.0.json"]],
}
# Two keys at once: older files have these instead of rope_parameters, layer_types and num_key_value_heads.
TOGETHER = [
    {"rope_parameters": ABSENT, "rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": ABSENT, "rope_theta": 100.0, "rope_local_base_freq": 10.0},
    {"rope_parameters": ABSENT, "rope_scaling": {"type": "yarn"} | YARN_SCALING},
    {"rope_scaling": {"rope_type": "yarn", "factor": None}, "original_max_position_embeddings": 8},
    {"rope_theta": 100.0, "rope_scaling": {"type": "yarn"} | YARN_SCALING},
    {"layer_types": ABSENT, "sliding_window_pattern": 2},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": ABSENT},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"num_key_value_heads": ABSENT, "head_dim": ABSENT},
    {"num_experts": 3, "num_local_experts": 5},
    {"n_embd": ABSENT, "hidden_size": 32, "n_layer": ABSENT, "num_hidden_layers": 2},
    {"dtype": "float32", "torch_dtype": "bfloat16"},
]


@pytest.fixture(scope="module")
def source(request, tmp_path_factory):
    """Return a directory with a model whose weights are large enough to matter, and a second file of weights."""
    directory = tmp_path_factory.mktemp("source")
    save(directory, FAMILIES[request.param])
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + ("norm" in name))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, directory / "other.safetensors", {"format": "pt"})
    return directory


def keys_of(directory, monkeypatch):
    """Return the keys of a configuration, and all keys that transformers asks for, also those that no file has."""
    config, asked = AutoConfig.from_pretrained(directory), set()
    original = PreTrainedConfig.__getattribute__
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__getattribute__", lambda c, key: asked.add(key) or original(c, key))
        AutoModelForCausalLM.from_pretrained(directory)(IDS)
    asked = {key for key in asked if key[0] != "_" and not callable(getattr(config, key, None))}
    return {field.name for field in fields(config)} | {*config.attribute_map, *OLDER} | asked


def changes_of(keys, values):
    """Yield changes of each key: removed, null, and other values of its type."""
    for key in sorted(keys):
        now = values.get(key)
        numbers = [now + 1, now * 2] if type(now) is int else [now / 2, now + 1] if type(now) is float else []
        guessed = [not now] if type(now) is bool else [True, 2, 0.5, "x"] if now is None else numbers
        yield from ({key: value} for value in (ABSENT, None, *(CHANGED.get(key) or guessed)))


def logits_of_run(run, model):
    ours = build_model(model, GridSizes(), torch.float32)
    fill_from_hf(ours, to_hf(tensors_of(run, "model."), model))
    with torch.no_grad():
        return ours(IDS, torch.arange(len(IDS)))[..., : model.vocab_size]


@pytest.mark.parametrize(
    ("source", "some_keys"),
    [
        ("llama", ("rope_scaling", "is_causal", "transformers_weights", "configuration_files")),
        *(full(name, None) for name in FAMILIES),
    ],
    indirect=["source"],
)
def test_a_model_with_any_changed_setting_computes_what_transformers_computes_or_is_refused(
    source, some_keys, tmp_path, monkeypatch
):
    values, wrong, accepted = json.loads((source / "config.json").read_text()), [], 0
    directory = tmp_path / "changed"
    directory.mkdir()
    for name in ("model.safetensors", "other.safetensors"):
        (directory / name).symlink_to(source / name)
    other = json.dumps(values | dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), 0.5))
    (directory / "config.5.0.0.json").write_text(other)
    changes_of_keys = changes_of(some_keys or keys_of(source, monkeypatch), values)
    for number, changes in enumerate([*changes_of_keys, *([] if some_keys else TOGETHER)]):
        given, run = changed(values, changes), tmp_path / f"run{number}"
        (directory / "config.json").write_text(json.dumps(given))
        model = imported(lambda run=run: importer.import_model(str(directory), run, "none"))
        if model is None:
            continue
        try:  # Where transformers itself fails there is nothing to equal.
            theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(IDS).logits.detach()
        except (TypeError, ValueError, AttributeError, IndexError):
            continue
        accepted += 1
        if not (logits_of_run(run, model) - theirs).norm() <= 1e-5 * theirs.norm():
            wrong.append(changes)
        adapter = registry.of(model).hugging_face()
        if adapter.config_from_hf(model.name, adapter.documents(model, given)["config.json"]) != model:
            wrong.append(changes | {"exported": True})
    assert not wrong
    assert accepted > number / 5


# ----------------------------------------------------------------------------------------------- pipelines of diffusers

UNET = UNetConfig(
    image_size=8, channels=16, multipliers=[1, 2], blocks_per_level=1, attention_at=[4], head_size=8, groups=4
)
SCHEDULERS = {
    "exported": unet.scheduler_to_hf(UNET),
    "cosine": {"_class_name": "DDPMScheduler", "beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 50},
    "linear": {"_class_name": "DDPMScheduler", "clip_sample": False},
}
OTHER_CHOICES: dict[str, tuple] = {
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"),
    "prediction_type": ("epsilon", "sample", "v_prediction"),
    "timestep_spacing": ("leading", "trailing", "linspace"),
    "variance_type": ("fixed_large", "learned_range"),
    "trained_betas": ([0.1] * 50, [0.1] * 1000),
    "num_train_timesteps": (50, 100),
    "down_block_types": (["DownBlock2D"] * 2, ["AttnDownBlock2D"] * 2, ["DownBlock2D", "ResnetDownsampleBlock2D"]),
    "up_block_types": (["UpBlock2D"] * 2, ["UpBlock2D", "AttnUpBlock2D"]),
    "block_out_channels": ([16, 16], [16, 24]),
    "sample_size": (16, [8, 16]),
    "act_fn": ("gelu",),
}
SCALARS = ABSENT, None, False, True, 0, 1, 2, 0.5, 0.004, "x"


def unet_of(values):
    """Return gpt4d's settings, checked as an import does."""
    model = unet.config_from_hf("source", values)
    registry.check_model(model)
    return model


def signature(*kinds):
    """Return the keys of the configuration of classes of diffusers."""
    return sorted({key for kind in kinds for key in inspect.signature(kind.__init__).parameters} - {"self"})


def fixed_model(x, timestep):
    return 1.3 * x.roll(1, -1) + torch.sin(3 * x) - timestep / 100


def drawn_by_diffusers(values):
    """Return the samples of five steps of a DDIMScheduler."""
    theirs = DDIMScheduler.from_config(values)
    theirs.set_timesteps(5)
    x = torch.randn(2, 8, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for timestep in theirs.timesteps:
        x = theirs.step(fixed_model(x, timestep), timestep, x, use_clipped_model_output=True).prev_sample
    return x


def drawn_by_gpt4d(model):
    process = DiffusionProcess(model.noise_schedule, model.timesteps, model.prediction, spacing=model.timestep_spacing)
    x = torch.randn(2, 8, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return process.ddim(lambda x, timesteps: fixed_model(x, timesteps[0]), x, 5, model.clip_range)


@pytest.mark.parametrize("kind", ["exported", full("cosine"), full("linear")])
def test_a_scheduler_with_any_changed_setting_draws_the_samples_of_diffusers_or_is_refused(kind):
    """Where diffusers itself fails there is nothing to equal."""
    wrong, equal = [], set()
    for key in ("_class_name", *signature(DDIMScheduler, DDPMScheduler)):
        for value in (*SCALARS, *OTHER_CHOICES.get(key, ())):
            values = changed(SCHEDULERS[kind], {key: value})
            try:
                model = imported(lambda values=values: unet_of({**unet.hf_config(UNET), "scheduler": values}))
                theirs = None if model is None else drawn_by_diffusers(values)
            except (TypeError, ValueError, IndexError):  # which an import reports in one line
                continue
            if model is not None:
                equal.add(key)
                drawn = drawn_by_gpt4d(model), drawn_by_diffusers(unet.scheduler_to_hf(model))
                if not all((ours - theirs).norm() <= 1e-4 * theirs.norm() for ours in drawn):
                    wrong.append((key, value))
    assert not wrong
    assert equal >= {*signature(DDIMScheduler, DDPMScheduler)}


@pytest.mark.parametrize("keys", [("norm_eps", "sample_size", "act_fn"), full(None)], ids=["sample", "all"])
def test_a_unet_with_any_changed_setting_predicts_what_diffusers_predicts_or_is_refused(keys):
    torch.manual_seed(0)
    values, wrong, equal = unet.hf_config(UNET), [], set()
    state = UNet2DModel.from_config(values).state_dict()
    for key in keys or signature(UNet2DModel):
        for value in (*SCALARS, *OTHER_CHOICES.get(key, ())):
            given = changed(values, {key: value})
            try:
                model = imported(lambda given=given: unet_of(given))
                if model is None:
                    continue
                theirs = UNet2DModel.from_config(given).eval()
                theirs.load_state_dict(state)
                ours = build_model(model, GridSizes(), torch.float32)
                fill_from_hf(ours, state)
                noisy, timesteps = torch.randn(2, model.image_size, model.image_size, 3), torch.tensor([3, 40])
                with torch.no_grad():
                    expected = theirs(noisy.movedim(-1, 1), timesteps).sample.movedim(1, -1)
            except (TypeError, ValueError, ArithmeticError, KeyError, RuntimeError):  # other shapes among them
                continue
            equal.add(key)
            with torch.no_grad():
                if not torch.allclose(ours(noisy, timesteps, torch.arange(2)), expected, rtol=0, atol=1e-4):
                    wrong.append((key, value))
    assert not wrong
    assert equal >= {"norm_eps", "sample_size"}
