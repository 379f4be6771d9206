"""An import computes what the library computes that has written the files, or is refused in one line."""

import copy
import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gpt4d.checkpoint import adapter_files, storage
from gpt4d.config import ConfigError
from gpt4d.model import registry
from tests.support.checkpoint_sources import MODEL, save
from tests.support.grids import full, to_hf

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

ADAPTED = "q_proj", "v_proj", "down_proj"
TENSOR = "base_model.model.model.layers.1.self_attn.v_proj.lora_{}.weight"
VALUES = ABSENT, None, False, True, 0, 1, 2.5, "x", [], [0], {}, {"q_proj": 1}
KINDS = "gaussian", "eva", "olora", "pissa", "pissa_niter_4", "corda", "loftq", "orthogonal", "mica"
OTHER_VALUES: dict[str, tuple] = {
    "r": (3,),
    "bias": ("all", "lora_only"),
    "init_lora_weights": KINDS,
    "peft_type": ("LOHA", "LORA"),
    "task_type": ("SEQ_CLS", "CAUSAL_LM"),
    "target_modules": (["q_proj"], "q_proj", ".*q_proj", "all-linear", [f"self_attn.{ADAPTED[0]}", *ADAPTED[1:]]),
    "layers_to_transform": ([1],),
    "use_a_later_method": (),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a model of transformers, and its weights as gpt4d's."""
    directory = tmp_path_factory.mktemp("base")
    save(directory, MODEL)
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    adapter, state = registry.of(MODEL).hugging_face(), model.state_dict()
    weights = {
        name: adapter.from_hf(name, [state[key] for key in adapter.names(name, MODEL)], shape, MODEL)
        for name, shape in storage.shapes(MODEL).items()
    }
    return model, weights


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": [*ADAPTED], "task_type": "CAUSAL_LM"}
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


def with_adapters(base, directory):
    """Return the logits of the model with imported adapters."""
    model, weights = base
    lora, adapters = adapter_files.read(directory, MODEL)
    merged = adapter_files.merging((weights | adapters).__getitem__, replace(MODEL, lora=lora))
    ours = copy.deepcopy(model)
    ours.load_state_dict(to_hf({name: merged(name) for name in weights}, MODEL), strict=False)
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported; use adapters with True"),
        ({"r": True}, "r=True and lora_alpha=5 are not both numbers"),
        ({"r": 10**9}, "lora.rank=1000000000: use a value"),
        ({"r": 4}, r"lora_A.weight must be of shape \[4, 32\], but is \[3, 32\]"),
        ({"lora_alpha": 10**400}, "lora.alpha=1000"),
        ({"lora_alpha": float("nan")}, "lora.alpha=nan"),
        ({"target_modules": ["q_proj", "v_proj"]}, "down_proj.lora_A.weight belongs to no target module"),
        ({"target_modules": "q_proj"}, "target_modules='q_proj'; use a rank above 0 and a list of names"),
    ],
)
def test_impossible_settings_of_adapters_are_one_line(change, settings, message):
    with pytest.raises(ConfigError, match=rf"^adapter=\S+: .*{message}") as raised:
        adapter_files.read(change(**settings), MODEL)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((lambda t, half=half: t.pop(TENSOR.format(half)), rf"lora_{half}\.weight is missing") for half in "AB"),
        *(
            (lambda t, dtype=dtype: t.update({TENSOR.format("B"): t[TENSOR.format("B")].to(dtype)}), "has dtype")
            for dtype in (torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)
        ),
        *((lambda t, v=v: t[TENSOR.format("A")].fill_(v), "not finite") for v in (float("nan"), float("inf"))),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(3, 32)}), "is not an adapter of a"),
    ],
)
def test_damaged_tensors_of_adapters_are_one_line(change, damage, message):
    file = change() / "adapter_model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=rf"^adapter=\S+: .*{message}"):
        adapter_files.read(file.parent, MODEL)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_or_nested_brackets_instead_of_a_file_of_adapters_are_one_line(change, name):
    directory = change()
    (directory / name).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=f"no readable {name}|{name}: damaged"):
        adapter_files.read(directory, MODEL)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(ConfigError, match=f"{name}.* not a regular file"):
        adapter_files.read(directory, MODEL)
