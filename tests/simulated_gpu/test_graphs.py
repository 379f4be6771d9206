"""Training steps with CUDA graphs on a simulated GPU, and the mistakes that the simulation reports."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.parallel.engine.prefetch import WeightSchedule
from gpt4d.parallel.engine.reduction import GradientSums
from gpt4d.step import TrainStep
from tests.grids import full
from tests.simulated_gpu import training
from tests.simulated_gpu.cases import FACTORS, Row, case, rows
from tests.simulated_gpu.graphs import simulated_graphs
from tests.simulated_gpu.job import GPU, Job, simulated_job

STEPS = 6  # two without graphs, a recording, two replays, and a recording after an evaluation
ROWS = [row for row in rows() if row["documents"] == "joined"]


def train_with_graphs(row: Row, rank: int) -> tuple[list[str], int]:
    """Return the problems of a job's rank and the number of its launched graphs."""
    launched = []

    @contextmanager
    def job_with_graphs(*arguments):
        with simulated_job(*arguments) as job, simulated_graphs(job) as graphs:
            yield job
            launched.append(graphs.launches)

    with (
        patch.object(training, "simulated_job", job_with_graphs),
        patch.object(training, "TrainStep", partial(TrainStep, cuda_graphs=True)),
    ):
        outcome = training.train(case(row).config, case(row).world_size, rank, STEPS)
    return outcome.problems, launched[0]


def _last_rank(row: Row) -> int:
    return case(row).world_size - 1


def _cases() -> list:
    """Return rows with their last rank as parameters. ``make test`` runs one row for each plan."""
    seen, chosen = set[str](), []
    for row in ROWS:
        name = ", ".join(row[factor] for factor in FACTORS)
        chosen.append(full(row, id=name) if row["plan"] in seen else pytest.param(row, id=name))
        seen.add(row["plan"])
    return chosen


@pytest.mark.parametrize("row", _cases())
def test_steps_with_graphs_have_no_race_and_a_capture_no_host_access(simulate, row):
    problems, launched = simulate(train_with_graphs, row, _last_rank(row))
    assert not problems, "\n".join(problems)
    assert launched >= 4


def without_waits_at_the_end_of_a_graph(row: Row, rank: int) -> list[str]:
    with (
        patch.object(WeightSchedule, "wait_for_collectives", lambda self: None),
        patch.object(GradientSums, "wait_for_collectives", lambda self: None),
    ):
        return train_with_graphs(row, rank)[0]


def test_a_prefetched_weight_in_flight_at_the_end_of_a_graph_is_reported(simulate):
    row = next(row for row in ROWS if row["plan"] == "gpipe" and row["overlap"] == "overlap")
    problems = simulate(without_waits_at_the_end_of_a_graph, row, 0)
    assert any("the capture ends before the stream of the communicator" in problem for problem in problems)


# ------------------------------------------------------------------------------------- mistakes in small programs

MISTAKES: dict[Callable[[Job, "Program"], None], str] = {}  # with a part of the message


class Program:
    """A program that captures a function and launches the graph twice."""

    def __init__(self):
        self.stream, self.pool = torch.cuda.Stream(GPU), torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object], mode: str = "thread_local") -> torch.cuda.CUDAGraph:
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


def mistake(message: str):
    def add(function):
        MISTAKES[function] = message
        return function

    return add


def ones() -> torch.Tensor:
    return torch.ones(8, device=GPU)


@mistake("the host waits during a capture")
def value_that_the_host_reads(job, program):
    x = ones()
    program.capture(lambda: x.sum().item())


@mistake("the host waits during a capture")
def copy_from_the_host(job, program):
    program.capture(lambda: torch.tensor([1, 2], device=GPU) + 1)


@mistake("the host queries an event during a capture")
def query_during_a_capture(job, program):
    x, event = ones(), torch.cuda.current_stream().record_event()
    program.capture(lambda: (x.add_(1), event.query()))


@mistake("the host queries an event of a graph")
def query_of_a_captured_event(job, program):
    x, event = ones(), torch.cuda.Event()
    program.capture(lambda: (x.add_(1), event.record()))
    event.query()


@mistake("waits for work outside the graph")
def wait_for_a_collective_outside(job, program):
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    program.capture(lambda: (work.wait(), x.add_(1)))


@mistake("the capture ends before the stream of the communicator")
def collective_that_is_not_waited_for(job, program):
    x, works = ones(), []
    program.capture(lambda: works.append(dist.all_reduce(x, async_op=True)))


@mistake("waits for an event of a graph")
def collective_that_is_waited_for_outside(job, program):
    x, works = ones(), []
    program.capture(lambda: works.append(dist.all_reduce(x, async_op=True)))
    works[0].wait()


@mistake("a graph uses memory of aten.ones")
def input_that_is_replaced(job, program):
    x = ones()
    graph = program.capture(lambda: x.add_(1))
    x = ones()  # the lambda refers to the variable
    graph.replay()


@mistake("uses memory of a graph")
def message_from_the_memory_of_a_graph(job, program):
    x, y = ones(), []
    program.capture(lambda: y.append(x + 1))
    dist.all_reduce(y[0])


@mistake("a capture forbids other threads")
def capture_that_stops_other_threads(job, program):
    x = ones()
    program.capture(lambda: x.add_(1), mode="global")


def correct(job, program):
    x, y = ones(), []
    graph = program.capture(lambda: (dist.all_reduce(x), y.append(x + 1)))
    sent = y[0].clone()
    work = dist.all_reduce(sent, async_op=True)
    graph.replay()
    work.wait()


def problems_of(function: Callable[[Job, Program], None]) -> list[str]:
    with simulated_job(2, 1) as job, simulated_graphs(job):
        function(job, Program())
    return list(job.problems)


@pytest.mark.parametrize("function", MISTAKES, ids=lambda function: function.__name__)
def test_a_mistake_with_a_graph_is_reported(simulate, function):
    assert any(MISTAKES[function] in problem for problem in simulate(problems_of, function))


def test_correct_captures_are_accepted(simulate):
    assert simulate(problems_of, correct) == []
