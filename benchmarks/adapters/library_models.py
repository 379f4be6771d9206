"""Models of transformers and diffusers with the weights of gpt4d's."""

from torch import nn

from gpt4d.config import ModelConfig
from gpt4d.model import registry
from gpt4d.parallel.layout import spec_of


def library_model(model: ModelConfig, ours: nn.Module) -> nn.Module:
    """Return the library's model of the same family with the weights of ``ours``, which is not sharded."""
    family = registry.of(model)
    adapter, state = family.hugging_face(), {}
    for name, parameter in ours.named_parameters():
        unpadded = parameter.detach()[tuple(map(slice, spec_of(parameter).stored_shape))]
        state |= zip(adapter.names(name, model), adapter.to_hf(name, unpadded, model), strict=True)
    if family.task == "diffusion":
        from diffusers import UNet2DModel

        theirs = UNet2DModel.from_config(adapter.hf_config(model))
    else:
        from transformers import GPT2LMHeadModel

        theirs = GPT2LMHeadModel(adapter.hf_config(model))
        state["lm_head.weight"] = state["transformer.wte.weight"]
    theirs.load_state_dict(state)
    return theirs
