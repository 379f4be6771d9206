"""A soak test: ranks of one run are killed, fail, hang and are signaled at random, a hundred times.

    python -m tests.soak [faults=100] [seconds=1500] [seed=0] [out=docs/soak.json]

After each fault the job must end by itself with the exit codes and message of that fault, and resume when it is started
again. At the end the losses of all steps must equal, bit for bit, those of an uninterrupted run.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from gpt4d.config import Config, compose, from_arguments
from gpt4d.runtime.errors import one_line_errors
from tests.grids import train_in_rank
from tests.jobs import LaunchedJob
from tests.rank_pool import RankPool
from tests.runtime.test_faults import at_step, kill_itself, losses, shorten_timeouts

RANKS = 2
PHASES = ("start", "forward", "backward", "optimizer", "save")
KILLED, SIGNALED, RAISED, HUNG = "killed", "signaled", "raised", "hung"


@dataclass
class Soak:
    faults: int = 100
    seconds: float = 1500.0
    seed: int = 0
    out: str = "docs/soak.json"


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int
    phase: str = ""

    @classmethod
    def sample(cls, draw: random.Random, step: int) -> "Fault":
        """Draw a fault that strikes within the steps that follow ``step``."""
        kind = draw.choice((KILLED, KILLED, SIGNALED, SIGNALED, RAISED, HUNG))
        phase = draw.choice(PHASES) if kind == KILLED else ""
        return cls(kind, draw.randrange(RANKS), step + draw.randint(3, 8), phase)

    def prepare(self, rank: int) -> None:
        """Arm the fault on a rank, before it trains."""
        shorten_timeouts()
        if self.kind == KILLED:
            kill_itself(self.phase, self.rank, rank, self.step)
        elif rank == self.rank:
            at_step(self.step, {SIGNALED: _signal, RAISED: _fail, HUNG: _hang}[self.kind])

    def check(self, codes: list[int], output: str) -> None:
        """Raise AssertionError unless the job ended with the exit codes and message of this fault."""
        expected = {SIGNALED: [75] * RANKS}.get(self.kind, [1] * RANKS)
        if self.kind == KILLED:
            expected[self.rank] = -signal.SIGKILL
        message = {
            KILLED: f"error: rank {self.rank} on ",
            SIGNALED: ": stopped after step ",
            RAISED: f"error: rank {self.rank} on ",
            HUNG: f"rank {self.rank} on ",
        }[self.kind]
        assert codes == expected and message in output, (self, codes, output)


def _signal(_) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _fail(_) -> None:
    raise ValueError("a fault")


def _hang(_) -> None:
    threading.Event().wait()


def configuration(directory: Path, *overrides: str) -> Config:
    return compose(
        [
            "model.layers=2",
            "model.hidden=24",
            "model.vocab_size=300",
            "model.vocab_multiple=16",
            "model.max_positions=16",
            f"data.cache_dir={directory / 'cache'}",
            "data.processes=1",
            "train.steps=100000",
            "train.batch_size=4",
            "train.validate_every=0",
            "optim.schedule_steps=1000",
            "parallel.gz=2",
            "parallel.timeout_s=2",
            "checkpoint.every=3",
            "logging.every=1",
            "logging.sample_tokens=0",
            *overrides,
        ]
    )


def main(arguments: list[str]) -> None:
    soak = from_arguments(Soak, arguments)
    draw, counts, longest_s = random.Random(soak.seed), {}, 0.0
    pool, started = RankPool(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        config = configuration(directory, f"run.dir={directory / 'run'}")
        saved_step = 0
        while sum(counts.values()) < soak.faults and time.monotonic() - started < soak.seconds:
            fault = Fault.sample(draw, saved_step)
            with LaunchedJob(pool.context, config, RANKS, fault.prepare) as job:
                if fault.phase not in ("start", "save"):
                    job.wait_for_step(fault.step - 1)
                started_waiting = time.monotonic()
                codes = job.exit_codes()
                longest_s = max(longest_s, time.monotonic() - started_waiting)
                fault.check(codes, "".join(job.outputs()))
            kind = f"{fault.kind} {fault.phase}".strip()
            counts[kind] = counts.get(kind, 0) + 1
            saved = sorted((directory / "run" / "checkpoints").glob("step_????????"))
            saved_step = int(saved[-1].name[5:]) if saved else 0
            print(
                f"{sum(counts.values())}: {kind} on rank {fault.rank}, newest checkpoint at step {saved_step}",
                flush=True,
            )
        uninterrupted = configuration(
            directory, f"run.dir={directory / 'uninterrupted'}", f"train.steps={saved_step + 1}"
        )
        pool.run(RANKS, train_in_rank, uninterrupted)
        expected, actual = losses(uninterrupted), losses(config)[: saved_step + 1]
        assert actual == expected[: len(actual)] and len(actual) >= saved_step, "the losses differ"
    pool.close()
    result = {
        "command": " ".join(["python -m tests.soak", *arguments]),
        "faults": sum(counts.values()),
        "by_kind": dict(sorted(counts.items())),
        "steps": saved_step,
        "longest_s": round(longest_s, 1),
        "seconds": round(time.monotonic() - started),
    }
    Path(soak.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
