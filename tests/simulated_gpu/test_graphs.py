"""Training steps with CUDA graphs on a simulated GPU, and the mistakes that the simulation reports."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.engine.prefetch import WeightSchedule
from gpt4d.parallel.engine.reduction import GradientSums
from tests.simulated_gpu import training
from tests.simulated_gpu.cases import FACTORS, Row, case, rows
from tests.simulated_gpu.job import GPU, simulated_job
from tests.simulated_gpu.programs import Programs, ones
from tests.support.grids import full

STEPS = 5  # two without graphs, a recording, a replay, and a recording after an evaluation
SAMPLED = [("y and data", "last"), ("1f1b", "last")]  # plans and ranks
ROWS = [row for row in rows() if row["documents"] == "joined"]
PROGRAMS = Programs()
reports = PROGRAMS.reports


def train(row: Row, rank: int, cuda_graphs: bool = True) -> training.Outcome:
    """Train some steps as a rank of a job."""
    return training.train(case(row).config, case(row).world_size, rank, STEPS, cuda_graphs)


def _cases() -> list:
    """Return rows, each with its first and its last rank, as parameters. ``make test`` runs ``SAMPLED``."""
    plans, chosen = {*SAMPLED}, []
    for row in ROWS:
        name = ", ".join(row[factor] for factor in FACTORS)
        for rank in sorted({0, case(row).world_size - 1}):
            place = row["plan"], "first" if rank == 0 else "last"
            parameters = pytest.param if place in plans else full
            chosen.append(parameters(row, rank, id=f"{name}, rank {rank}"))
            plans.discard(place)
    return chosen


@pytest.mark.parametrize(("row", "rank"), _cases())
def test_steps_with_graphs_have_no_race_and_a_capture_no_host_access(simulate, row, rank):
    outcome = simulate(train, row, rank)
    assert not outcome.problems, "\n".join(outcome.problems)
    assert outcome.launched >= 3


@pytest.mark.parametrize("plan", ["z", full("4d"), full("gpipe")])
def test_recorded_steps_take_the_memory_of_steps_without_graphs(simulate, plan):
    row = next(row for row in ROWS if row["plan"] == plan)
    recorded, eager = (simulate(train, row, 0, cuda_graphs).peak for cuda_graphs in (True, False))
    assert eager <= recorded <= 1.05 * eager


def without_waits_at_the_end_of_a_graph(row: Row, rank: int) -> list[str]:
    with (
        patch.object(WeightSchedule, "wait_for_collectives", lambda self: None),
        patch.object(GradientSums, "wait_for_collectives", lambda self: None),
    ):
        return train(row, rank).problems


def test_a_prefetched_weight_in_flight_at_the_end_of_a_graph_is_reported(simulate):
    chosen = {"plan": "1f1b", "family": "llama", "overlap": "overlap"}.items()
    row = next(row for row in ROWS if chosen <= row.items())
    problems = simulate(without_waits_at_the_end_of_a_graph, row, 0)
    assert any("the capture ends before the stream of the communicator" in problem for problem in problems)


# ------------------------------------------------------------------------------------- mistakes in small programs


class Capture:
    """Captures a function and launches the graph twice."""

    def __init__(self):
        self.stream, self.pool = torch.cuda.Stream(GPU), torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], object], mode: str = "thread_local") -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool, capture_error_mode=mode)
            function()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph.replay()
        graph.replay()
        return graph


class Captures:
    @reports("the host waits during a capture")
    def value_that_the_host_reads(capture):
        x = ones()
        capture(lambda: x.sum().item())

    @reports("the host waits during a capture")
    def copy_from_the_host(capture):
        capture(lambda: torch.tensor([1, 2], device=GPU) + 1)

    @reports("the host queries an event during a capture")
    def query_during_a_capture(capture):
        x, event = ones(), torch.cuda.current_stream().record_event()
        capture(lambda: (x.add_(1), event.query()))

    @reports("the host queries an event of a graph")
    def query_of_a_captured_event(capture):
        x, event = ones(), torch.cuda.Event()
        capture(lambda: (x.add_(1), event.record()))
        event.query()

    @reports("waits for work outside the graph")
    def wait_for_a_collective_outside(capture):
        x = ones()
        work = dist.all_reduce(x, async_op=True)
        capture(lambda: (work.wait(), x.add_(1)))

    @reports("the capture ends before the stream of the communicator")
    def collective_that_is_not_waited_for(capture):
        x, works = ones(), []
        capture(lambda: works.append(dist.all_reduce(x, async_op=True)))

    @reports("waits for an event of a graph")
    def collective_that_is_waited_for_outside(capture):
        x, works = ones(), []
        capture(lambda: works.append(dist.all_reduce(x, async_op=True)))
        works[0].wait()

    @reports("a graph uses memory of aten.ones")
    def input_that_is_replaced(capture):
        x = ones()
        graph = capture(lambda: x.add_(1))
        x = ones()  # the lambda refers to the variable
        graph.replay()

    @reports("uses memory of a graph")
    def message_from_the_memory_of_a_graph(capture):
        x, y = ones(), []
        capture(lambda: y.append(x + 1))
        dist.all_reduce(y[0])

    @reports("a capture forbids other threads")
    def capture_that_stops_other_threads(capture):
        x = ones()
        capture(lambda: x.add_(1), mode="global")

    @reports("")
    def graph_whose_result_is_copied_and_sent(capture):
        x, y = ones(), []
        graph = capture(lambda: (dist.all_reduce(x), y.append(x + 1)))
        sent = y[0].clone()
        work = dist.all_reduce(sent, async_op=True)
        graph.replay()
        work.wait()


def problems_of(name: str) -> list[str]:
    with simulated_job(2, 1) as job:
        PROGRAMS[name][1](Capture())
    return list(job.problems)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_with_a_graph_is_reported_and_a_correct_capture_is_accepted(simulate, name):
    message, problems = PROGRAMS[name][0], simulate(problems_of, name)
    assert any(message in problem for problem in problems) if message else not problems
