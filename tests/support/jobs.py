"""Jobs started as a launcher does, one process per rank, so that tests can signal and kill ranks; commands."""

import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gpt4d.config import Config

TIMEOUT_S = 120.0
SLURM_STEP = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "nid[001003-001004,001009]", "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_NODEID": "2",
}  # fmt: skip


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return ``count`` free ports below the range from which the kernel chooses the ports of other tests."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 20_000), 10_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"fewer than {count} ports from 10000 to 19999 are free")


def _launcher_variables(ranks: int) -> dict[str, str]:
    """Return the variables that torchrun sets on all ranks of a job."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), **sizes}


class LaunchedJob:
    """Train ``config`` on ``ranks`` processes as ``train.py`` does; each rank's output is in ``<run.dir>.<rank>``."""

    def __init__(self, context, config: Config, ranks: int, prepare=None, environment: dict[str, str] | None = None):
        """``prepare(rank)`` is called on each rank before it trains, with ``environment`` in its variables."""
        self.run_dir = Path(config.run.dir)
        common = {**_launcher_variables(ranks), **(environment or {})}
        self.port = int(common["MASTER_PORT"])
        self.logs = [self.run_dir.with_name(f"{self.run_dir.name}.{rank}") for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            log.unlink(missing_ok=True)
            variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = config, variables, log, prepare
            self.processes.append(context.Process(target=_train, args=arguments, daemon=True))
            self.processes[-1].start()

    def __enter__(self) -> "LaunchedJob":
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl has ``step``."""
        deadline = time.monotonic() + TIMEOUT_S
        while not any(line.get("step", 0) >= step for line in self.metric_lines() if "event" not in line):
            assert all(process.is_alive() for process in self.processes), self.outputs()
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.02)

    def metric_lines(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        complete = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in complete]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def exit_codes(self) -> list[int]:
        """Wait for all ranks and return their exit codes. The exit code of a killed rank is negative."""
        deadline = time.monotonic() + TIMEOUT_S
        return [self.exit_code(rank, deadline - time.monotonic()) for rank in range(len(self.processes))]

    def exit_code(self, rank: int, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for one rank and return its exit code."""
        process = self.processes[rank]
        process.join(max(0.0, timeout_s))
        assert process.exitcode is not None, f"rank {rank} hangs: {self.outputs()}"
        return process.exitcode

    def outputs(self) -> list[str]:
        return [log.read_text() for log in self.logs if log.exists()]

    def events(self, name: str) -> list[dict]:
        """Return the lines of an event in metrics.jsonl."""
        return [line for line in self.metric_lines() if line.get("event") == name]


def ended_job(context, config: Config, codes: list[int], prepare=None) -> LaunchedJob:
    """Run a job to its end, with a rank per expected exit code."""
    with LaunchedJob(context, config, len(codes), prepare) as job:
        assert job.exit_codes() == codes, job.outputs()
    return job


def _train(config: Config, environment: dict[str, str], log: Path, prepare) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment, OMP_NUM_THREADS="1")
    import torch

    from gpt4d.config.commands import one_line_errors
    from gpt4d.training.run import train

    torch.set_num_threads(1)
    if prepare:
        prepare(int(environment["RANK"]))
    with one_line_errors():
        train(config)


def run_command(context, *arguments: str, ranks: int = 1, directory: Path | None = None) -> subprocess.CompletedProcess:
    """Run ``python ARGUMENTS``, a file or ``-m MODULE``, in a fork that has imported torch and Hydra, on each rank.

    It starts in a tenth of a second. The result has the exit code and the output of rank 0. A test of the imports of a
    command needs a process of its own. ``directory``: the working directory, by default the test's.
    """
    environment = _launcher_variables(ranks) if ranks > 1 else {}
    with tempfile.TemporaryDirectory() as output:
        processes = []
        for rank in range(ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            command = arguments, own, f"{output}/{rank}", directory
            processes.append(context.Process(target=_run_command, args=command, daemon=True))
            processes[-1].start()
        for process in processes:
            process.join(TIMEOUT_S)
            assert process.exitcode is not None, f"{arguments} hangs"
        texts = (Path(output, f"0.{name}").read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(arguments, processes[0].exitcode, *texts)


def _run_command(arguments: tuple[str, ...], environment: dict[str, str], path: str, directory: Path | None) -> None:
    for descriptor, name in enumerate(("out", "err"), start=1):
        os.dup2(os.open(f"{path}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
    os.environ.update(environment)
    if directory:
        os.chdir(directory)
        sys.path.insert(0, str(directory))
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
