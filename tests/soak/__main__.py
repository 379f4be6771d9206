"""``python -m tests.soak``: see the package."""

import json
import math
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from gpt4d.config import ConfigError, from_arguments
from gpt4d.config.commands import one_line_errors
from tests.soak import __doc__ as description
from tests.soak.faults import DAMAGED, LAUNCHER, STOPPED, TWICE, Fault, damage
from tests.soak.launcher import TorchrunJob, marked
from tests.soak.plans import MODELS, PLANS, settings, write_files
from tests.support.grids import metric_lines, train_in_rank
from tests.support.jobs import LaunchedJob
from tests.support.rank_pool import RankPool
from tests.support.settings import configured

ELASTIC = "elastic"  # the run whose plan changes at each start
_TOLERANCE = 1e-5  # relative difference of losses
_LIMIT_S = 15.0  # from the fault to the end of the last rank
_MARK = "GPT4D_SOAK"  # the environment variable by which the soak finds the processes of its jobs


@dataclass
class Soak:
    faults: int = 100
    seconds: float = 86400.0
    seed: int = 0
    model: str = "gpt"
    plans: str = ",".join((*PLANS, ELASTIC))
    out: str = "benchmarks/results/soak.json"


@dataclass
class Run:
    """A run that suffers faults."""

    name: str  # a plan, or elastic
    directory: Path
    plan: str  # the plan of the next start
    step: int = 0  # the step of the newest checkpoint


