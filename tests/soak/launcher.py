"""Jobs of torchrun, whose agent can be killed, stopped and signaled. As a command, a rank with short timeouts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from gpt4d.config.commands import one_line_errors
from gpt4d.training.run import train
from tests.soak.faults import prepare_rank
from tests.support.settings import configured

TIMEOUT_S = 120.0


class TorchrunJob:
    """Train under torchrun. The output is in ``<run.dir>.torchrun``. The variable ``mark`` finds the processes."""

    def __init__(self, overrides: Sequence[str], run_dir: Path, ranks: int, mark: Mapping[str, str]):
        self.mark = mark
        self._metrics = run_dir / "metrics.jsonl"
        self._earlier_lines = len(self._lines())  # lines of the run's earlier starts
        self.log = run_dir.with_name(f"{run_dir.name}.torchrun")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "tests.soak.launcher", *overrides]
        environment = {**os.environ, **mark, "OMP_NUM_THREADS": "1"}
        with open(self.log, "w") as log:
            self.agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def __enter__(self) -> "TorchrunJob":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agent.wait()

    def processes(self) -> list[int]:
        """Return the processes of the job that run: the agent, the ranks and their children."""
        return marked(self.mark)

    def wait_for_step(self, step: int) -> None:
        """Wait until the job has trained ``step`` or has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.agent.poll() is None and time.monotonic() < deadline and self._step() < step:
            time.sleep(0.05)

    def _step(self) -> int:
        steps = [json.loads(line).get("step", 0) for line in self._lines()[self._earlier_lines :]]
        return steps[-1] if steps else 0

    def _lines(self) -> list[str]:
        return self._metrics.read_text().split("\n")[:-1] if self._metrics.exists() else []


def marked(mark: Mapping[str, str]) -> list[int]:
    """Return the processes of this machine that have not ended and have these variables."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark.items() <= process.environ().items() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


if __name__ == "__main__":  # a rank
    prepare_rank()
    with one_line_errors():
        train(configured(sys.argv[1:]))
