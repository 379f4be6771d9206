"""A step over stages with different grids has the loss and the gradients of one device, under every schedule."""

import weakref
from unittest.mock import patch

import pytest
import torch

from gpt4d.model import registry
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.pipeline.runtime import StageRuntime
from gpt4d.parallel.resharding.transfer import ReshardingInFlight
from gpt4d.step import TrainStep, mask_replicas
from gpt4d.task import registry as tasks
from tests.seams.test_toy import configure, plain_toy, squared_error
from tests.support.grids import full
from tests.support.settings import configured
from tests.support.stages import RandomTokens, own_stage


def step_of_toy(config, world_size):
    """On a rank: the loss of an evaluation and of a step in float64, and this stage's parts of its gradients."""
    plan, stage = own_stage(config, world_size, ranks_per_host=world_size)
    grid = stage.grid
    task = tasks.get(registry.of(config.model).task).create(config)
    task.connect(stage, plan.micro_batch_size(plan.stages[stage.index]))
    reducer = GradientReducer(stage.weights, dict(stage.module.named_parameters()))
    runtime = StageRuntime(stage, reducer, task.compute)
    units = config.train.batch_size * config.train.seq_len
    evaluated = runtime.evaluate(task.batches(0), plan.microbatches) / units
    loss = runtime.forward_backward(task.batches(0), plan.microbatches, units)
    losses = [grid.world.all_reduce(mask_replicas(value, grid)).item() for value in (evaluated, loss)]
    gradients = {
        n: (grid.local_slices(p.spec.shape, p.spec.layout), p.grad) for n, p in stage.module.named_parameters()
    }
    stage.exchange.close()
    return losses, gradients


def check_step(ranks, config, world_size, loss, gradients):
    """Check a step of a toy over stages against its loss and its gradients on one device."""
    seen = {}
    for losses, parts in ranks.run(world_size, step_of_toy, config, world_size):
        assert losses == [pytest.approx(loss, rel=1e-12)] * 2
        for name, (place, part) in parts.items():
            seen.setdefault(name, torch.full_like(gradients[name], torch.nan))[place] = part
    assert seen.keys() == gradients.keys()
    for name, gradient in seen.items():
        assert (gradient - gradients[name]).norm() <= 1e-12 * gradients[name].norm(), name


PIPELINE = "parallel.pipeline."
TWO = (PIPELINE + "stages=2",)


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, (*TWO, PIPELINE + "schedule=gpipe")),
        (6, (*TWO, PIPELINE + "stage_grids=[2x1x1x2,1x1x2x1]", "train.activation_checkpointing=full")),
        (4, (PIPELINE + "stages=4", PIPELINE + "schedule=zb_h1")),
        (2, (*TWO, PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2")),
        full(8, (*TWO, "parallel.gx=2", "parallel.gz=2", PIPELINE + "schedule=1f1b")),
        full(6, (*TWO, PIPELINE + "stage_grids=[1x2x1x1,2x1x2x1]", PIPELINE + "schedule=eager_1f1b_w")),
        full(
            4,
            (*TWO, "parallel.gy=2", PIPELINE + "schedule=eager_1f1b", "parallel.chunks=2", PIPELINE + "microbatches=4"),
        ),
    ],
    ids=str,
)
def test_a_step_of_the_toy_over_stages_equals_one_device(ranks, tmp_path, world_size, settings):
    config = configure(tmp_path, "model.blocks=4", "train.batch_size=16", "train.micro_batch_size=null", *settings)
    model = plain_toy(config, torch.float64)
    error = squared_error(model, config, range(16), torch.float64)
    error.backward()
    check_step(ranks, config, world_size, error.item(), model.gradients())


def retained_by_a_step(config):
    """On a rank: the number of sends of a step, and the maximum numbers of retained objects when a forward starts.

    The objects are tensors of completed sends, and batches.
    """
    plan, stage = own_stage(config, world_size=2)
    task = tasks.get(registry.of(config.model).task).create(config)
    task.connect(stage, plan.micro_batch_size(plan.stages[stage.index]))
    sent, batches, retained, create = [], [], [], ReshardingInFlight.__init__

    def record_send(transfer, resharding, local, name):
        create(transfer, resharding, local, name)
        if not resharding.program.receives:
            sent.append((transfer.task, weakref.ref(local)))

    def yield_batches():
        for batch in task.batches(0):
            batches.append(weakref.ref(batch.sample_ids))
            yield batch
            del batch

    def compute(*arguments):
        completed = sum(task.done() and tensor() is not None for task, tensor in sent)
        retained.append((completed, sum(batch() is not None for batch in batches)))
        return task.compute(*arguments)

    runtime = StageRuntime(stage, GradientReducer(stage.weights, dict(stage.module.named_parameters())), compute)
    with patch.object(ReshardingInFlight, "__init__", record_send):
        runtime.forward_backward(yield_batches(), plan.microbatches, 1.0)
    stage.exchange.close()
    return len(sent), *map(max, zip(*retained, strict=True))


def test_a_step_retains_neither_what_it_has_sent_nor_used_batches(ranks, tmp_path):
    settings = (*TWO, PIPELINE + "schedule=1f1b", PIPELINE + "microbatches=8")
    config = configure(tmp_path, *settings)
    assert ranks.run(2, retained_by_a_step, config) == [(8, 0, 1)] * 2


def losses_of_gpt(config, world_size):
    """On a rank: losses and gradient norms of three steps of AdamW in float64, and the loss of an evaluation."""
    plan, stage = own_stage(config, world_size)
    data = RandomTokens(config, plan, stage)
    step = TrainStep(stage, data.compute, config.optim)
    units, numbers = config.train.batch_size * config.train.seq_len, []
    for number in range(3):
        result = step(data.batches(number), plan.microbatches, units, lr=1e-2)
        numbers += [result.loss.item(), result.norm.item()]
    step.reducer.wait_params()
    numbers.append(step.evaluate(data.batches(9), plan.microbatches).item() / units)
    if stage.exchange:
        stage.exchange.close()
    return numbers


GPT = (
    "model=gpt_tiny", "model.layers=4", "model.hidden=24", "model.heads=4", "model.vocab_size=258",
    "model.vocab_multiple=16", "model.max_positions=12", "train.seq_len=12", "train.batch_size=8", "model.dropout=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def serial_losses(ranks):
    return ranks.run(1, losses_of_gpt, configured([*GPT]), 1)[0]


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, TWO),
        (6, (*TWO, PIPELINE + "stage_grids=[2x1x1x2,1x1x2x1]", PIPELINE + "schedule=eager_1f1b_w")),
        (4, (PIPELINE + "stages=4", PIPELINE + "schedule=zb_h1", "parallel.chunks=2", PIPELINE + "microbatches=4")),
        (4, (*TWO, "parallel.gz=2", "parallel.cache_layers=all", "parallel.cache_scope=step")),
        full(8, (*TWO, "parallel.gx=2", "parallel.gy=2", "train.activation_checkpointing=full")),
        full(6, (*TWO, PIPELINE + "stage_grids=[1x1x2x1,1x2x1x2]", "optim.shard_states=true")),
        full(4, (*TWO, "parallel.gz=2", PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2")),
    ],
    ids=str,
)
def test_training_a_gpt_with_a_tied_head_over_stages_equals_one_device(ranks, serial_losses, world_size, settings):
    for numbers in ranks.run(world_size, losses_of_gpt, configured([*GPT, *settings]), world_size):
        assert numbers == pytest.approx(serial_losses, rel=1e-11)
