"""Training steps of all families and plans on a simulated GPU: no races, no unexpected waits of the host."""

import importlib
from functools import reduce

import pytest

from tests.simulated_gpu import waits
from tests.simulated_gpu.cases import FACTORS, Row, all_pairs, case, pairs_of, rows
from tests.simulated_gpu.training import train
from tests.support.grids import full
from tests.support.settings import configured

ROWS = rows()
OVERLAPPING = [row for row in ROWS if row["plan"] == "4d" and row["overlap"] == "overlap"]
# They have each option, and collectives that overlap; the remaining rows complete the pairs.
SAMPLE = ROWS[:12] + ROWS[13:14] + OVERLAPPING[:1]


def _on_ranks(row: Row, number: int) -> list:
    """Return a row's first and last rank as parameters.

    ``make test`` runs one rank if the row is in the sample. It runs both ranks of a plan in which the first stage sends
    only copied weights to the last stage.
    """
    ranks, name = sorted({0, case(row).world_size - 1}), ", ".join(row[factor] for factor in FACTORS)
    chosen = () if row not in SAMPLE else ranks if row["plan"] == "eager" else (ranks[number % len(ranks)],)
    return [(pytest.param if rank in chosen else full)(row, rank, id=f"{name}, rank {rank}") for rank in ranks]


@pytest.mark.parametrize(("row", "rank"), [case for number, row in enumerate(ROWS) for case in _on_ranks(row, number)])
def test_a_step_on_a_gpu_has_no_race_and_the_host_does_not_wait(simulate, row, rank):
    problems, overlaps, *_ = simulate(train, case(row).config, case(row).world_size, rank)
    assert not problems, "\n".join(problems)
    assert not {"send", "receive"} & overlaps.keys(), "messages of stages wait for each other on the default stream"
    if row in OVERLAPPING:
        assert min(overlaps[name] for name in ("all_reduce", "all_gather", "reduce_scatter")) > 0


# By name: the number of ranks, this rank, a collective that must overlap with the computation, and settings.
_GPT = "model=gpt_tiny train.precision=bf16 parallel.gz=2 parallel.chunks=2 "
_SHARED = _GPT + "parallel.context=4 optim.algorithm=adamw "
_RECOMPUTED = "train.activation_checkpointing=full"
_EXPERTS = "model=moe_tiny model.inner=64 train.precision=bf16 optim.algorithm=adamw optim.lr=1e-3 parallel.gz=2 "
SPECIAL = {
    "float8": (8, 0, "", _GPT + "train.precision=fp8 train.micro_batch_size=2 parallel.gx=2 optim.shard_states=true"),
    "ring": (4, 1, "all_to_all", f"{_SHARED} {_RECOMPUTED} parallel.context_exchange=ring"),
    "documents": (4, 1, "all_gather", _SHARED + "data.reset_attention=true"),
    "recomputed": (4, 1, "all_gather", _SHARED + _RECOMPUTED),
    "experts": (4, 1, "all_to_all", _EXPERTS + "parallel.gx=2 parallel.chunks=2 model.shared_inner=64"),
    "experts over data": (4, 1, "all_to_all", _EXPERTS + "parallel.expert_data=true"),
}
REPEATED = "recomputed", "experts over data"


@pytest.mark.parametrize("name", [full(name) if name in REPEATED else name for name in SPECIAL])
def test_a_step_of_special_layers_has_no_race_and_keys_and_rows_arrive_meanwhile(simulate, name):
    world_size, rank, collective, settings = SPECIAL[name]
    sizes = "model.layers=2 model.hidden=64 model.vocab_size=300 model.max_positions=16 train.seq_len=16"
    config = configured([*settings.split(), *sizes.split(), "model.heads=4", "train.batch_size=16"])
    problems, overlaps, *_ = simulate(train, config, world_size, rank)
    # The host waits only for the loads of experts. Routers multiply in float32.
    problems = [problem for problem in problems if "layers/routing.py" not in problem]
    assert not problems, "\n".join(problems)
    assert not collective or overlaps[collective] > 0


def test_the_sampled_steps_have_every_option_and_all_steps_each_pair_of_options():
    sampled = {option for row in SAMPLE for option in row.items()}
    assert sampled == {(factor, value) for factor, options in FACTORS.items() for value in options}
    assert set().union(*map(pairs_of, ROWS)) == all_pairs()


def test_the_functions_in_which_the_host_may_wait_exist():
    for file, function in waits.STEP | waits.FIRST | waits.BETWEEN_STEPS | waits.SYNCHRONOUS_SAVE:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert callable(reduce(getattr, function.partition(".<locals>")[0].split("."), module)), function
