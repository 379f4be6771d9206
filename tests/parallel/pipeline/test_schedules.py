"""Plans of stages, their cuts and their mistakes; orders, memory and bubbles of schedules; one order of transfers."""

import copy
import functools
import random
from collections import Counter
from graphlib import TopologicalSorter
from itertools import combinations, pairwise

import pytest
import yaml

from gpt4d.config import GridSizes
from gpt4d.config.schema import SCHEDULES
from gpt4d.model import registry
from gpt4d.parallel.pipeline import __main__, schedule
from gpt4d.parallel.pipeline.schedule import Action, balanced, peak_in_flight, problem
from gpt4d.parallel.pipeline.simulation import Costs, Deadlock, StageTransfer, orders_of, programs, simulate
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.settings import configured

PIPELINE = "parallel.pipeline."
TWO = PIPELINE + "stages=2 "
INTERLEAVED, CHUNKS = PIPELINE + "schedule=interleaved_1f1b ", PIPELINE + "chunks_per_stage=2"
GRIDS = PIPELINE + "stage_grids="


@functools.cache
def base():
    return configured(["model=gpt_tiny", "model.hidden=32", "data.path=null", "train.batch_size=16"])


def plan(world_size: int, settings: str):
    """Return the plan of settings, which are set without Hydra, because it takes long."""
    config = copy.deepcopy(base())
    for setting in settings.split():
        *path, name, value = [*setting.partition("=")[0].split("."), setting.partition("=")[2]]
        setattr(functools.reduce(getattr, path, config), name, yaml.safe_load(value))
    return validate(config, world_size)


@pytest.mark.parametrize(
    ("settings", "grids", "parts", "samples"),
    [
        # The head is as much work as two of these narrow blocks.
        ("parallel.gx=2 parallel.gy=2", "2x2x1x1,2x2x1x1", [((0, 4),), ((4, 6),)], [2, 2]),
        (GRIDS + "[2x1x1x2,1x2x1x1] parallel.pipeline.cuts='1'", "2x1x1x2,1x2x1x1", [((0, 2),), ((2, 6),)], [1, 2]),
        (INTERLEAVED + CHUNKS, "1x1x1x1,1x1x1x1", [((0, 2), (3, 4)), ((2, 3), (4, 6))], [2, 2]),
    ],
    ids=["equal work", "grids and cuts", "interleaved"],
)
def test_two_stages_share_the_devices_and_the_work(settings, grids, parts, samples):
    sizes = [GridSizes(*map(int, grid.split("x"))) for grid in grids.split(",")]
    first, second = (grid.devices for grid in sizes)
    found = plan(first + second, TWO + settings)
    assert [stage.sizes for stage in found.stages] == sizes
    assert [stage.ranks for stage in found.stages] == [(*range(first),), (*range(first, first + second),)]
    assert [stage.parts for stage in found.stages] == parts
    assert [found.micro_batch_size(stage) for stage in found.stages] == samples and found.microbatches == 8


