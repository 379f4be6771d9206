"""Steps send the planned bytes: along axes, between stages, and in the exchanges of experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from gpt4d.config import Config
from gpt4d.parallel.layers import experts
from gpt4d.planner import recording
from gpt4d.step import TrainStep
from gpt4d.validation import validate
from tests.support.grids import full
from tests.support.settings import configured
from tests.support.stages import RandomTokens, own_stage

GPT = (
    "model=gpt_tiny model.layers=8 model.hidden=64 model.heads=4 model.vocab_size=258 model.vocab_multiple=16 "
    "model.max_positions=32 train.batch_size=24 train.seq_len=32"
)
SHORT = (
    "model=gpt_tiny model.layers=2 model.hidden=24 model.heads=4 model.vocab_size=300 model.vocab_multiple=16 "
    "model.max_positions=16 train.seq_len=16 train.batch_size=16"
)
GROUPED = f"{SHORT} model=llama_tiny model.key_value_heads=2 model.head_size=8 model.inner=40"
WINDOWS = f"{GROUPED} model=gemma3_tiny model.window=6 model.global_every=2"
EXPERTS = (
    "model=moe_tiny model.hidden=32 model.head_size=8 model.inner=24 model.vocab_size=320 model.vocab_multiple=16 "
    "model.max_positions=16 train.seq_len=16 train.batch_size=8 train.precision=fp32"
)
LAYERS_6, BF16 = "model.layers=6", "train.precision=bf16"
RECOMPUTE, RING = "train.activation_checkpointing=full", "parallel.context_exchange=ring"
STAGES = "pipeline.stages=2 pipeline.microbatches=1"


def settings(model: str, grid: str, *overrides: str) -> Config:
    """Return a configuration. ``grid``: settings of ``parallel`` without this word."""
    parallel = [f"parallel.{word}" for word in grid.split()]
    return configured([*model.split(), "optim.algorithm=adamw", *parallel, *overrides])


def bytes_of_a_step(config: Config, world_size: int) -> dict[str, float]:
    """On a rank: the bytes of its links and axes in the second of two steps."""
    plan, stage = own_stage(config, world_size, torch.float32, ranks_per_host=2)
    data = RandomTokens(config, plan, stage)
    step = TrainStep(stage, data.compute, config.optim)
    for number in range(2):
        for axis in stage.axes.values():
            axis.traffic.read()
        step(data.batches(number), plan.microbatches, 1, 1e-3)
    if stage.exchange:
        stage.exchange.wait_for_held()
        stage.exchange.close()
    found = {name: axis.traffic.read()["bytes"] for name, axis in stage.axes.items()}
    step.reducer.wait_params()  # other ranks may still gather rows from this one
    return found


@pytest.mark.parametrize(
    ("world_size", "model", "grid", "overrides"),
    [
        (6, GPT, "pipeline.stages=2 pipeline.stage_grids=[2x1x1x2,1x2x1x1]", ()),
        (3, GPT, "pipeline.stages=3 pipeline.schedule=interleaved_1f1b pipeline.chunks_per_stage=2", (LAYERS_6,)),
        (4, GPT, "gz=2 context=2 pipeline.stages=2 pipeline.schedule=1f1b", ()),
        (4, GROUPED, "gz=2 gdata=2 context=4", ()),
        full(4, SHORT, "gx=2 gz=2 context=2", (RECOMPUTE, "train.micro_batch_size=2")),
        (4, GROUPED, "gz=4 context=4", (RING,)),
        full(8, GPT, "gx=2 sequence_parallel=true chunks=2 pipeline.stages=2 pipeline.schedule=zb_h1", ()),
        full(4, GPT, "gy=2 pipeline.stages=2", ("model=llama_tiny", "model.tied=false", "model.layers=4", BF16)),
        full(8, GPT, "gx=2 gz=2 context=2 sequence_parallel=true pipeline.stages=2 pipeline.microbatches=4", ()),
        full(8, GPT, "gz=2 gdata=2 context=4 pipeline.stages=2 pipeline.microbatches=6", ()),
        full(4, GROUPED, "gz=2 gdata=2 context=2 chunks=2", (RING, RECOMPUTE)),
        full(6, WINDOWS, "gx=2 gdata=3 context=3", (RING, RECOMPUTE, "train.seq_len=12", "train.batch_size=12")),
        full(8, GROUPED, "gy=2 gz=2 gdata=2 context=2 chunks=2", (RECOMPUTE,)),
        full(8, GROUPED, "gx=2 gdata=4 context=4 sequence_parallel=true", ("train.micro_batch_size=1",)),
        full(4, SHORT, "gz=2 gdata=2 context=2", ("model.attention_dropout=0.1",)),
        full(8, SHORT, "gx=2 gz=2 gdata=2 context=4 rank_order=yx", ("train.activation_checkpointing=selective",)),
        full(4, WINDOWS, "gz=2 gdata=2 context=4", (RECOMPUTE,)),
        full(8, GROUPED, "gz=4 gdata=2 context=4", ("optim.shard_states=true", BF16)),
    ],
    ids=str,
)
def test_links_between_stages_and_axes_send_the_planned_bytes(ranks, world_size, model, grid, overrides):
    config = settings(model, grid, *overrides)
    plan = validate(config, world_size)
    links, answers = plan.link_bytes, ranks.run(world_size, bytes_of_a_step, config, world_size)
    counted_links = {name for counted in answers for name in counted if name.startswith("stage ")}
    assert counted_links == links.keys() and (bool(links) == (len(plan.stages) > 1))
    assert all("context" in counted for counted in answers) == ("context" in grid)
    for index, stage in enumerate(plan.stages):
        axes = plan.of_stage(index).comm
        for counted in (answers[member] for member in stage.ranks):
            if len(plan.stages) > 1:
                counted.pop("z", None)  # a stage may gather a weight once more than planned
            planned = {name: links[name] if name in links else axes[name]["bytes"] for name in counted}
            assert counted == pytest.approx(planned, rel=1e-9)


def recorded_step(config: Config, world_size: int) -> tuple[dict[str, float], list]:
    """On a rank: the bytes of its axes in the second step, and the rows for and from each rank of z at each call."""
    rows, rows_per_rank = [], experts.rows_per_rank

    def record(order, received, ranks):
        found = rows_per_rank(order, received, ranks)
        if isinstance(received, torch.Tensor):  # not in a plan that the run makes
            rows.append(found)
        return found

    with patch.object(experts, "rows_per_rank", record):
        counted = bytes_of_a_step(config, world_size)
    return counted, rows[len(rows) // 2 :]


@contextmanager
def replayed(rows: list, own: int) -> Iterator[None]:
    """Let experts on symbolic tensors exchange recorded ``rows`` of the rank at index ``own`` of the experts' axis."""
    calls = iter(rows)

    def replay(*_):
        return [counts[own:] + counts[:own] for counts in next(calls)]  # the planner's device is the first one

    caches = recording.recorded_segments, recording.represented
    for cache in caches:
        cache.cache_clear()
    with (
        patch.object(experts, "rows_per_rank", replay),
        patch.object(recording, "few_blocks", lambda reduced, model: [unit.name for unit in reduced.blocks]),
    ):
        yield
    for cache in caches:
        cache.cache_clear()
    assert next(calls, None) is None


