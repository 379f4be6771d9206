"""Width transfer: the parametrization of Tensor Programs V, for every family of models."""

import math

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.routing import routing_summary
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.plan import one_stage
from gpt4d.step import TrainStep, build_stage
from tests.support.grids import build_model, full, hf_model, token_loss, train_in_rank
from tests.support.settings import configured
from tests.support.training import losses_and_norms, plain_torch_run

WIDTH = 4  # relative to the base model
TRANSFER = (
    "optim.width_transfer=true", "model.base_hidden=6", "optim.epsilon=1e-10", "optim.clip_norm=1e6", "optim.lr=0.02",
)  # fmt: skip
HEADS = "model.key_value_heads=2", "model.head_size=6", "model.inner=40"
MODELS = {
    "gpt2": (),
    "llama": ("model=llama_tiny", "model.tied=false", *HEADS),
    "gemma3": ("model=gemma3_tiny", "model.window=8", *HEADS),
}


def with_multipliers(model, gemma):
    """Change a model of transformers to the form with multipliers: logits are divided by the relative width."""
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    with torch.no_grad():
        if gemma:  # the embedding is multiplied by the square root of the base width, and not of the width
            norm.weight.add_(1).mul_(WIDTH**0.5).sub_(1)
            model.model.embed_tokens.weight.mul_(WIDTH**0.5)
            model.model.embed_tokens.embed_scale.div_(WIDTH**0.5)
        else:
            for parameter in norm.parameters():
                parameter.mul_(WIDTH)
    norm.register_forward_hook(lambda module, inputs, output: output / WIDTH)
    return model


def rate_factor(name):
    """Return the factor of a parameter in Table 8 of Tensor Programs V, for a model of transformers."""
    outside = any(word in name for word in ("wte", "wpe", "embed_tokens", "lm_head", "norm", "ln_", "bias"))
    return 1.0 if outside else 1 / WIDTH


@pytest.mark.parametrize("name", MODELS)
def test_a_run_equals_the_form_with_multipliers(ranks, tiny, name):
    config = tiny(*MODELS[name], "model.hidden=24", *TRANSFER)
    ranks.run(1, train_in_rank, config)
    start = build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed)
    expected, _ = plain_torch_run(config, with_multipliers(hf_model(start), name == "gemma3"), rate_factor=rate_factor)
    losses, _ = losses_and_norms(config)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0], "nothing was learnt"


TEXTS = {
    "gpt2": ["model=gpt_tiny"], "llama": ["model=llama_tiny", "model.tied=false"], "olmo2": ["model=olmo2_tiny"],
    "gemma3": ["model=gemma3_tiny"], "moe": ["model=moe_tiny", "model.balance_rate=0"],
}  # fmt: skip
UNET = ["model=unet_tiny", "model.image_size=8", "model.multipliers=[1]", "model.blocks_per_level=1",
        "model.attention_at=[8]", "model.groups=4", "model.head_size=8", "model.base_channels=16"]  # fmt: skip
OPTIMIZERS = {
    "adamw": ["optim.lr=0.005", "optim.lr_factors.router=10", "optim.algorithm=adamw"],
    "muon": ["optim.lr=0.005", "optim.lr_factors.router=10", "optim.algorithm=muon"],
    "original scale of muon": [
        "optim.lr=0.02",
        "optim.lr_factors.router=2.5",
        "optim.algorithm=muon",
        "optim.muon.scale=original",
    ],
}


def of_width(family, features):
    """Return the overrides of a model with a number of channels or of hidden features."""
    if family == "unet":
        return [*UNET, f"model.channels={features // 2}"]
    heads = features // 8
    of_llama = [f"model.key_value_heads={heads}", "model.head_size=8", f"model.inner={3 * features}"]
    sizes = ["model.layers=2", "model.vocab_size=100", "model.base_hidden=32", "train.seq_len=16"]
    own = [f"model.hidden={features}", f"model.heads={heads}", *(of_llama if family != "gpt2" else ())]
    return [*TEXTS[family], *own, *sizes]


def squared_error(module, batch):
    *inputs, targets = batch
    return (module(*inputs) - targets).square().sum()


def output_changes(configs):
    """Return the root mean square of the change of the output of each model in some steps on one batch.

    For a mixture, return the change of the logits of routers, which are outputs too: E logits with a small standard
    deviation s have the entropy ln E - s²/2.
    """
    changes = []
    for config in configs:
        stage = build_stage(one_stage(config), Grid(GridSizes()), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        if hasattr(config.model, "channels"):
            images, loss = torch.randn(4, 8, 8, 3, generator=generator), squared_error
            inputs = images, torch.arange(4) * 200, torch.arange(4)
            microbatch = *inputs, torch.randn(images.shape, generator=generator)
        else:
            ids, loss = torch.randint(0, 100, (4, 17), generator=generator), token_loss
            inputs = ids[:, :-1], torch.arange(4)
            microbatch = ids[:, :-1], ids[:, 1:], torch.arange(4)
        step = TrainStep(stage, whole_model(loss), config.optim)
        before = stage.module(*inputs).detach().clone()
        for _ in range(4):
            routing = step([microbatch], 1, 64, config.optim.lr).routing
        if len(routing):
            values = routing_summary(routing, 1)
            changes.append((2 * (math.log(config.model.experts) - values["entropy"])) ** 0.5)
        else:
            changes.append((stage.module(*inputs) - before).square().mean().sqrt().item())
    return changes


# `make test` has each family and each optimizer.
CASES = [
    (pytest.param if (i + j) % 3 == 0 else full)(family, optimizer)
    for i, family in enumerate([*TEXTS, "unet"])
    for j, optimizer in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("family", "optimizer"), CASES)
def test_the_output_changes_equally_at_every_width(ranks, family, optimizer):
    configs = [
        configured([*of_width(family, features), f"optim.width_transfer={transfer}", *OPTIMIZERS[optimizer]])
        for features, transfer in ((256, "true"), (32, "true"), (256, "false"))
    ]
    wide, narrow, without = ranks.run(1, output_changes, configs)[0]
    assert 0.5 < wide / narrow < 1.5
    assert without / narrow > 2, "this output changes equally even without the transfer"
