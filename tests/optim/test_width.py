"""Width transfer: the parametrization of Tensor Programs V, for every family of models."""

import pytest
import torch

from gpt4d.config import GridSizes
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.step import TrainStep, build_stage
from tests.support.grids import build_model, hf_model, metric_lines, token_loss, train_in_rank
from tests.support.settings import configured
from tests.test_trainer import plain_torch_run

WIDTH = 4  # relative to the base model
TRANSFER = (
    "optim.width_transfer=true",
    "model.base_hidden=6",
    "optim.epsilon=1e-10",
    "optim.clip_norm=1e6",
    "optim.lr=0.02",
)
LLAMA = ("model=llama_tiny", "model.tied=false", "model.key_value_heads=2", "model.head_size=6", "model.inner=40")
GEMMA = ("model=gemma3_tiny", "model.key_value_heads=2", "model.head_size=6", "model.inner=40", "model.window=8")


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


@pytest.mark.parametrize("settings", [(), LLAMA, GEMMA], ids=["gpt2", "llama", "gemma3"])
def test_a_run_equals_the_form_with_multipliers(ranks, tiny, settings):
    config = tiny(*settings, "model.hidden=24", *TRANSFER)
    ranks.run(1, train_in_rank, config)
    start = build_model(config.model, GridSizes(), torch.float32, seed=config.train.seed)
    model = with_multipliers(hf_model(start), "model=gemma3_tiny" in settings)
    expected, _ = plain_torch_run(config, model, rate_factor=rate_factor)
    losses = [line["loss"] for line in metric_lines(config.run.dir)]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0], "nothing was learnt"


TEXTS = {
    "gpt2": ("model=gpt_tiny",), "llama": LLAMA[:2], "olmo2": ("model=olmo2_tiny",), "gemma3": ("model=gemma3_tiny",),
}  # fmt: skip
UNET = ("model=unet_tiny", "model.image_size=8", "model.multipliers=[1]", "model.blocks_per_level=1",
        "model.attention_at=[8]", "model.groups=4", "model.head_size=8")  # fmt: skip
MUON = ("optim.algorithm=muon",)


def text_of_width(family, features):
    heads = features // 8
    of_llama = (f"model.key_value_heads={heads}", "model.head_size=8", f"model.inner={3 * features}")
    return (*TEXTS[family], f"model.hidden={features}", f"model.heads={heads}",
            *(of_llama if family != "gpt2" else ()), "model.layers=2", "model.vocab_size=100",
            "model.base_hidden=32", "train.seq_len=16")  # fmt: skip


def unet_of_width(features):
    return (*UNET, f"model.channels={features}", "model.base_channels=32")


def squared_error(module, batch):
    *inputs, targets = batch
    return (module(*inputs) - targets).square().sum()


def output_changes(configs):
    """Return the root mean square of the change of the output of each model in some steps on one batch."""
    changes = []
    for config in configs:
        stage = build_stage(config, Grid(GridSizes()), torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        if hasattr(config.model, "channels"):
            images = torch.randn(4, 8, 8, 3, generator=generator)
            inputs = images, torch.arange(4) * 200, torch.arange(4)
            microbatch = *inputs, torch.randn(images.shape, generator=generator)
            loss = squared_error
        else:
            ids = torch.randint(0, 100, (4, 17), generator=generator)
            inputs = ids[:, :-1], torch.arange(4)
            microbatch, loss = (ids[:, :-1], ids[:, 1:], torch.arange(4)), token_loss
        step = TrainStep(stage, whole_model(loss), config.optim)
        with torch.no_grad():
            before = stage.module(*inputs).clone()
        for _ in range(4):
            step([microbatch], 1, 64, config.optim.lr)
        with torch.no_grad():
            changes.append((stage.module(*inputs) - before).square().mean().sqrt().item())
    return changes


@pytest.mark.parametrize("optimizer", [(), MUON, (*MUON, "optim.muon.scale=original")], ids=["adamw", "muon", "scale"])
@pytest.mark.parametrize("family", [*TEXTS, "unet"])
def test_the_output_changes_equally_at_every_width(ranks, family, optimizer):
    def config(features, *settings):
        model = unet_of_width(features) if family == "unet" else text_of_width(family, features)
        lr = "optim.lr=0.02" if "optim.muon.scale=original" in optimizer else "optim.lr=0.005"
        return configured([*model, "optim.width_transfer=true", lr, *optimizer, *settings])

    wide, narrow, without = ranks.run(
        1, output_changes, [config(256), config(32), config(256, "optim.width_transfer=false")]
    )[0]
    assert 0.5 < wide / narrow < 1.5
    assert without / narrow > 2, "this output changes equally even without the transfer"
