"""Ranks do not wait for each other in a cycle, whichever streams of a GPU share a hardware queue."""

import itertools
import math
from unittest.mock import patch

import pytest

from gpt4d.config.schema import STRATEGIES
from gpt4d.parallel.pipeline.stage_program import SCHEDULES, StageTransfer
from gpt4d.plan import ParallelPlan
from gpt4d.validation import validate
from tests.support.grids import full
from tests.support.hardware_queues import (
    HIGH,
    Deadlock,
    Exchange,
    Meeting,
    Operation,
    Record,
    Replay,
    Stream,
    Wait,
    by_priority,
    round_robin,
    single_queue,
)
from tests.support.queued_operations import queued_operations
from tests.support.settings import configured

CUDA, ROCM = 32, 4  # numbers of hardware queues
SHARED = [single_queue, by_priority(ROCM), *(round_robin(k, offset) for k in (CUDA, ROCM) for offset in range(ROCM))]
SEPARATE = round_robin(1000, offset=500)  # a queue for each stream

PIPELINE = "parallel.pipeline."
GPT = (
    "model.hidden=24", "model.heads=4", "model.vocab_size=258", "model.vocab_multiple=16", "model.max_positions=12",
    "train.seq_len=12",
)  # fmt: skip
UNET = (
    "model=unet_tiny", "model.image_size=8", "model.channels=8", "model.multipliers=[1,2]", "model.attention_at=[4]",
    "model.head_size=4", "model.groups=4",
)  # fmt: skip
SPLIT = "parallel.sequence_parallel=true"
SHARDED = "optim.shard_states=true"

SAMPLE = [
    ("1f1b", "2x1x1x1 1x1x2x1", SPLIT),
    ("zb_h1", "1x1x1x2 1x2x1x1", "parallel.chunks=2", SHARDED),
    ("interleaved_1f1b", "1x1x1x1 1x1x1x1"),
    ("eager_1f1b", "1x1x1x1 1x1x1x1 1x1x1x1", *UNET),
]
GRIDS = (
    "2x1x2x1 2x1x2x1", "1x2x1x2 1x2x1x2", "1x1x2x2 2x2x1x1", "2x1x1x1 1x2x1x1 1x1x2x1",
    "1x1x1x2 1x1x1x1 1x1x1x1 2x1x1x1",
)  # fmt: skip
OPTIONS = ((SPLIT, "train.activation_checkpointing=full"), ("parallel.chunks=2", SHARDED))
PRODUCT = [(schedule, grids, *options) for schedule, grids, options in itertools.product(SCHEDULES, GRIDS, OPTIONS)]
PRODUCT += [("1f1b", "2x1x2x1 1x2x1x2", f"{PIPELINE}strategy={strategy}") for strategy in STRATEGIES[1:-1]]
PRODUCT += [(schedule, "2x1x1x1 1x1x2x1 1x1x1x2", *UNET) for schedule in SCHEDULES]


def plan_of(schedule: str, grids: str, *settings: str) -> ParallelPlan:
    """Return a plan of a U-Net, or of a GPT whose last stage has a copy of the first stage's token embedding."""
    sizes, chunks = grids.split(), 2 if schedule == "interleaved_1f1b" else 1
    stages = len(sizes)
    pipeline = (
        f"stages={stages}", f"stage_grids=[{','.join(sizes)}]", f"schedule={schedule}", f"chunks_per_stage={chunks}",
        f"microbatches={2 * stages}",
    )  # fmt: skip
    model = () if "model=unet_tiny" in settings else (*GPT, f"model.layers={stages * chunks}")
    batch = f"train.batch_size={16 * stages}"
    config = configured([*model, batch, *(PIPELINE + setting for setting in pipeline), *settings])
    return validate(config, sum(math.prod(map(int, grid.split("x"))) for grid in sizes))


def job(plan: ParallelPlan) -> list[list[Operation]]:
    """Return the operations of all ranks."""
    return [queued_operations(plan, rank) for rank in range(plan.stages[-1].last_rank + 1)]


@pytest.mark.parametrize("case", [*SAMPLE, *map(full, PRODUCT)], ids=" ".join)
def test_no_mapping_of_streams_to_hardware_queues_deadlocks(case):
    ranks = job(plan_of(*case))
    links = {operation.stream.name for operation in ranks[0] if isinstance(operation, Exchange)}
    assert {"NCCL world", "NCCL stage 0 to 1", "NCCL stage 1 to 0"} <= links
    for queue_of in SHARED:
        Replay(ranks, queue_of).run()


def test_a_transfer_in_another_order_than_on_its_peer_deadlocks_a_shared_queue():
    """Stage 0 starts to receive the first gradient before it has sent the activations that it depends on."""
    plan, program_of = plan_of("1f1b", "1x1x1x1 1x1x1x1"), ParallelPlan.training_program

    def receive_first(plan, stage, microbatches):
        program = program_of(plan, stage, microbatches)
        gradient = next(step for step in program if isinstance(step, StageTransfer) and step.action.kind == "B")
        return program if stage else [gradient, *(step for step in program if step != gradient)]

    with patch.object(ParallelPlan, "training_program", receive_first):
        ranks = job(plan)
    Replay(ranks, SEPARATE).run()
    with pytest.raises(Deadlock) as found:
        Replay(ranks, single_queue).run()
    assert sorted(map(str, found.value.cycle)) == [
        "rank 0, queue 0, stream NCCL stage 1 to 0: "
        "gradient of stream of microbatch 0, backward from stage 1 to stage 0, from 1",
        "rank 1, queue 0, stream NCCL stage 0 to 1: stream of microbatch 0, forward from stage 0 to stage 1, from 0",
    ]


X, Y, COPY = Stream("NCCL x", HIGH, 0), Stream("NCCL y", HIGH, 1), Stream("copy", HIGH, 4)


def collective(stream: Stream, number: int = 0) -> Exchange:
    """Return a collective of two ranks."""
    return Exchange(stream, f"all_reduce {stream.name}, number {number}", (Meeting((stream.name, number), 2),))


def test_collectives_in_different_orders_deadlock_only_in_one_queue():
    ranks = [[collective(X), collective(Y)], [collective(Y), collective(X)]]
    Replay(ranks, by_priority(2)).run()
    with pytest.raises(Deadlock) as found:
        Replay(ranks, by_priority(1)).run()
    assert [(blocked.rank, blocked.operation) for blocked in found.value.cycle] in (
        [(0, collective(X)), (1, collective(Y))],
        [(1, collective(Y)), (0, collective(X))],
    )


def test_a_wait_for_an_event_blocks_the_streams_that_share_its_queue():
    """Rank 0's collective on y follows a wait for x, and rank 1 starts x after y."""
    first = [collective(X), Record(X, 1, "x"), Wait(COPY, 1, "x"), collective(Y)]
    second = [collective(Y), Record(Y, 1, "y"), Wait(X, 1, "y"), collective(X)]
    Replay([first, second], SEPARATE).run()
    with pytest.raises(Deadlock) as found:
        Replay([first, second], lambda stream: stream == X).run()
    assert {(blocked.rank, blocked.operation) for blocked in found.value.cycle} == {
        (0, Wait(COPY, 1, "x")),
        (0, collective(X)),
        (1, Wait(X, 1, "y")),
        (1, collective(Y)),
    }


def test_a_collective_that_a_rank_does_not_start_is_reported():
    with pytest.raises(Deadlock, match="no rank queues") as found:
        Replay([[collective(X)], []], single_queue).run()
    assert [blocked.operation for blocked in found.value.cycle] == [collective(X)]
