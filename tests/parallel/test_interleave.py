"""Chunks overlap with collectives and share transfers of weights. test_exact_plans.py compares their gradients."""

from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.engine.interleave import YieldPoint, run
from gpt4d.parallel.grid import Grid
from tests.support.grids import build_tiny_stage, tiny_batch
from tests.support.parallel_runs import runtime_of


def logits_of_odd_lengths(sizes):
    """On a rank: logits of three sequences of seven tokens, without gradients."""
    stage = build_tiny_stage(Grid(sizes), chunks=2, sequence_parallel=True)
    with torch.no_grad():
        return stage.module(torch.arange(21).view(3, 7), torch.arange(3))


def test_a_forward_without_gradients_takes_any_number_of_tokens(ranks):
    (expected,) = ranks.run(1, logits_of_odd_lengths, GridSizes())
    answers = ranks.run(4, logits_of_odd_lengths, GridSizes(2, 2))
    assert (torch.cat([answers[0], answers[1]], -1) - expected).norm() <= 1e-12 * expected.norm()


def collectives_of_a_step(recompute, parallel):
    """On a rank: layer, kind and axis of each collective of activations, and the computations that overlap with it."""
    stage = build_tiny_stage(Grid(GridSizes(2, 2)), recompute=recompute, chunks=4, **parallel)
    names = {p: name for name, p in stage.module.named_parameters()}
    computed, found = [0], []

    def counted(compute):
        def call(*args, **options):
            computed[0] += 1
            return compute(*args, **options)

        return call

    def recorded(kind):
        start = getattr(Axis, f"start_{kind}")

        def record(axis, *args, **options):
            pending, begun = start(axis, *args, **options), computed[0]
            name = names.get(options.get("parameter"), "")
            if pending.run and axis.name in ("x", "y") and name.startswith("blocks") and "norm" not in name:
                wait = pending.run.wait

                def waited():
                    found.append((name, kind, axis.name, computed[0] - begun))
                    pending.run.wait = wait
                    wait()

                pending.run.wait = waited
            return pending

        return patch.object(Axis, f"start_{kind}", record)

    with ExitStack() as patches:
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            patches.enter_context(recorded(kind))
        for module, name in ((torch, "mm"), (F, "scaled_dot_product_attention")):
            patches.enter_context(patch.object(module, name, counted(getattr(module, name))))
        runtime_of(stage).forward_backward([tiny_batch(stage.grid)], 1, 1.0)
    return found


@pytest.mark.parametrize(
    ("recompute", "parallel"),
    [(False, {}), (False, {"sequence_parallel": True}), (False, {"scatter_heads": False}), (True, {})],
    ids=str,
)
def test_computation_runs_beside_every_collective_but_that_of_the_last_chunk(ranks, recompute, parallel):
    """Along x and y, forward, backward and in recomputations: at most one of four chunks has no overlap."""
    for found in ranks.run(4, collectives_of_a_step, recompute, parallel):
        total = Counter(entry[:3] for entry in found)
        alone = Counter(entry[:3] for entry in found if not entry[3])
        assert len(total) >= 16 and all(count % 4 == 0 for count in total.values())
        assert all(4 * alone[collective] <= count for collective, count in total.items()), alone


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