@dataclass
class Record:
    """The results of the soak."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # from fault to end, by kind
    problems: list[str] = field(default_factory=list)


def _leftovers() -> set[str]:
    """Return the processes of jobs and the files in shared memory."""
    # Semaphores of Python belong to other programs: the runs encode their data in one process.
    found = {f"shared memory {path}" for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}
    return found | {f"process {process}" for process in marked({_MARK: str(os.getpid())})}


def _strike_launcher(job: TorchrunJob, fault: Fault) -> float:
    """Strike torchrun and wait until its ranks have ended. Return the seconds that they took."""
    job.wait_for_step(fault.step)
    began = time.monotonic()
    os.kill(job.agent.pid, fault.number)
    while set(job.processes()) - {job.agent.pid} and time.monotonic() < began + 120.0:
        time.sleep(0.05)
    return time.monotonic() - began


def _strike(job: LaunchedJob, fault: Fault) -> tuple[list[int], float]:
    """Wait until a job has ended. Return its exit codes and the seconds from the fault to the end of its last rank."""
    deadline = time.monotonic() + 120.0
    struck = job.processes[fault.rank]
    others = [process for process in job.processes if process is not struck or fault.kind != STOPPED]
    last_signal = 0.0
    while any(process.is_alive() for process in others):
        if time.monotonic() > deadline:
            break
        if fault.kind == TWICE and fault.path.exists() and time.monotonic() - last_signal > 1.2:
            job.signal(signal.SIGTERM)
            last_signal = time.monotonic()
        time.sleep(0.02)
    ended = time.time()
    if fault.kind == STOPPED and struck.is_alive():
        job.signal(signal.SIGKILL, fault.rank)
        struck.join()
    began = float(fault.path.read_text()) if fault.path.exists() else ended
    return [math.nan if process.exitcode is None else process.exitcode for process in job.processes], ended - began


def _suffer(pool: RankPool, run: Run, fault: Fault, overrides: list[str], record: Record) -> str:
    """Start a run, strike it, and return the problem, if any."""
    before, mark = _leftovers(), {_MARK: str(os.getpid())}
    ranks = PLANS[run.plan].ranks
    if fault.phase == LAUNCHER:
        with TorchrunJob(overrides, run.directory, ranks, mark) as job:
            seconds, codes = _strike_launcher(job, fault), []
        outputs = [job.log.read_text()]
    else:
        with LaunchedJob(pool.context, configured(overrides), ranks, fault.prepare, mark) as launched:
            codes, seconds = _strike(launched, fault)
            outputs = launched.outputs()
    problem = fault.problem(codes, outputs)
    if fault.kind != DAMAGED and fault.phase != LAUNCHER and not fault.path.exists():
        problem = problem and f"never struck; {problem}"
    kind = f"{fault.kind} launcher" if fault.phase == LAUNCHER else fault.kind
    record.seconds[kind].append(seconds)
    if seconds > _LIMIT_S:
        problem += f"; the last rank ended after {seconds:.1f} s"
    deadline = time.monotonic() + 2.0  # torchrun's agent may still be ending
    while (left := _leftovers() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        problem += f"; left behind: {sorted(left)}"
    if problem:
        problem += "\n    " + "\n    ".join("".join(outputs).splitlines()[-12:])
    fault.path.unlink(missing_ok=True)
    return problem


def _losses(directory: Path) -> dict[int, float]:
    """Return the loss of each step; of a step repeated after a restart, the last."""
    return {line["step"]: line["loss"] for line in metric_lines(directory)}


def _check_losses(pool: RankPool, soak: Soak, run: Run, directory: Path) -> str:
    """Return the difference between the losses of a run and of an undisturbed run."""
    plan = PLANS[next(iter(PLANS)) if run.name == ELASTIC else run.name]
    straight = directory / f"straight-{run.name}"
    run.step += 2  # the run ends undisturbed, and removes leftovers of the last fault
    for run_dir in (run.directory, straight):
        words = f"run.dir={run_dir}", f"train.steps={run.step}"
        pool.run(plan.ranks, train_in_rank, configured(settings(soak.model, plan, directory, *words)))
    expected, actual = _losses(straight), _losses(run.directory)
    steps = range(1, run.step + 1)
    missing = [step for step in steps if step not in actual]
    tolerance = _TOLERANCE if run.name == ELASTIC else 0.0
    different = [s for s in steps if s in actual and abs(actual[s] / expected[s] - 1) > tolerance]
    left = sorted(path.name for path in run.directory.glob("checkpoints/*") if path.suffix)
    problem = f"steps without a loss: {missing[:5]}; " if missing else ""
    problem += f"losses differ from step {different[0]} on; " if different else ""
    return problem + (f"files left behind: {left}" if left else "")


def main(arguments: list[str]) -> None:
    soak = from_arguments(Soak, arguments)
    names = soak.plans.split(",")
    if unknown := [name for name in names if name not in (*PLANS, ELASTIC)]:
        raise ConfigError(f"plans={unknown[0]}: no such plan; use {', '.join((*PLANS, ELASTIC))}")
    if soak.model not in MODELS:
        raise ConfigError(f"model={soak.model}: no such model; use {' or '.join(MODELS)}")
    if soak.model == "unet":  # without an ATP mode and weight gradients of their own
        names = [name for name in names if name != ELASTIC and "atp" not in name]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets a program and its runs ignore it
    pool, record, started = RankPool(), Record(), time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_files(directory)
        runs = [Run(name, directory / name, name if name != ELASTIC else "grid") for name in names]
        number = 0
        while number < soak.faults and time.monotonic() - started < soak.seconds:
            run = runs[number % len(runs)]
            draw = random.Random(f"{soak.seed} {soak.model} {run.name} {number}")
            if run.name == ELASTIC:
                run.plan = draw.choice(list(PLANS))
            fault = Fault.sample(draw, PLANS[run.plan], soak.model, run.step, directory / "struck")
            words = [f"run.dir={run.directory}"]
            if fault.ends_run:
                words.append(f"train.steps={fault.step}")
            overrides = settings(soak.model, PLANS[run.plan], directory, *words)
            done = f" ({damage(run.directory, draw)})" if fault.kind == DAMAGED else ""
            problem = _suffer(pool, run, fault, overrides, record)
            saved = sorted(run.directory.glob("checkpoints/step_????????"))
            run.step = int(saved[-1].name[5:]) if saved else 0
            record.counts[f"{fault.kind}: {fault.phase}"] += 1
            where = f"{run.name}{f' on {run.plan}' if run.name == ELASTIC else ''}"
            line = f"{number}: {where}: {fault}{done}; newest checkpoint at step {run.step}"
            print(f"{line}{f'; PROBLEM: {problem}' if problem else ''}", flush=True)
            if problem:
                record.problems.append(f"seed={soak.seed} model={soak.model} {line}: {problem}")
            number += 1
        for run in runs:
            if problem := _check_losses(pool, soak, run, directory):
                record.problems.append(f"seed={soak.seed} model={soak.model} {run.name}: {problem}")
        steps = {run.name: run.step for run in runs}
    pool.close()
    _report(soak, arguments, record, steps, time.monotonic() - started)


def _report(soak: Soak, arguments: list[str], record: Record, steps: dict[str, int], seconds: float) -> None:
    times = {kind: sorted(values) for kind, values in sorted(record.seconds.items())}
    result: dict[str, Any] = {
        "command": " ".join(["python -m tests.soak", *arguments]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "faults": record.counts.total(),
        "steps": steps,
        "problems": record.problems,
        "end_s": {kind: {"median": round(median(v), 1), "max": round(v[-1], 1)} for kind, v in times.items()},
        "by_kind": dict(sorted(record.counts.items())),
        "seconds": round(seconds),
    }
    Path(soak.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    if record.problems:
        raise ConfigError(f"faults={soak.faults}: {len(record.problems)} problem(s); {soak.out} lists them")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(description)
    else:
        with one_line_errors():
            main(sys.argv[1:])
