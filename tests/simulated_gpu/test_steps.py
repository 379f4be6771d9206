"""Training steps of all families and plans on a simulated GPU: no races, no unexpected waits of the host."""

import importlib
from functools import reduce

import pytest

from tests.simulated_gpu import waits
from tests.simulated_gpu.cases import FACTORS, Row, all_pairs, case, pairs_of, rows
from tests.simulated_gpu.training import train
from tests.support.settings import configured

ROWS = rows()
SAMPLE = ROWS[:14]  # they have each option; the remaining rows complete the pairs


def _on_ranks(row: Row, number: int) -> list:
    """Return a row's first and last rank as parameters.

    ``make test`` runs one rank if the row is in the sample. It runs both ranks of a plan in which the first stage sends
    only copied weights to the last stage.
    """
    ranks, name = sorted({0, case(row).world_size - 1}), ", ".join(row[factor] for factor in FACTORS)
    chosen = () if row not in SAMPLE else ranks if row["plan"] == "eager" else (ranks[number % len(ranks)],)
    return [
        pytest.param(row, rank, id=f"{name}, rank {rank}", marks=[pytest.mark.full] * (rank not in chosen))
        for rank in ranks
    ]


@pytest.mark.parametrize(("row", "rank"), [case for number, row in enumerate(ROWS) for case in _on_ranks(row, number)])
def test_a_step_on_a_gpu_has_no_race_and_the_host_does_not_wait(simulate, row, rank):
    problems, overlaps = simulate(train, case(row).config, case(row).world_size, rank)
    assert not problems, "\n".join(problems)
    assert not {"send", "receive"} & overlaps.keys(), "messages of stages wait for each other on the default stream"
    if row["overlap"] == "overlap" and row["plan"] == "4d":
        assert min(overlaps[name] for name in ("all_reduce", "all_gather", "reduce_scatter")) > 0


def test_a_step_in_float8_on_a_gpu_has_no_race_and_the_host_does_not_wait(simulate):
    config = configured([
        "model=gpt_tiny", "model.layers=2", "model.hidden=64", "model.heads=4", "model.vocab_size=300",
        "model.max_positions=16", "train.seq_len=16", "train.batch_size=16", "train.micro_batch_size=2",
        "train.precision=fp8", "parallel.gx=2", "parallel.gz=2", "parallel.chunks=2", "optim.shard_states=true",
    ])  # fmt: skip
    problems, _ = simulate(train, config, 8, 0)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("words", "collective"),
    [
        (("parallel.context_exchange=ring", "train.activation_checkpointing=full"), "all_to_all"),
        (("data.reset_attention=true",), "all_gather"),
        pytest.param(("train.activation_checkpointing=full",), "all_gather", marks=pytest.mark.full),
    ],
    ids=["ring", "documents", "recomputed"],
)
def test_a_step_of_shared_sequences_has_no_race_and_keys_arrive_during_attention(simulate, words, collective):
    config = configured([
        "model=gpt_tiny", "model.layers=2", "model.hidden=64", "model.heads=4", "model.vocab_size=300",
        "model.max_positions=16", "train.seq_len=16", "train.batch_size=16", "train.precision=bf16",
        "parallel.gz=2", "parallel.context=4", "parallel.chunks=2", "optim.algorithm=adamw", *words,
    ])  # fmt: skip
    problems, overlaps = simulate(train, config, 4, 1)
    assert not problems, "\n".join(problems)
    assert overlaps[collective] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.gz=2", "parallel.gx=2", "parallel.chunks=2", "model.shared_inner=64"),
        pytest.param(("parallel.gz=2", "parallel.expert_data=true"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_step_of_experts_has_no_race_and_the_host_waits_for_their_loads_alone(simulate, words):
    config = configured([
        "model=moe_tiny", "model.layers=2", "model.hidden=64", "model.inner=64", "model.vocab_size=300",
        "model.max_positions=16", "train.seq_len=16", "train.batch_size=16", "train.precision=bf16",
        "optim.algorithm=adamw", "optim.lr=1e-3", *words,
    ])  # fmt: skip
    problems, overlaps = simulate(train, config, 4, 1)
    problems = [problem for problem in problems if "routing_kernels.py" not in problem]  # routers multiply in float32
    assert not problems, "\n".join(problems)
    assert overlaps["all_to_all"] > 0


def test_the_sampled_steps_have_every_option_and_all_steps_each_pair_of_options():
    sampled = {option for row in SAMPLE for option in row.items()}
    assert sampled == {(factor, value) for factor, options in FACTORS.items() for value in options}
    assert set().union(*map(pairs_of, ROWS)) == all_pairs()


def test_the_functions_in_which_the_host_may_wait_exist():
    for file, function in waits.STEP | waits.FIRST | waits.BETWEEN_STEPS | waits.SYNCHRONOUS_SAVE:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        assert callable(reduce(getattr, function.partition(".<locals>")[0].split("."), module)), function
