"""Chunks, split heads and split tokens change when and where a step computes, never what; and chunks hide its sums."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import Config, GridSizes, ParallelConfig, TrainConfig
from gpt4d.parallel.comm import collectives
from gpt4d.parallel.engine.interleave import YieldPoint, run
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.documents import Documents
from gpt4d.parallel.pipeline.runtime import StageRuntime, whole_model
from gpt4d.step import build_stage, mask_replicas
from tests.support.grids import TINY_MODEL, batch_part, full, global_tensor, token_loss

BATCH, LENGTH = 16, 12
DROPOUT = replace(TINY_MODEL, dropout=0.1, attention_dropout=0.1)
PLAIN = GridSizes()


def microbatch(grid, index, with_documents=True):
    """Ids, targets, sample ids and documents of this rank's part of a microbatch."""
    ids = torch.randint(0, TINY_MODEL.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(index))
    batch = [batch_part(tensor, grid) for tensor in (ids, ids.roll(-1, 1), torch.arange(BATCH))]
    return [*batch, Documents.ending_with(0, batch[0] // 5)] if with_documents else batch


def runtime_of(sizes, recompute, model=TINY_MODEL, **parallel):
    train = TrainConfig(seq_len=LENGTH, seed=1, activation_checkpointing="full" if recompute else "none")
    config = Config(model=model, parallel=ParallelConfig(**parallel), train=train)
    stage = build_stage(config, Grid(sizes), torch.device("cpu"), torch.float64)
    reducer = GradientReducer(stage.weights, dict(stage.module.named_parameters()))
    return StageRuntime(stage, reducer, whole_model(token_loss))


def gradients(sizes, recompute, microbatches, model, parallel):
    """On a rank: the loss of an evaluation between steps, and the global gradients of a step."""
    runtime = runtime_of(sizes, recompute, model, **parallel)
    stage = runtime.stage
    batches = [microbatch(stage.grid, index) for index in range(2 * microbatches)]
    halves = [[half.chunk(2)[index % 2] for half in batches[index // 2]] for index in range(2 * microbatches)]
    evaluated = stage.grid.world.all_reduce(mask_replicas(runtime.evaluate(batches[:1], 1), stage.grid))
    runtime.forward_backward(halves, 2 * microbatches, 1.0)
    grads = {name: global_tensor(p.grad, p.spec, stage.grid) for name, p in stage.module.named_parameters()}
    return evaluated, grads


@pytest.fixture(scope="module")
def serial(ranks):
    made = {}

    def of(microbatches, model):
        key = microbatches, str(model)
        if key not in made:
            made[key] = ranks.run(1, gradients, PLAIN, False, microbatches, model, {})[0]
        return made[key]

    return of


STEP = {"cache_layers": "all", "cache_scope": "step"}


@pytest.mark.parametrize(
    ("sizes", "recompute", "microbatches", "dropout", "parallel"),
    [
        ((2, 2, 1, 1), True, 2, False, {"chunks": 4, "sequence_parallel": True}),
        ((2, 1, 2, 1), True, 1, True, {"sequence_parallel": True, **STEP}),
        ((1, 2, 2, 1), False, 2, True, {"chunks": 2, "scatter_heads": False, "replicated_layers": 1}),
        ((2, 2, 2, 1), True, 1, True, {"chunks": 2, **STEP}),
        full((2, 2, 1, 1), False, 1, True, {"chunks": 2}),
        full((4, 2, 1, 1), False, 1, False, {"sequence_parallel": True, "chunks": 2}),
        full((2, 1, 1, 2), False, 1, True, {"chunks": 4, "sequence_parallel": True, "scatter_heads": False}),
        full((1, 4, 1, 2), True, 1, False, {"chunks": 2}),
        full((2, 4, 1, 1), False, 2, True, {"chunks": 2, "sequence_parallel": True}),
        full((2, 2, 2, 2), True, 1, True, {"chunks": 2, "sequence_parallel": True, **STEP}),
        full((2, 2, 2, 2), False, 1, False, {"chunks": 2, "replicated_layers": 1}),
        full((4, 1, 2, 1), True, 2, False, {"chunks": 2, "sequence_parallel": True}),
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(ranks, serial, sizes, recompute, microbatches, dropout, parallel):
    model = DROPOUT if dropout else TINY_MODEL
    sizes, (evaluated, expected) = GridSizes(*sizes), serial(microbatches, model)
    ours, computed = ranks.run(sizes.devices, gradients, sizes, recompute, microbatches, model, parallel)[0]
    assert ours.item() == pytest.approx(evaluated.item(), rel=1e-12)
    for name, gradient in expected.items():
        assert (computed[name] - gradient).norm() <= 1e-12 * gradient.norm(), name


MESHES = [(2, 4), (8, 1), full((1, 8)), full((4, 2))]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_of_eight_devices_is_exact_with_chunks(ranks, serial, sizes):
    model = replace(TINY_MODEL, heads=8, hidden=32, vocab_multiple=8)
    _, expected = serial(1, model)
    options = {"chunks": 2, "sequence_parallel": True}
    _, computed = ranks.run(8, gradients, GridSizes(*sizes), False, 1, model, options)[0]
    for name, gradient in expected.items():
        assert (computed[name] - gradient).norm() <= 1e-12 * gradient.norm(), name


def logits_of_odd_lengths(sizes):
    """On a rank: logits of three sequences of seven tokens, without gradients."""
    runtime = runtime_of(sizes, False, chunks=2, sequence_parallel=True)
    with torch.no_grad():
        return runtime.stage.module(torch.arange(21).view(3, 7), torch.arange(3))


def test_a_forward_without_gradients_takes_any_number_of_tokens(ranks):
    (expected,) = ranks.run(1, logits_of_odd_lengths, PLAIN)
    answers = ranks.run(4, logits_of_odd_lengths, GridSizes(2, 2))
    assert (torch.cat([answers[0], answers[1]], -1) - expected).norm() <= 1e-12 * expected.norm()


def collectives_of_a_step(sizes, recompute, parallel):
    """On a rank: layer, kind and axis of each collective of activations, and the computations that overlap with it."""
    runtime = runtime_of(sizes, recompute, **parallel)
    names = {p: name for name, p in runtime.stage.module.named_parameters()}
    computed, found = [0], []

    def counted(compute):
        def call(*args, **options):
            computed[0] += 1
            return compute(*args, **options)

        return call

    def recorded(kind):
        start = getattr(collectives, f"start_{kind}")

        def record(tensor, axis, *rest, parameter=None, **options):
            pending, begun = start(tensor, axis, *rest, parameter=parameter, **options), computed[0]
            name = names.get(parameter, "")
            if pending.run and axis.name in ("x", "y") and name.startswith("blocks") and "norm" not in name:
                wait = pending.run.wait

                def waited():
                    found.append((name, kind, axis.name, computed[0] - begun))
                    pending.run.wait = wait
                    wait()

                pending.run.wait = waited
            return pending

        return patch.object(collectives, f"start_{kind}", record)

    with (
        recorded("all_reduce"),
        recorded("all_gather"),
        recorded("reduce_scatter"),
        patch.object(torch, "mm", counted(torch.mm)),
        patch.object(F, "scaled_dot_product_attention", counted(F.scaled_dot_product_attention)),
    ):
        runtime.forward_backward([microbatch(runtime.stage.grid, 0)], 1, 1.0)
    return found


@pytest.mark.parametrize(
    ("recompute", "parallel"),
    [(False, {}), (False, {"sequence_parallel": True}), (False, {"scatter_heads": False}), (True, {})],
    ids=str,
)
def test_computation_runs_beside_every_collective_but_that_of_the_last_chunk(ranks, recompute, parallel):
    """Along x and y, forward, backward and in recomputations: at most one of four chunks has no overlap."""
    for found in ranks.run(4, collectives_of_a_step, GridSizes(2, 2, 1, 1), recompute, {"chunks": 4, **parallel}):
        total = Counter(entry[:3] for entry in found)
        alone = Counter(entry[:3] for entry in found if not entry[3])
        assert len(total) >= 16 and all(count % 4 == 0 for count in total.values())
        assert all(4 * alone[collective] <= count for collective, count in total.items()), alone


def gathers_of_a_step(chunks):
    runtime = runtime_of(GridSizes(1, 1, 2, 1), False, chunks=chunks)
    gathers, scatters = Counter(), Counter()
    names = {p: name for name, p in runtime.stage.module.named_parameters()}
    gather, scatter = collectives.start_all_gather, collectives.start_reduce_scatter

    def count_gather(shard, axis, parameter=None, **options):
        gathers[names[parameter]] += 1
        return gather(shard, axis, parameter=parameter, **options)

    def count_scatter(full, axis, parameter=None, **options):
        scatters[names[parameter]] += 1
        return scatter(full, axis, parameter=parameter, **options)

    with (
        patch.object(collectives, "start_all_gather", count_gather),
        patch.object(collectives, "start_reduce_scatter", count_scatter),
    ):
        runtime.forward_backward([microbatch(runtime.stage.grid, 0)], 1, 1.0)
    return gathers, scatters


def test_chunks_share_one_gather_and_one_scatter_of_each_weight(ranks):
    whole, cut = ranks.run(2, gathers_of_a_step, 1), ranks.run(2, gathers_of_a_step, 4)
    assert cut == whole and all(whole[0])


def test_coroutines_take_turns_in_one_order_and_return_their_results():
    order = []

    async def chunk(name, turns):
        for turn in range(turns):
            order.append((name, turn))
            await YieldPoint()
        return name

    assert run([chunk("a", 2), chunk("b", 3)]) == ["a", "b"]
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2)]


def test_an_error_in_one_coroutine_closes_the_others():
    closed = []

    async def waiting():
        try:
            await YieldPoint()
            await YieldPoint()
        finally:
            closed.append(True)

    async def failing():
        await YieldPoint()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run([waiting(), failing()])
    assert closed == [True]
