"""The graph of gradients of symbolic tensors: a model calls the same kernels in the same order as in torch."""

import itertools
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import Config, GridSizes
from gpt4d.model import registry
from gpt4d.parallel.context import Context, layer_settings
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.kernels import Kernel, PlannedKernel
from gpt4d.parallel.symbolic.stage import SymbolicGrid, SymbolicLayer, SymbolicWeights
from gpt4d.parallel.symbolic.tensor import SymbolicTensor, backward
from gpt4d.plan import one_stage
from gpt4d.step import build_stage
from tests.parallel.counting_device import CountingDevice
from tests.support.grids import full
from tests.support.settings import configured

TEXT = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.vocab_size=64", "model.vocab_multiple=16"]
GPT2 = [*TEXT, "model.max_positions=16", "train.seq_len=16"]
LLAMA = ["model=llama_tiny", *GPT2, "model.key_value_heads=2", "model.head_size=8", "model.inner=48"]
UNET = [
    "model=unet_tiny", "model.channels=8", "model.multipliers=[1,2]", "model.blocks_per_level=1", "model.image_size=8",
    "model.attention_at=[4]", "model.groups=4", "model.head_size=8", "train.seq_len=1",
]  # fmt: skip
MODELS = {"gpt2": ["model=gpt_tiny", *GPT2], "llama": LLAMA, "unet": UNET}
SAMPLES = 4


def recorded_calls(run) -> list[tuple]:
    """Return name, shapes and dtypes of each kernel that ``run`` calls."""
    calls, call = [], Kernel.__call__

    def record(kernel, *args):
        if not isinstance(kernel, PlannedKernel):
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor | SymbolicTensor)]
            described = [(tuple(arg.shape), str(arg.dtype).removeprefix("torch.")) for arg in tensors]
            calls.append((kernel.name, *described))
        return call(kernel, *args)

    with patch.object(Kernel, "__call__", record):
        run()
    return calls


def in_torch(config: Config):
    stage = build_stage(one_stage(config), Grid.single_device(), torch.device("cpu"))

    def new(shape, dtype):
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    batch = stage.module.spec.planned_batch(new, SAMPLES, config.train.seq_len)
    return lambda: stage.module.loss_sum(*batch).backward()


def on_symbolic_tensors(config: Config):
    device, description, train = CountingDevice(), registry.describe_run(config), config.train
    dtype = "float32" if train.precision == "fp32" else "bfloat16"
    context = Context(SymbolicGrid(device, GridSizes()), dtype, **layer_settings(config))
    model = SymbolicLayer(description.spec, SymbolicWeights(context, description.parameters))

    def new(shape, dtype):
        return SymbolicTensor(device, shape, dtype)

    def run():
        (part,) = description.spec.parts
        batch = description.spec.planned_batch(new, SAMPLES, train.seq_len)
        loss = description.spec.compute(model, part, {}, *batch)["loss"]
        backward([(loss, loss.like())])

    return run


SETTINGS = [
    "train.precision=bf16",
    "train.precision=fp8 parallel.chunks=2",
    "train.activation_checkpointing=full parallel.chunks=2",
    "train.activation_checkpointing=selective",
    "model.dropout=0.1 parallel.chunks=4",
    "train.loss_chunks=4 train.activation_checkpointing=full",
]
LACKS = {"llama": "model.dropout", "unet": ("train.loss_chunks", "train.precision=fp8")}
SAMPLE = {("unet", 0), ("llama", 1), ("gpt2", 2), ("unet", 3), ("llama", 3), ("gpt2", 4), ("llama", 5)}


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (pytest.param if (model, number) in SAMPLE else full)(model, settings)
        for model, (number, settings) in itertools.product(MODELS, enumerate(SETTINGS))
    ],
)
def test_a_model_calls_the_kernels_of_torch_in_their_order(model, settings):
    settings = [word for word in settings.split() if not word.startswith(LACKS.get(model, "none"))]
    config = configured([*MODELS[model], "train.compile=false", "train.precision=fp32", *settings])
    found, expected = (recorded_calls(make(config)) for make in (on_symbolic_tensors, in_torch))
    assert len(expected) > 40
    assert found == expected
