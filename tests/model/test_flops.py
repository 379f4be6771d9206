"""The FLOPs of a training step, the base of MFU, equal the products that torch counts in other libraries' models."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from diffusers import UNet2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from gpt4d.config import LoraConfig
from gpt4d.model import registry
from gpt4d.model.description import adapted
from gpt4d.model.unet import hugging_face as unet_adapter
from gpt4d.model.unet.config import UNetConfig
from tests.support.model_oracles import LENGTH, MODELS

SAMPLES = 2
UNETS = {
    "attention": UNetConfig(
        image_size=8, channels=16, multipliers=[1, 2], blocks_per_level=1, attention_at=[8, 4], head_size=8, groups=2
    ),
    "no attention": UNetConfig(image_size=8, channels=8, multipliers=[1, 2, 4], attention_at=[], groups=2),
}
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def library_model(config):
    """Return transformers' model of a config, whose attention and experts are products that torch counts."""
    settings = registry.of(config).hugging_face().hf_config(config)
    settings._attn_implementation, settings._experts_implementation = "eager", "eager"
    return AutoModelForCausalLM.from_config(settings)


def counted(model, length=LENGTH):
    """Return the FLOPs of a forward and a backward of transformers' model, and of all products of attention."""
    ids = torch.arange(SAMPLES * length).view(SAMPLES, length)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
    modules = {name: sum(kinds.values()) for name, kinds in counter.get_flop_counts().items()}
    angles = sum(flops for name, flops in modules.items() if "rotary_emb" in name)
    batched = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    return modules["Global"] - angles, batched - angles


def found(config, **changes):
    return replace(registry.describe(config), **changes).training_flops(SAMPLES, LENGTH)


def test_each_family_is_compared_with_a_library():
    compared = {registry.of(model).name for model in [*MODELS.values(), *UNETS.values()]}
    shipped = {name for name in registry.names() if registry.get(name).config.__module__.startswith("gpt4d.")}
    assert compared == shipped


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_flops_of_each_family_of_text_are_the_counted_products(name, chunks):
    config = replace(MODELS[name], vocab_multiple=1)
    model = library_model(config)
    expected, attention = counted(model)
    if local := getattr(config, "global_blocks", ()).count(False):
        # transformers computes all products and masks those outside the window.
        _, within = counted(model, config.window)
        expected -= (attention - within * LENGTH / config.window) * local / config.layers
    assert found(config, loss_chunks=chunks) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("targets", [["qkv"], ["qkv", "output", "up", "down"]], ids=len)
def test_flops_of_adapters_are_the_counted_products_of_peft(targets):
    config = replace(MODELS["qwen3"], vocab_multiple=1)
    theirs = TARGETS if len(targets) > 1 else {"q_proj", "k_proj", "v_proj"}
    model = get_peft_model(library_model(config), PeftConfig(r=3, target_modules=[*theirs]))
    model.enable_input_require_grads()
    description = adapted(registry.describe(config), LoraConfig(rank=3, targets=targets))
    assert description.training_flops(SAMPLES, LENGTH) == pytest.approx(counted(model)[0], rel=1e-12)


@pytest.mark.parametrize("name", UNETS)
def test_flops_of_a_unet_are_the_counted_products_of_diffusers(name):
    config, size = UNETS[name], UNETS[name].image_size
    model = UNet2DModel.from_config(unet_adapter.hf_config(config))
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
    images, timesteps = torch.randn(SAMPLES, config.image_channels, size, size), torch.arange(SAMPLES)
    with FlopCounterMode(display=False) as counter:
        model(images, timesteps).sample.sum().backward()
    assert found(config) == pytest.approx(counter.get_total_flops(), rel=1e-12)