@pytest.mark.parametrize(
    ("world_size", "grid", "overrides"),
    [
        (2, "gz=2", (RECOMPUTE,)),
        (4, "gz=4 chunks=2", ()),
        (8, "gx=2 gy=2 gz=2 sequence_parallel=true", ()),
        (4, f"gz=2 {STAGES}", ("model.shared_inner=48",)),
        (4, "gz=2 expert_data=true", ()),
        full(4, "gx=2 expert_data=true", (RECOMPUTE,)),
        full(4, "gz=2 gdata=2 context=2", ("optim.shard_states=true",)),
        full(6, f"{STAGES} pipeline.stage_grids=[1x1x4x1,2x1x1x1]", ()),
    ],
    ids=str,
)
def test_ranks_send_the_planned_bytes_of_their_routing(ranks, world_size, grid, overrides):
    config = settings(EXPERTS, grid, *overrides)
    plan = validate(config, world_size)
    answers = ranks.run(world_size, recorded_step, config, world_size)
    for index, stage in enumerate(plan.stages):
        x, y, z, data = stage.sizes
        split = z * data if config.parallel.expert_data else z
        for place, member in enumerate(stage.ranks):
            counted, rows = answers[member]
            with replayed(rows, place // (x * y) % split):
                axes = plan.with_config(plan.config).of_stage(index).comm
            planned = {name: plan.link_bytes[name] if "stage " in name else axes[name]["bytes"] for name in counted}
            assert counted == pytest.approx(planned, rel=1e-9)
    assert len({str(rows) for _, rows in answers}) > 1 or "z" not in counted, "equal routings of ranks show nothing"
