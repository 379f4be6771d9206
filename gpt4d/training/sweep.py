"""Sweeps: ``python train.py -m optim.lr=1e-3,4e-3 train.seed=0,1`` trains one job per combination, in order.

Each job is a separate process and a separate run in ``<run.dir>/<its values>``, with the same result as ``python
train.py`` with the job's overrides. A job that fails or is killed does not end the sweep. With several ranks, each
rank starts one process per job. The same command skips finished jobs and resumes unfinished ones. The tasks of a Slurm
job array share the jobs: task i of n trains jobs i, i + n, …
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpt4d.checkpoint import checkpoint_dir
from gpt4d.config import CONFIG_DIR, Config, ConfigError, compose, known_keys, value_of
from gpt4d.config.composing import expand_cluster, format_for_hydra, to_config_error
from gpt4d.data.completion import complete
from gpt4d.runs import lock
from gpt4d.runs.plots import plot_losses
from gpt4d.runs.summary import Run, State
from gpt4d.runs.tables import console, runs_table
from gpt4d.runtime import launchers
from gpt4d.runtime.files import optional_file, read_regular, replace_file
from gpt4d.runtime.launch import SWEEP_JOB, ArrayTask, Launch
from gpt4d.runtime.parent import end_with_parent
from gpt4d.runtime.signals import EXIT_CODE, stop_signals
from gpt4d.validation import validate

_MULTIRUN = {"-m", "--multirun"}
_MAX_NAME = 100  # characters; file systems allow 255 bytes
_PORT_STEP = 32  # distance between jobs' ports, since the steps of one Slurm job have consecutive ports
_SWEEP_PIPE = "GPT4D_SWEEP_PIPE"  # descriptor of a pipe that closes when the sweep ends


@dataclass(frozen=True)
class Job:
    """One combination of a sweep."""

    name: str  # of the job's directory
    overrides: list[str]  # the arguments of train.py
    swept: list[str]  # the overrides that differ between the jobs
    config: Config  # with the directory of the job

    @classmethod
    def create(cls, overrides: list[str], swept_keys: Collection[str]) -> "Job":
        """Return the job for one combination. Raises ConfigError if it cannot be composed."""
        swept = [override for override in overrides if _split(override)[0] in swept_keys]
        config = compose(overrides)
        name = job_name({key: _value(config, key, text) for key, text in map(_split, swept)})
        config.run.name, config.run.dir = f"{config.run.name}/{name}", str(Path(config.run.dir) / name)
        config = complete(config)
        own = [f"{key}={format_for_hydra(value_of(config, key))}" for key in ("run.name", "run.dir")]
        return cls(name, [*overrides, *own], swept, config)

    @property
    def directory(self) -> Path:
        return Path(self.config.run.dir)

    def is_finished(self, run: Run | None = None) -> bool:
        """Return whether the run is complete. ``run`` saves the time to read its files."""
        run, train = run or Run(self.directory), self.config.train
        if run.state is not State.FINISHED:
            return False
        if train.epochs is not None:  # the number of steps depends on the data
            return run.settings.get("train.epochs") == train.epochs
        return run.history.step >= train.steps


def requested(arguments: Sequence[str]) -> bool:
    """Return whether the arguments of train.py start a sweep, rather than print information such as ``--help``."""
    options = {argument for argument in arguments if argument.startswith("-")}
    return bool(options) and options <= _MULTIRUN


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of train.py for Hydra. A sweep is represented by its first combination."""
    if _MULTIRUN.isdisjoint(arguments):
        return expand_cluster(list(arguments))
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    options = [argument for argument in arguments if argument not in (*overrides, *_MULTIRUN)]
    return [*expand_cluster(_combinations(overrides)[0][0]), *options]


def run(arguments: Sequence[str]) -> None:
    """Train all combinations of the arguments of train.py.

    Exits with code 75 after a signal. Raises ConfigError if a combination is invalid, before any job starts, or if a
    job has failed, after all jobs.
    """
    launch, task = Launch.from_environment(), ArrayTask.from_environment()
    jobs = expand([argument for argument in arguments if argument not in _MULTIRUN], launch.world_size, task)
    program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]]
    execute(jobs, program, launch, task)


