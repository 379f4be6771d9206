"""Ranks do not wait for each other in a cycle, whichever streams of a GPU share a hardware queue."""

import itertools
import math
from unittest.mock import patch

import pytest

from gpt4d.config.schema import SCHEDULES
from gpt4d.parallel.pipeline.simulation import StageTransfer
from gpt4d.plan import ParallelPlan
from gpt4d.validation import validate
from tests.support.grids import full
from tests.support.hardware_queues import HIGH, Deadlock, Exchange, Meeting, Operation, Record, Replay, Stream, Wait
from tests.support.queued_operations import queued_operations
from tests.support.settings import configured

PIPELINE = "parallel.pipeline."
GPT = (
    "model.hidden=24 model.heads=4 model.vocab_size=258 model.vocab_multiple=16 model.max_positions=12 train.seq_len=12"
)
UNET = (
    "model=unet_tiny model.image_size=8 model.channels=4 model.multipliers=[1,2] model.attention_at=[4] "
    "model.head_size=4 model.groups=2"
)
SPLIT, CHUNKS, SHARDED = "parallel.sequence_parallel=true", "parallel.chunks=2", "optim.shard_states=true"
SAMPLE = [
    ("1f1b", "2x1x1x1 1x1x2x1", SPLIT),
    ("zb_h1", "1x1x1x2 1x2x1x1", f"{CHUNKS} {SHARDED}"),
    ("interleaved_1f1b", "1x1x1x1 1x1x1x1", ""),
    ("eager_1f1b", "1x1x1x1 1x1x1x1 1x1x1x1", UNET),
]
GRIDS = (
    "2x1x2x1 2x1x2x1", "1x2x1x2 1x2x1x2", "1x1x2x2 2x2x1x1", "2x1x1x1 1x2x1x1 1x1x2x1",
    "1x1x1x2 1x1x1x1 1x1x1x1 2x1x1x1",
)  # fmt: skip
OPTIONS = f"{SPLIT} train.activation_checkpointing=full", f"{CHUNKS} {SHARDED}"
PRODUCT = [*itertools.product(SCHEDULES, GRIDS, OPTIONS)]
PRODUCT += [(schedule, "2x1x1x1 1x1x2x1 1x1x1x2", UNET) for schedule in SCHEDULES]
X, Y, COPY = Stream("NCCL x", HIGH, 0), Stream("NCCL y", HIGH, 1), Stream("copy", HIGH, 4)


def plan_of(schedule: str, grids: str, settings: str = "") -> ParallelPlan:
    """Return a plan of a U-Net, or of a GPT whose last stage has a copy of the first stage's token embedding."""
    sizes, chunks = grids.split(), 2 if schedule == "interleaved_1f1b" else 1
    stages = len(sizes)
    pipeline = {"stages": stages, "stage_grids": f"[{','.join(sizes)}]", "schedule": schedule}
    pipeline |= {"chunks_per_stage": chunks, "microbatches": 2 * stages}
    model = settings if settings == UNET else f"{GPT} model.layers={stages * chunks} {settings}"
    values = [f"{PIPELINE}{key}={value}" for key, value in pipeline.items()]
    config = configured([f"train.batch_size={16 * stages}", *values, *model.split()])
    return validate(config, sum(math.prod(map(int, grid.split("x"))) for grid in sizes))


def job(plan: ParallelPlan) -> list[list[Operation]]:
    """Return the operations of all ranks."""
    return [queued_operations(plan, rank) for rank in range(plan.stages[-1].last_rank + 1)]


@pytest.mark.parametrize("case", [*SAMPLE, *map(full, PRODUCT)], ids=" ".join)
def test_no_mapping_of_streams_to_hardware_queues_deadlocks(case):
    ranks = job(plan_of(*case))
    links = {operation.stream.name for operation in ranks[0] if isinstance(operation, Exchange)}
    assert {"NCCL world", "NCCL stage 0 to 1", "NCCL stage 1 to 0"} <= links
    Replay(ranks).run()  # with a single queue, which has all waits of other mappings


def test_a_transfer_in_another_order_than_on_its_peer_deadlocks_a_shared_queue():
    """Stage 0 starts to receive the first gradient before it has sent the activations that it depends on."""
    plan, program_of = plan_of("1f1b", "1x1x1x1 1x1x1x1"), ParallelPlan.training_program

    def receive_first(plan, stage, microbatches):
        program = program_of(plan, stage, microbatches)
        gradient = next(step for step in program if isinstance(step, StageTransfer) and step.action.kind == "B")
        return program if stage else [gradient, *(step for step in program if step != gradient)]

    with patch.object(ParallelPlan, "training_program", receive_first):
        ranks = job(plan)
    Replay(ranks, lambda stream: stream).run()
    with pytest.raises(Deadlock) as found:
        Replay(ranks).run()
    assert sorted(map(str, found.value.cycle)) == [
        "rank 0, queue 0, stream NCCL stage 1 to 0: "
        "gradient of stream of microbatch 0, backward from stage 1 to stage 0, from 1",
        "rank 1, queue 0, stream NCCL stage 0 to 1: stream of microbatch 0, forward from stage 0 to stage 1, from 0",
    ]


def collective(stream: Stream, number: int = 0) -> Exchange:
    """Return a collective of two ranks."""
    return Exchange(stream, f"all_reduce {stream.name}, number {number}", (Meeting((stream.name, number), 2),))


@pytest.mark.parametrize(
    ("ranks", "shared", "cycle"),
    [
        pytest.param(
            [[collective(X), collective(Y)], [collective(Y), collective(X)]],
            lambda stream: 0,
            {(0, collective(X)), (1, collective(Y))},
            id="collectives in different orders",
        ),
        pytest.param(
            [
                [collective(X), Record(X, 1, "x"), Wait(COPY, 1, "x"), collective(Y)],
                [collective(Y), Record(Y, 1, "y"), Wait(X, 1, "y"), collective(X)],
            ],
            lambda stream: stream == X,
            {(0, Wait(COPY, 1, "x")), (0, collective(X)), (1, Wait(X, 1, "y")), (1, collective(Y))},
            id="a wait for an event",
        ),
    ],
)
def test_operations_of_streams_that_share_a_queue_block_each_other(ranks, shared, cycle):
    Replay(ranks, lambda stream: stream).run()
    with pytest.raises(Deadlock) as found:
        Replay(ranks, shared).run()
    assert {(blocked.rank, blocked.operation) for blocked in found.value.cycle} == cycle


def test_a_collective_that_a_rank_does_not_start_is_reported():
    with pytest.raises(Deadlock, match="no rank queues") as found:
        Replay([[collective(X)], []]).run()
    assert [blocked.operation for blocked in found.value.cycle] == [collective(X)]
