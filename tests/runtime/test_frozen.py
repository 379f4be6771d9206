"""A process is stopped, not ended: a rank, the rank that holds the store, or torchrun. All others end and name it."""

import functools
import re
import signal
import sys

import pytest

from tests.support.faults import Fault, kill
from tests.support.grids import full
from tests.support.jobs import LaunchedJob
from tests.support.lost_ranks import settings, under_torchrun


@pytest.mark.parametrize("target", [0, full(1)])
def test_a_frozen_rank_is_named_even_if_it_holds_the_store(ranks, tiny, target):
    config = tiny("parallel.gz=2", "parallel.timeout_s=1")
    fault = Fault(target, functools.partial(kill, signal.SIGSTOP), step=5)
    with LaunchedJob(ranks.context, config, 2, fault) as job:
        assert job.exit_code(1 - target) == 1, job.outputs()
        output = job.outputs()[1 - target]
    assert re.search(rf"rank {target} on \S+ (does not answer|failed: no sign of life)", output), output
    assert output.count("error:") == 1 and "Traceback" not in output


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="it reads the state of processes from /proc")
@pytest.mark.parametrize(
    ("number", "problem"), [(signal.SIGSTOP, "does not answer"), (signal.SIGKILL, "has ended")], ids=["stop", "kill"]
)
def test_a_lost_launcher_is_named_and_all_ranks_end(tmp_path, number, problem):
    _, text = under_torchrun(tmp_path, number, settings(tmp_path, 2.0), shorten=True)
    assert re.search(rf"error: the launcher \(torchrun\) on \S+ {problem}", text), text