def expand(overrides: Sequence[str], world_size: int, task: ArrayTask | None = None) -> list[Job]:
    """Return one job per combination of the values of ``overrides``, in Hydra's order.

    Raises ConfigError with one line per problem of the combinations, or of the directories of the task's jobs: other
    tasks may be training in the remaining directories.
    """
    combinations, swept_keys = _combinations(overrides)
    if not swept_keys:
        raise ConfigError("-m: no key has several values; write KEY=VALUE,VALUE or leave out -m")
    jobs: dict[str, Job] = {}
    problems: dict[str, list[str]] = {}
    for number, combination in enumerate(combinations):
        swept = " ".join(override for override in combination if _split(override)[0] in swept_keys)
        try:
            job = Job.create(combination, swept_keys)
            owner = jobs.setdefault(job.name, job)
            if owner is not job:
                raise ConfigError(f"the same run as {' '.join(owner.swept)} ({job.directory}); leave one out")
            validate(job.config, world_size)
            if task is None or task.takes(number):
                lock.check_unused(job.directory)
                checkpoint_dir.check_run(job.config)
        except ConfigError as error:
            problems.setdefault(str(error), []).append(swept)
    parents = sorted({str(job.directory.parent) for job in jobs.values()})
    if len(parents) > 1:
        problem = f"run.dir={parents[0]}: another combination has {parents[1]}; set one run.name for all"
        problems[problem] = [""] * len(combinations)
    if problems:
        raise ConfigError(*(_describe(*item, len(combinations)) for item in problems.items()))
    return list(jobs.values())


