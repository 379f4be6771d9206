import io
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.worker import Contender, redirect_stdout_for_answers, serve, share_process_groups

# A worker without a framework: it logs each run to a file and answers like a real one.
WORKER = """
import json, sys, time
group, rank, log = sys.argv[1], sys.argv[2], sys.argv[3]
send_answer = lambda answer: print(json.dumps(answer), flush=True) if rank == "0" else None
if group == "broken" and rank == "1":
    sys.exit("out of luck")
send_answer({"contenders": [group + ".a", group + ".b"]})
for run, line in enumerate(sys.stdin):
    with open(log, "a") as file:
        file.write(f"{line.strip()}/{rank} ")
    while rank == "0" and open(log).read().count(group + ".") < 2 * (run + 1):
        time.sleep(0.001)  # stands for the barrier of a real worker
    send_answer({"seconds": float(run), "loss": 1.0})
"""


def spec(family, module, needs="torch"):
    return WorkerSpec(family, module, "contenders", needs, ())


class TwoRanks:
    def __init__(self, log):
        self.log, self.processes = log, []

    def start(self, command, port, **pipes):
        group = command[3]
        commands = [[sys.executable, "-c", WORKER, group, str(rank), str(self.log)] for rank in range(2)]
        self.processes += (processes := [subprocess.Popen(worker, text=True, **pipes) for worker in commands])
        return processes


def test_contenders_alternate_across_groups_on_every_rank(tmp_path):
    cluster = TwoRanks(tmp_path / "log")
    rows = interleave(cluster, [spec("One", "one"), spec("Two", "two")], repeats=3, warm_up=1)
    runs = cluster.log.read_text().split()
    rank_0_runs = [run.removesuffix("/0") for run in runs if run.endswith("/0")]
    assert rank_0_runs == ["one.a", "one.b", "two.a", "two.b"] * 4
    assert sorted(r for r in runs if r.endswith("/1")) == sorted(f"{r}/1" for r in rank_0_runs)
    expected = [("One", "one.a"), ("One", "one.b"), ("Two", "two.a"), ("Two", "two.b")]
    assert [(row["family"], row["name"]) for row in rows] == expected
    assert rows[0]["seconds"] == [2.0, 4.0, 6.0]  # without the first step, which was the warm-up
    assert all(process.poll() is not None for process in cluster.processes)


def test_a_failed_rank_ends_the_run_with_its_error(tmp_path):
    cluster = TwoRanks(tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"rank 1 of (?s:.*)out of luck"):
        interleave(cluster, [spec("Broken", "broken")], repeats=100)
    assert all(process.poll() is not None for process in cluster.processes)


def test_a_spec_whose_package_is_missing_is_skipped_with_one_line(tmp_path, capsys):
    specs = [spec("Absent", "absent", needs="no_such_package"), spec("One", "one")]
    rows = interleave(TwoRanks(tmp_path / "log"), specs, repeats=1, warm_up=0)
    assert {row["family"] for row in rows} == {"One"}
    assert capsys.readouterr().out == "Absent: no_such_package is not installed; skipped\n"


def serve_a_run() -> list[dict]:
    """Serve a run of two steps on virtual devices, in which rank 1 computes longer and its host is late."""
    weight, answers = torch.ones(128, 128), io.StringIO()
    product_s = 0.01

    def run():
        for _ in range(2):
            time.sleep(0.05 * dist.get_rank())
            for _ in range(1 + dist.get_rank()):
                weight @ weight
        return lambda: {"steps": 2, "loss": 1.0, "exposed_s": {"x": 0.1}}

    device = VirtualDevice(flops=2 * 128**3 / product_s, memory_gb_s=1e6, launch_us=0)
    with patch.object(sys, "stdin", io.StringIO("name\n")):
        serve({"name": Contender(run)}, answers, device)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_a_run_on_virtual_devices_is_timed_and_reported_for_all_ranks(ranks):
    answers, of_rank_1 = ranks.run(2, serve_a_run)
    assert answers[0] == {"contenders": ["name"]} and of_rank_1 == []
    answer = answers[1]
    assert answer.keys() == {"seconds", "busy_s", "host_late_share", "cpu_bound", "exposed_s"}  # values mean nothing
    assert answer["busy_s"] == pytest.approx(0.02)  # of rank 1, per step
    assert answer["seconds"] >= 0.05 and answer["cpu_bound"] is True and answer["exposed_s"] == {"x": 0.1}


def chat_and_answer():
    sys.stdout = os.fdopen(1, "w", closefd=False)  # pytest's is not the process's
    answers = redirect_stdout_for_answers()
    print("chatter", flush=True)
    print("answer", file=answers, flush=True)


def test_answers_are_separate_from_other_output(capfd):
    process = multiprocessing.get_context("fork").Process(target=chat_and_answer)
    process.start()
    process.join()
    assert capfd.readouterr() == ("answer\n", "chatter\n") and process.exitcode == 0


@pytest.mark.parametrize("distinct, groups", [(False, [0, 0, 1, 0, 1]), (True, [0, 1, 2, 0, 2])])
def test_contenders_share_process_groups(monkeypatch, distinct, groups):
    created = itertools.count()
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        monkeypatch.setattr(module, "new_group", lambda *_, **__: next(created))
    begin_contender = share_process_groups(distinct)
    found = [dist.new_group(ranks) for ranks in ([0, 1], [0, 1], [0, 2])]
    begin_contender()
    assert [*found, *(dist.new_group(ranks) for ranks in ([0, 1], [0, 2]))] == groups