MISTAKES = [
    (PIPELINE + "stages=8", "stages=8: the model has 4 block"),
    (PIPELINE + "stages=3", "stages=3: does not divide the 8 process"),
    (TWO + "train.micro_batch_size=1", "train.micro_batch_size=1: … use parallel.pipeline.microbatches"),
    (TWO + PIPELINE + "microbatches=3", "microbatches=3: … use one of 1, 2, 4"),
    (TWO + "train.batch_size=6", "train.batch_size=6: cannot be split over parallel.gdata·gz=4"),
    (TWO + PIPELINE + "cuts=[2,3]", "2 parts of the model have 1 cut"),
    (TWO + PIPELINE + "cuts=[4]", "use numbers from 1 to 3"),
    (TWO + GRIDS + "[2x2x1x1]", "1 grid(s) for parallel.pipeline.stages=2"),
    (TWO + GRIDS + "[2x2x1x1,2x1x1x1]", "have 6 devices, but this job has 8"),
    (TWO + GRIDS + "[2x2,4x1]", "not a list of grids"),
    (TWO + CHUNKS, "use parallel.pipeline.schedule=interleaved_1f1b"),
    (TWO + PIPELINE + "schedule=2f2b", "use one of gpipe, 1f1b"),
    (TWO + "parallel.mode=atp parallel.d1=2", "parallel.mode=atp has one stage"),
    (PIPELINE + "microbatches=4", "there is one stage; set parallel.pipeline.stages"),
    (TWO + "parallel.chunks=3",
     "microbatches: … gdata·gz (4, 4), cuts each share into parallel.chunks=3; use a multiple of 12"),
    (TWO + "parallel.gx=4 parallel.sequence_parallel=true train.seq_len=6 train.batch_size=3",
     "over its gx (4, 4) for parallel.sequence_parallel; use a multiple of 2"),
    (TWO + INTERLEAVED + "train.batch_size=4", "takes a multiple of 2 microbatches; use a multiple of 8"),
    (TWO + GRIDS + "[1x1x1x4,1x1x1x4] parallel.gx=2", "gx=2: parallel.pipeline.stage_grids has the grid of each"),
    ("train.loss_chunks=2 train.seq_len=21", "loss_chunks=2: does not divide train.seq_len=21; use one of 1, 3, 7"),
]  # fmt: skip


def test_mistakes_are_one_line_with_key_value_and_remedy():
    assert not wrong_messages(MISTAKES, functools.partial(plan, 8))


def test_the_published_order_of_eager_1f1b():
    """The example has four stages and eight microbatches (arXiv 2211.05322, §4)."""
    assert [" ".join(str(action)[1:] for action in order) for order in schedule.eager_1f1b(4, 8)] == [
        "F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7",
        "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_activations_in_flight():
    orders = schedule.gpipe, schedule.one_forward_one_backward, schedule.eager_1f1b, schedule.zb_h1
    peaks = [list(map(peak_in_flight, of(4, 8))) for of in orders]
    assert peaks == [[8, 8, 8, 8], [4, 3, 2, 1], [7, 5, 3, 1], [4, 4, 4, 4]]


@pytest.mark.parametrize(
    ("transfer", "plain", "eager", "split"), [(0, 33, 33, 30), (0.5, 41, 36, 33), (1, 49, 39, 36), (2, 65, 48, 42)]
)
def test_step_times_of_four_stages_and_eight_microbatches(transfer, plain, eager, split):
    costs = Costs.equal(4, 1, 1, 1, transfer)
    assert simulate(schedule.one_forward_one_backward(4, 8), costs).seconds == plain
    assert simulate(schedule.eager_1f1b(4, 8), costs).seconds == eager
    assert simulate(orders_of("eager_1f1b_w", 4, 8, costs), costs).seconds == split


@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 3, 1.5)], ids=str)
@pytest.mark.parametrize("stages", [2, 4])
def test_published_bubbles(seconds, stages):
    forward, inputs, weights = seconds
    work = 8 * sum(seconds)

    def idle(orders, chunks=1):
        costs = Costs.equal(stages * chunks, *(s / chunks for s in seconds))
        return simulate(orders, costs).seconds - work

    whole = (stages - 1) * sum(seconds)
    assert idle(schedule.one_forward_one_backward(stages, 8)) == pytest.approx(whole)
    for chunks in (2, 4):
        assert idle(schedule.interleaved_1f1b(stages, 8, chunks), chunks) == pytest.approx(whole / chunks)
    assert idle(schedule.zb_h1(stages, 8)) == pytest.approx((stages - 1) * (forward + inputs - weights))


def test_tensors_that_skip_stages_wait_for_the_last_one():
    """A skip connection over four stages: arXiv 2211.05322 holds 6 to 8 tensors under eager 1F1B, 4 under 1F1B."""
    for transfer, held, two_skips in ((0.0, 6, 11), (0.5, 7, 12), (1.0, 8, 14)):
        costs = Costs(*[[1] * 4] * 3, dict.fromkeys([(0, 1), (1, 2), (2, 3), (0, 3)], transfer))
        timeline = simulate(schedule.eager_1f1b(4, 8), costs)
        assert timeline.peak_waiting(3) == held
        assert timeline.peak_waiting(3, {(2, 3): 1, (0, 3): 2}) == two_skips  # several tensors may cross on one edge
        assert timeline.peak_waiting(3, {(2, 3): 1, (0, 3): 0}) == 2
        assert simulate(schedule.one_forward_one_backward(4, 8), costs).peak_waiting(3) == 4


