"""A training step on a fake accelerator: it uses one device, and the host neither waits for it nor copies to it."""

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import Config, GridSizes, OptimConfig, ParallelConfig, TrainConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import attention_kernels
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.pipeline.runtime import whole_model
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


@pytest.fixture(scope="module")
def process(ranks):
    """Return a process that has a fake accelerator."""
    with ProcessPoolExecutor(1, mp_context=ranks.context, initializer=fake_device.set_up) as executor:
        yield executor


def name(value: GridSizes | set[str]) -> str:
    return str(value) if isinstance(value, GridSizes) else "+".join(sorted(value)) or "no options"


@pytest.mark.parametrize(("sizes", "options"), CASES, ids=name)
def test_a_step_stays_on_its_device_and_never_waits_for_it(process, sizes, options):
    collectives = process.submit(train_and_evaluate, sizes, options).result()
    scatters = sizes.z > 1 or (sizes.data > 1 and "sharded states" in options)
    expected = {
        "allreduce_": sizes.devices > 1,
        "_allgather_base_": sizes.devices > 1,
        "_reduce_scatter_base_": scatters or sizes.y > 1 or (sizes.x > 1 and "split tokens" in options),
    }
    assert {operation: collectives[operation] > 0 for operation in expected} == expected


def train_and_evaluate(sizes: GridSizes, options: set[str]) -> Counter[str]:
    """Run two steps and an evaluation as the last rank of the job. Return its number of collectives by name."""
    model = replace(
        TINY_MODEL,
        layers=1,
        dropout=0.1 * ("dropout" in options),
        attention_dropout=0.1 * ("attention dropout" in options),
    )
    train = TrainConfig(
        seq_len=LENGTH,
        precision="bf16" if "bf16" in options else "fp32",
        activation_checkpointing="full" if "recomputation" in options else "none",
    )
    optim = OptimConfig(shard_states="sharded states" in options)
    with fake_device.fake_job(sizes.devices, rank=sizes.devices - 1) as device:
        grid = Grid(sizes, device.type)
        parallel = ParallelConfig(chunks=2 if "chunks" in options else 1, sequence_parallel="split tokens" in options)
        stage = build_stage(Config(model=model, train=train, parallel=parallel), grid, device)
        step = TrainStep(stage, whole_model(token_loss), optim, before_update=lambda: check_gradients(step))
        batches = [batch(device, "documents" in options) for _ in range(MICROBATCHES)]
        takes_documents = patch.object(attention_kernels, "takes_documents", lambda q: q.dtype == torch.bfloat16)
        with takes_documents, fake_device.DeviceRules(device, stage.weights.context.compute_dtype) as rules:
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


def batch(device: torch.device, documents: bool) -> tuple:
    """Ids, targets, sample ids and, if asked for, documents of one microbatch; they have no values."""
    ids, targets, starts = torch.zeros(3, SEQUENCES, LENGTH, dtype=torch.int64, device=device)
    inputs = ids, targets, torch.arange(SEQUENCES, device=device)
    return (*inputs, Documents(starts, [1] * SEQUENCES)) if documents else inputs


def check_gradients(step: TrainStep) -> None:
    for shard in step.shards:
        check(shard.grad, torch.float32, step.stage.weights.device)


def check(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    assert (tensor.dtype, tensor.device) == (dtype, device)