def _combinations(overrides: Sequence[str]) -> tuple[list[list[str]], set[str]]:
    """Return Hydra's expansion of ``overrides``, and the keys with several values."""
    import hydra
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    try:
        with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            parsed = parser.parse_overrides(list(overrides))
            (combinations,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
            return combinations, {override.get_key_element() for override in parsed if override.is_sweep_override()}
    except Exception as error:
        raise to_config_error(error) from None


def _describe(problem: str, jobs: list[str], count: int) -> str:
    """Return one line for a problem of some of ``count`` jobs."""
    if len(jobs) >= count:
        return problem
    return f"{jobs[0]}{f' and {len(jobs) - 1} more' if len(jobs) > 1 else ''}: {problem}"


def job_name(values: Mapping[str, str]) -> str:
    """Return a file name for the values of the swept keys, such as ``lr=0.001,seed=0``.

    It contains the last part of each key, or the complete key if two keys have the same last part. Long names, and
    names with characters that are unsafe in file names, are shortened and get a checksum.
    """
    short = [key.rpartition(".")[2] for key in values]
    names = [last if short.count(last) == 1 else key for key, last in zip(values, short, strict=True)]
    text = ",".join(f"{name}={value}" for name, value in zip(names, values.values(), strict=True))
    safe = ",".join(f"{_safe(name)}={_safe(value)}" for name, value in zip(names, values.values(), strict=True))
    if safe == text and len(safe) <= _MAX_NAME:
        return safe
    return f"{safe[: _MAX_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def _value(config: Config, key: str, text: str) -> str:
    """Return the value of a key as text, such as 0.001 for 1e-3; for a group, the text of the override."""
    if key not in known_keys():
        return text.strip("'\"")
    value = value_of(config, key)
    return value if isinstance(value, str) else json.dumps(value)


class _JobProcess:
    """The process of the current job. A signal to the sweep first ends the job, which saves its state."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.signal: str | None = None

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Pass signals on to the job inside."""
        previous = {number: signal.signal(number, self._receive) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run ``command`` and return its exit code."""
        read_end, write_end = os.pipe()
        try:
            environment = {**environment, _SWEEP_PIPE: str(read_end)}
            # Ctrl-C ends a new job only through ``_receive`` until the job handles signals.
            ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
            self.process = subprocess.Popen(command, env=environment, pass_fds=[read_end], preexec_fn=ignore)
            if self.signal:  # it arrived while the process started
                self.process.terminate()
            return self.process.wait()
        finally:
            os.close(read_end)
            os.close(write_end)

    def _receive(self, number: int, _frame: Any) -> None:
        self.signal = signal.Signals(number).name
        if self.process:
            # Until the job listens to signals, it ignores SIGINT.
            self.process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)


def end_with_sweep() -> None:
    """End this process when its sweep ends. Without a sweep, do nothing."""
    if pipe := launchers.number(os.environ, _SWEEP_PIPE, 0):
        try:
            os.fstat(pipe)
        except OSError as error:
            raise ConfigError(f"{_SWEEP_PIPE}={pipe}: {error.strerror}; the sweep sets it") from None
        end_with_parent(pipe)


def execute(jobs: Sequence[Job], program: Sequence[str], launch: Launch, task: ArrayTask | None = None) -> None:
    """Run ``program`` with the overrides of each unfinished job. Rank 0 reports the results.

    Exits with code 75 after a signal. Raises ConfigError at the end if a job has failed.

    Args:
        jobs: the jobs in their order.
        program: the command line that the overrides of a job follow.
        launch: the rank of this process in the sweep.
        task: the task of a job array that this process belongs to. It runs its share of the jobs only.
    """
    own = [job for number, job in enumerate(jobs) if task is None or task.takes(number)]
    title = f"sweep of {len(jobs)} jobs"
    if task:
        title = f"array task {task.number}: {len(own)} of {len(jobs)} jobs"
        if not own:
            if not launch.rank:
                print(f"{title}; nothing to do, because the array has {task.count} tasks", flush=True)
            return
    report = None if launch.rank else _Report(jobs, shared=task is not None)
    unfinished = [job for job in own if not job.is_finished()]
    if report:
        finished = len(own) - len(unfinished)
        print(f"{title} in {report.directory}, {finished} of them finished", flush=True)
    process, codes, stopped = _JobProcess(), dict[str, int](), False
    with process.forwarding():
        for number, job in enumerate(unfinished, start=1):
            if report:
                print(f"job {number} of {len(unfinished)}: {job.name}", flush=True)
            code = process.run([*program, *job.overrides], job_environment(launch, number))
            if process.signal and code < 0 and job.is_finished():
                code = 0  # the signal arrived after the last step, while the interpreter ended
            codes[job.name] = code
            stopped = code == EXIT_CODE or process.signal is not None
            if report:
                report.write(codes)
            if stopped:
                break
        if report:
            report.show(codes)
    if stopped:
        if report:
            print(f"{process.signal or 'a signal'}: the sweep has stopped; run the same command to resume", flush=True)
        sys.exit(EXIT_CODE)
    if any(codes.values()):
        failed = [f"{name} (exit code {code})" for name, code in codes.items() if code]
        raise ConfigError(
            f"{len(failed)} of {len(own)} jobs failed: {', '.join(failed)}; run the same command to try them again"
        )


def job_environment(launch: Launch, number: int) -> dict[str, str]:
    """Return the environment of a rank of a sweep's job, so that the ranks of consecutive jobs cannot meet.

    ``number`` counts the jobs that the sweep starts, from 1.
    """
    environment = {**os.environ, SWEEP_JOB: str(number)}
    if launch.master and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        port = int(launch.master.rpartition(":")[2])
        step = _PORT_STEP if port + _PORT_STEP <= launchers.LARGEST_PORT else -_PORT_STEP
        environment |= {"MASTER_ADDR": launch.master.rpartition(":")[0], "MASTER_PORT": str(port + step * (number % 2))}
    return environment


class _Report:
    """The results of a sweep: sweep.json, sweep.png and a table. Locks the directory of the sweep.

    Raises ConfigError if another sweep uses the directory.

    Args:
        jobs: all jobs of the sweep.
        shared: the tasks of a job array use the directory. Each writes the results of all jobs.
    """

    def __init__(self, jobs: Sequence[Job], shared: bool = False):
        self.jobs, self.directory = jobs, jobs[0].directory.parent
        self.results = self.directory / "sweep.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir={self.directory}: {error.strerror}; use a writable directory") from None
        self.lock = lock.DirectoryLock(self.directory, lock.SWEEP_LOCK, shared)

    def write(self, codes: Mapping[str, int]) -> None:
        """Write sweep.json: overrides, state, losses and exit code of each job.

        ``codes`` are the exit codes of the jobs that this process has started.
        """
        with self._exclusive():
            self._write(codes)

    def show(self, codes: Mapping[str, int]) -> None:
        """Write sweep.json and sweep.png, and print a table and the job with the lowest validation loss."""
        path = self.directory / "sweep.png"
        with self._exclusive():
            runs = self._write(codes)
            curves = {name: run.history for name, run in runs.items() if run.history.training}
            if curves:
                with optional_file(path):
                    plot_losses(curves, path, title=self.directory.name)
        console().print(runs_table(list(runs.values()), {str(run.path): name for name, run in runs.items()}))
        losses = {name: run.validation_loss for name, run in runs.items() if run.validation_loss is not None}
        if losses:
            best, loss = min(losses.items(), key=lambda item: item[1])
            print(f"lowest validation loss: {loss:.4f}, {best}")
        if curves:
            print(f"loss curves: {path}, results: {self.results}", flush=True)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let one task at a time read the runs and write the results, so that the last results are complete."""
        path = self.directory / "report.lock"
        with ExitStack() as stack:
            with optional_file(path):
                stack.enter_context(lock.exclusive(path))
            yield

    def _write(self, codes: Mapping[str, int]) -> dict[str, Run]:
        """Write sweep.json, and return the jobs' runs by name."""
        known = {**self._known_codes(), **codes}
        runs = {job.name: Run(job.directory) for job in self.jobs}
        for job in self.jobs:
            run, code = runs[job.name], known.get(job.name)
            failed = code not in (None, 0, EXIT_CODE, -signal.SIGTERM)
            if failed and run.state is not State.RUNNING and not job.is_finished(run):
                run.state = State.FAILED  # the job may have failed before the run recorded a start
        entries = [
            {"job": job.name, "overrides": job.swept, **runs[job.name].to_json(), "exit_code": known.get(job.name)}
            for job in self.jobs
        ]
        with optional_file(self.results):
            replace_file(self.results, json.dumps({"jobs": entries}, indent=1) + "\n")
        return runs

    def _known_codes(self) -> dict[str, int | None]:
        """Return the exit codes of the jobs that other tasks, or earlier starts of the sweep, have recorded."""
        # None yet, or not a file of gpt4d.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return {entry["job"]: entry["exit_code"] for entry in json.loads(read_regular(self.results))["jobs"]}
        return {}