def random_pipeline(draw):
    """Orders and costs of a random schedule with skips over stages, and its numbers of parts and microbatches."""
    name, stages = draw.choice(SCHEDULES), draw.randint(1, 4)
    chunks = draw.randint(1, 3) if name == "interleaved_1f1b" else 1
    microbatches = stages * draw.randint(1, 2) if name == "interleaved_1f1b" else draw.randint(1, 9)
    parts = stages * chunks
    edges = [(stage, stage + 1) for stage in range(parts - 1)]
    edges += [(a, b) for a in range(parts) for b in range(a + 2, parts) if draw.random() < 0.3]
    forward, inputs, weights = ([draw.choice((0.5, 1.0, draw.random())) for _ in range(parts)] for _ in range(3))
    costs = Costs(forward, inputs, weights, {edge: draw.choice((0.0, 0.5, draw.random())) for edge in edges})
    return orders_of(name, stages, microbatches, costs, chunks), costs, parts, microbatches


def users_of(action, target):
    """Return the actions that may use a tensor of an action on the virtual stage ``target``."""
    return [Action(kind, action.microbatch, target) for kind in ("F" if action.kind == "F" else "BI")]


@pytest.mark.parametrize("seed", range(100))
def test_random_schedules_are_complete_and_end(seed):
    orders, costs, parts, microbatches = random_pipeline(random.Random(seed))
    assert problem(orders, parts, microbatches) is None
    timeline = simulate(orders, costs)
    busiest = max(sum(costs.seconds(action) for action in order) for order in orders)
    assert timeline.seconds >= busiest * (1 - 1e-12)  # sum() of Python 3.12 rounds less
    starts = {span.action: span.start for spans in timeline.stages for span in spans}
    for transfer in timeline.transfers:
        users = users_of(transfer.action, transfer.target)
        assert all(starts[user] >= transfer.stop for user in users if user in starts)


@pytest.mark.parametrize("seed", range(60))
def test_transfers_of_random_programs_start_on_both_ends_between_producer_and_user_in_one_order(seed):
    orders, costs, _, microbatches = random_pipeline(random.Random(seed))
    count, ends, following = len(orders), Counter(), TopologicalSorter()
    for stage, program in enumerate(programs(orders, costs)):
        assert [step for step in program if isinstance(step, Action)] == orders[stage]
        place = {step: index for index, step in enumerate(program)}
        transfers = [step for step in program if isinstance(step, StageTransfer)]
        ends.update(transfers)
        for before, after in pairwise(transfers):
            following.add(after, before)
        for transfer in transfers:
            action, target = transfer
            if action.virtual_stage % count == stage:
                assert place[action] < place[transfer]
            else:
                assert all(place[transfer] < place[user] for user in users_of(action, target) if user in place)
    crossing = [(a, b) for a, b in costs.transfers if a % count != b % count]
    assert len(ends) == 2 * microbatches * len(crossing) and set(ends.values()) <= {2}
    list(following.static_order())  # raises CycleError if stages disagree about the order


def test_a_receiver_starts_before_the_action_during_which_the_tensor_comes_to_exist():
    """Stage 1 waits for its first microbatch, and starts to receive the second one concurrently."""
    first, second = programs(schedule.one_forward_one_backward(2, 2), Costs.equal(2, 1, 1, 1, 0.5))
    assert " ".join(map(str, first)) == "0F0 0F0>1 0F1 0F1>1 1B0>0 0B0 1B1>0 0B1"
    assert " ".join(map(str, second)) == "0F0>1 0F1>1 1F0 1B0 1B0>0 1F1 1B1 1B1>0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 B0 F1", "has no 0B1"),
        ("F0 B0 B1 F1", "0B1 is not after its F"),
        ("F0 F0 B0 F1 B1", "0F0 occurs twice"),
        ("F0 F1 B0 W1 I1", "0W1 is not after its I"),
        ("F0 F1 B0 I0 B1", "0I0 computes a gradient again"),
    ],
)
def test_what_is_no_schedule(text, message):
    order = [Action(word[0], int(word[1:])) for word in text.split()]
    assert message in problem([order], 1, 2)


