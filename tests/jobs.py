"""Jobs as a launcher starts them, a process a rank, to be signalled and killed."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from gpt4d.config import Config

PATIENCE_S = 120.0


class Job:
    """Trains ``config`` on so many ranks, in the manner of ``train.py``; what each says is in ``<run.dir>.<rank>``."""

    def __init__(self, context, config: Config, ranks: int, prepare=None):
        """``prepare(rank)`` is called on each rank before it trains."""
        self.run_dir = Path(config.run.dir)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        where = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost"}
        self.logs = [self.run_dir.with_name(f"{self.run_dir.name}.{rank}") for rank in range(ranks)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            log.unlink(missing_ok=True)
            environment = {**where, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = config, environment, log, prepare
            self.processes.append(context.Process(target=_train, args=arguments, daemon=True))
            self.processes[-1].start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def comes_to(self, step: int) -> None:
        """Waits until metrics.jsonl has that step."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(line.get("step", 0) >= step for line in self.lines() if "event" not in line):
            assert all(process.is_alive() for process in self.processes), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def lines(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def ends(self) -> list[int]:
        """Waits for all ranks. Their exit codes; that of one killed is negative."""
        deadline = time.monotonic() + PATIENCE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {self.processes.index(process)} hangs: {self.said()}"
        return [process.exitcode for process in self.processes]

    def said(self) -> list[str]:
        return [log.read_text() for log in self.logs if log.exists()]


def _train(config: Config, environment: dict[str, str], log: Path, prepare) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment, OMP_NUM_THREADS="1")
    import torch

    from gpt4d.runtime.errors import one_line_errors
    from train import train

    torch.set_num_threads(1)
    if prepare:
        prepare(int(environment["RANK"]))
    with one_line_errors():
        train(config)
