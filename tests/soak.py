"""Faults by the hundred: ranks of one run are killed, fail, hang and are signalled, at random, until it has had enough.

    python -m tests.soak [faults=100] [seconds=1500] [seed=0] [out=docs/soak.json]

Each time the job must end by itself, with the exit codes and the word that belong to the fault, and go on when it is
started again. At the end the losses of all steps are, bit for bit, those of a run that nothing happened to.
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
from tests.jobs import Job
from tests.rank_pool import RankPool
from tests.test_faults import at_step, kill_itself, losses, quickly

RANKS = 2
PHASES = ("start", "forward", "backward", "optimizer", "save")
KILLED, SIGNALLED, RAISED, HUNG = "killed", "signalled", "raised", "hung"


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
    def drawn(cls, draw: random.Random, done: int) -> "Fault":
        """One that strikes within the next few steps."""
        kind = draw.choice((KILLED, KILLED, SIGNALLED, SIGNALLED, RAISED, HUNG))
        phase = draw.choice(PHASES) if kind == KILLED else ""
        return cls(kind, draw.randrange(RANKS), done + draw.randint(3, 8), phase)

    def prepare(self, rank: int) -> None:
        """On a rank, before it trains."""
        quickly()
        if self.kind == KILLED:
            kill_itself(self.phase, self.rank, rank, self.step)
        elif rank == self.rank:
            at_step(self.step, {SIGNALLED: _signal, RAISED: _fail, HUNG: _hang}[self.kind])

    def check(self, codes: list[int], said: str) -> None:
        """AssertionError unless the job ended as it should."""
        expected = {SIGNALLED: [75] * RANKS}.get(self.kind, [1] * RANKS)
        if self.kind == KILLED:
            expected[self.rank] = -signal.SIGKILL
        word = {
            KILLED: f"error: rank {self.rank} on ",
            SIGNALLED: "the same command goes on",
            RAISED: f"error: rank {self.rank} on ",
            HUNG: f"rank {self.rank} on ",
        }[self.kind]
        assert codes == expected and word in said, (self, codes, said)


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
    draw, counts, longest = random.Random(soak.seed), {}, 0.0
    pool, started = RankPool(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        config = configuration(directory, f"run.dir={directory / 'run'}")
        done = 0
        while sum(counts.values()) < soak.faults and time.monotonic() - started < soak.seconds:
            fault = Fault.drawn(draw, done)
            with Job(pool.context, config, RANKS, fault.prepare) as job:
                if fault.phase not in ("start", "save"):
                    job.comes_to(fault.step - 1)
                struck = time.monotonic()
                codes = job.ends()
                longest = max(longest, time.monotonic() - struck)
                fault.check(codes, "".join(job.said()))
            kind = f"{fault.kind} {fault.phase}".strip()
            counts[kind] = counts.get(kind, 0) + 1
            saved = sorted((directory / "run" / "checkpoints").glob("step_????????"))
            done = int(saved[-1].name[5:]) if saved else 0
            print(f"{sum(counts.values())}: {kind} on rank {fault.rank}, step {done} is saved", flush=True)
        straight = configuration(directory, f"run.dir={directory / 'straight'}", f"train.steps={done + 1}")
        pool.run(RANKS, train_in_rank, straight)
        expected, found = losses(straight), losses(config)[: done + 1]
        assert found == expected[: len(found)] and len(found) >= done, "the losses are others"
    pool.close()
    result = {
        "command": " ".join(["python -m tests.soak", *arguments]),
        "faults": sum(counts.values()),
        "by_kind": dict(sorted(counts.items())),
        "steps": done,
        "longest_s": round(longest, 1),
        "seconds": round(time.monotonic() - started),
    }
    Path(soak.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