def test_stages_that_wait_for_each_other_are_named():
    orders = [schedule.single_stage(2), [Action(kind, m, 1) for m in (1, 0) for kind in "FB"]]
    with pytest.raises(Deadlock, match="0B0, 1F1"):
        simulate(orders, Costs.equal(2, 1, 1, 1))


NUMBERS = [
    ("schedule=interleaved_1f1b microbatches=6", "parallel.pipeline.microbatches=6: … use 4 or 8"),
    ("schedule=1f1b chunks_per_stage=2",
     "parallel.pipeline.chunks_per_stage=2: … use parallel.pipeline.schedule=interleaved_1f1b"),
    ("stages=1000000000000", "stages·microbatches·chunks_per_stage=8000000000000: use a value of at most"),
    ("stages=100000", "stages·microbatches·chunks_per_stage=800000: use a value of at most 100,000"),
    ("stages=0", "stages=0: use a value of at least 1"),
    ("forward=nan", "forward=nan: use a value of at least 0"),
    ("backward=inf", "backward=inf: use a value of at most"),
    ("transfer=-1", "transfer=-1.0: use a value of at least 0"),
]  # fmt: skip


def test_numbers_that_no_schedule_can_have_are_one_line():
    assert not wrong_messages(NUMBERS, lambda arguments: __main__.main(arguments.split()))


def most_work(work, begins):
    return max(sum(work[a:b]) for a, b in zip((0, *begins), (*begins, len(work)), strict=True))


def test_no_other_cut_has_less_work_in_its_largest_part():
    draw = random.Random(0)
    for _ in range(200):
        work = [draw.choice((1.0, 1.0, 2.0, 5.0, draw.random())) for _ in range(draw.randint(1, 9))]
        places = sorted(draw.sample(range(1, len(work)), draw.randint(0, len(work) - 1)))
        parts = draw.randint(1, len(places) + 1)
        begins = balanced(work, parts, places)
        assert set(begins) <= set(places) and len(begins) == parts - 1 and begins == sorted(begins)
        best = min(most_work(work, chosen) for chosen in combinations(places, parts - 1))
        assert most_work(work, begins) == pytest.approx(best)


def test_of_equal_choices_the_most_even_one_is_taken():
    assert balanced([3.0, 1.0, 1.0, 1.0, 1.0], 3, range(1, 5)) == [1, 3]
    assert balanced([1.0, 1.0, 1.0, 1.0, 5.0], 4, range(1, 5)) in ([1, 2, 4], [1, 3, 4], [2, 3, 4])


def test_stages_share_nothing_but_tied_weights_and_have_all_parameters():
    description = registry.describe(configured(["model=gpt_tiny"]).model)
    blocks = [index for index, unit in enumerate(description.units) if unit.block]
    bounds = [(0, blocks[1]), (blocks[1], blocks[3]), (blocks[3], len(description.units))]
    stages = [description.stage([part]) for part in bounds]
    assert [len(stage.blocks) for stage in stages] == [1, 2, 1]
    owned = [name for stage in stages for name in stage.parameters.keys() - stage.copied.keys()]
    assert sorted(owned) == sorted(description.parameters)
    assert [list(stage.copied) for stage in stages] == [[], [], ["tokens.weight"]]
    assert stages[2].parameters["tokens.weight"] is description.parameters["tokens.weight"]
    parts = [(True, (0,), False), (False, (1, 2), False), (False, (3,), True)]
    assert [description.part(*part) for part in bounds] == parts
    terms = [stage.contributions["tokens.weight"] for stage in stages]
    assert terms == [1, 0, 1] and description.contributions["tokens.weight"] == 2
