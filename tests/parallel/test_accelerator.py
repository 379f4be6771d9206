"""A training step on a fake accelerator: it uses one device, and the host neither waits for it nor copies to it."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import Config, GridSizes, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from gpt4d.model.llama.config import LlamaConfig
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import attention_kernels
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.stage import Stage
from gpt4d.step import TrainStep, build_stage
from tests import fake_device
from tests.grids import TINY_MODEL, full, token_loss

OPTIONS = {"documents", "dropout", "attention dropout", "recomputation", "bf16", "sharded states"}
OPTIONS |= {"chunks", "split tokens"}
# Each grid runs with both sets of options. Each pair of options occurs in all four combinations.
GRIDS = {
    GridSizes(1, 1, 1, 1): OPTIONS,
    GridSizes(2, 2, 2, 1): {"documents", "bf16", "sharded states", "chunks"},
    GridSizes(2, 2, 2, 2): {"dropout", "bf16", "chunks", "split tokens"},
    GridSizes(1, 2, 1, 4): {"attention dropout", "sharded states", "bf16", "split tokens"},
}
# make test runs one set on each grid; together, the sets have each option.
CASES = [(sizes, OPTIONS - chosen if sizes.devices == 16 else chosen) for sizes, chosen in GRIDS.items()]
CASES += [full(sizes, OPTIONS - chosen) for sizes, chosen in CASES]
SEQUENCES, LENGTH, MICROBATCHES = 2, 12, 2
RECOMPUTED = {"recomputation": "full", "selective": "selective"}
GPT2 = replace(TINY_MODEL, layers=1)
LLAMA = LlamaConfig(
    layers=1, hidden=24, heads=4, key_value_heads=2, head_size=8, inner=32, vocab_size=50, vocab_multiple=16,
    max_positions=16,
)  # fmt: skip
# With x = 2, a rank's three query heads share two key-value heads unevenly.
QWEN3 = replace(LLAMA, heads=6, key_value_heads=3, tied=False, qk_norm=True)
# Both axes split groups of channels.
UNET = UNetConfig(
    image_size=8, channels=16, multipliers=[1, 2], blocks_per_level=1, attention_at=[8, 4], head_size=8, groups=2,
    dropout=0.1,
)  # fmt: skip
FAMILIES = [
    (LLAMA, GridSizes(1, 1, 1, 1), {"documents", "bf16", "selective", "loss chunks"}),
    (LLAMA, GridSizes(2, 2, 2, 2), {"documents", "bf16", "sharded states", "chunks", "split tokens"}),
    full(LLAMA, GridSizes(1, 1, 1, 1), {"recomputation"}),
    (QWEN3, GridSizes(2, 1, 1, 1), {"documents", "bf16", "recomputation"}),
    full(QWEN3, GridSizes(2, 2, 2, 1), {"chunks", "split tokens", "loss chunks"}),
    (UNET, GridSizes(2, 2, 2, 1), {"bf16", "selective"}),
    full(UNET, GridSizes(1, 1, 1, 1), {"recomputation"}),
]


@pytest.fixture(scope="module")
def process(ranks):
    """Return a process that has a fake accelerator."""
    with ProcessPoolExecutor(1, mp_context=ranks.context, initializer=fake_device.set_up) as executor:
        yield executor


def name(value: GridSizes | set[str] | ModelConfig) -> str:
    if isinstance(value, ModelConfig):
        return {id(LLAMA): "llama", id(QWEN3): "qwen3"}.get(id(value), "unet")
    return str(value) if isinstance(value, GridSizes) else "+".join(sorted(value)) or "no options"


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=name)
def test_a_step_stays_on_its_device_and_never_waits_for_it(process, sizes, options):
    collectives = process.submit(train_and_evaluate, GPT2, sizes, options).result()
    scatters = sizes.z > 1 or (sizes.data > 1 and "sharded states" in options)
    expected = {
        "allreduce_": sizes.devices > 1,
        "_allgather_base_": sizes.devices > 1,
        "_reduce_scatter_base_": scatters or sizes.y > 1 or (sizes.x > 1 and "split tokens" in options),
    }
    assert {operation: collectives[operation] > 0 for operation in expected} == expected


@pytest.mark.parametrize(("model", "sizes", "options"), FAMILIES, ids=name)
def test_a_step_of_each_family_stays_on_its_device_and_never_waits_for_it(process, model, sizes, options):
    collectives = process.submit(train_and_evaluate, model, sizes, options).result()
    assert (collectives.total() > 0) == (sizes.devices > 1)


def train_and_evaluate(model: ModelConfig, sizes: GridSizes, options: set[str]) -> Counter[str]:
    """Run two steps and an evaluation as the last rank of the job. Return its number of collectives by name."""
    if model == GPT2:
        dropout = {word: 0.1 * (word.replace("_", " ") in options) for word in ("dropout", "attention_dropout")}
        model = replace(model, **dropout)
    train = TrainConfig(
        seq_len=LENGTH,
        precision="bf16" if "bf16" in options else "fp32",
        activation_checkpointing=next((kind for word, kind in RECOMPUTED.items() if word in options), "none"),
        loss_chunks=2 if "loss chunks" in options else 1,
    )
    optim = OptimConfig(shard_states="sharded states" in options)
    with fake_device.fake_job(sizes.devices, rank=sizes.devices - 1) as device:
        grid = Grid(sizes, device.type)
        parallel = ParallelConfig(chunks=2 if "chunks" in options else 1, sequence_parallel="split tokens" in options)
        stage = build_stage(Config(model=model, train=train, parallel=parallel), grid, device)
        step = TrainStep(stage, whole_model(token_loss), optim, before_update=lambda: check_gradients(step))
        batches = [batch(stage, device, "documents" in options) for _ in range(MICROBATCHES)]
        rules = fake_device.DeviceRules(device, stage.weights.context.compute_dtype)
        with patch.object(attention_kernels, "takes_documents", lambda q: q.dtype == torch.bfloat16):
            step.evaluate(batches, MICROBATCHES)  # copies constants to the device, once per process
            with rules:
                for _ in range(2):
                    result = step(batches, MICROBATCHES, units=sizes.batch_shards * SEQUENCES * LENGTH, lr=1e-3)
                loss = step.evaluate(batches, MICROBATCHES)
        for value in (result.loss, result.norm, result.stopping, loss):
            check(value, torch.float64, device)
        check(result.skipped, torch.bool, device)
        states = [value for state in step.optimizer.state.values() for value in state.values()]
        for tensor in (*stage.module.parameters(), *step.shards, *states):
            check(tensor, torch.float32, device)
    return rules.collectives


def batch(stage: Stage, device: torch.device, documents: bool) -> tuple:
    """Return one microbatch without values, with documents if asked for."""

    def new(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    inputs = stage.module.spec.planned_batch(new, SEQUENCES, LENGTH)
    return (*inputs, Documents(new((SEQUENCES, LENGTH), "int64"), [1] * SEQUENCES)) if documents else inputs


def check_gradients(step: TrainStep) -> None:
    for shard in step.shards:
        check(shard.grad, torch.float32, step.stage.weights.device)


def check(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    assert (tensor.dtype, tensor.device) == (dtype, device)
