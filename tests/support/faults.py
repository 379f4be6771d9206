"""Faults that tests plant in a rank before it trains, and short timeouts with which other ranks find them."""

import functools
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpt4d.config import Config
from tests.support.grids import metric_lines

# By phase: module and function in which a rank hangs, the file of its caller, and the activity that is reported.
PHASES = {
    "update": ("gpt4d.optim.optimizer", "Optimizer.step", "step.py", "reading the metrics of step 5"),
    "pending save": ("gpt4d.optim.optimizer", "Optimizer.step", "step.py", "asking whether step_00000003 is saved"),
    "save": ("gpt4d.checkpoint.storage", "write_shards", "saving.py", "saving step_00000003"),
    "begin": ("gpt4d.checkpoint.lifecycle", "begin", "saving.py", "beginning to save step 3"),
    "load": ("gpt4d.checkpoint.storage", "fill", "storage.py", "loading step_00000003"),
    "finish": (
        "gpt4d.task.language",
        "LanguageModeling.sample",
        "trainer.py",
        "(reporting the end of the run|closing the log)",
    ),
    "preflight": ("gpt4d.training.preflight", "code_hash", "preflight.py", "comparing the environments of the ranks"),
}


def at_step(step: int, act: Callable[..., object]) -> None:
    """Call ``act(profile)`` at the start of ``step``. The profile has the rank's ``stage``."""
    from gpt4d.training.profiling import Profile

    original = Profile.step

    def act_and_step(self, number):
        if number == step:
            act(self)
        return original(self, number)

    Profile.step = act_and_step


def shorten_timeouts() -> None:
    """Make the watchdog faster."""
    from gpt4d.runtime import hangs, job, watchdog

    watchdog.HEARTBEAT_S, watchdog.SILENT_AFTER_ERROR_S, job.NOTICE_S = 0.1, 0.6, 1.0
    watchdog.MIN_SILENT_S, hangs.MIN_LIMIT_S = 3.0, 3.0


def replace_function(path: str, name: str, function: Callable[..., object]) -> None:
    """Replace a function of the module ``path``, or a method: ``Class.method``."""
    *outer, name = name.split(".")
    setattr(functools.reduce(getattr, outer, importlib.import_module(path)), name, function)


def block(*_, **__) -> None:
    """Never return."""
    threading.Event().wait()


def fail(*_, **__) -> None:
    raise ValueError("the dog ate it")


def kill(number: int, *_, **__) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), number)


def signal_itself(number: int, step: int, target: int, rank: int) -> None:
    """Let rank ``target`` send itself a signal at the start of ``step``."""
    if rank == target:
        at_step(step, functools.partial(kill, number))


@dataclass
class Fault:
    """A fault of a rank, or of all ranks: the ``prepare`` of a job.

    Args:
        rank: the rank that the fault strikes. None: all ranks.
        act: replaces the function ``place``. Without a place it is called.
        place: a module and the name of a function or of a method in it.
        step: the step at whose start the rank is struck. None: before the rank trains.
        constants: values of constants on all ranks, by module and name.
        shorten: use short timeouts.
    """

    rank: int | None
    act: Callable[..., object]
    place: tuple[str, str] | None = None
    step: int | None = None
    constants: Mapping[tuple[str, str], float] = field(default_factory=dict)
    shorten: bool = True

    def __call__(self, rank: int) -> None:
        if self.shorten:
            shorten_timeouts()
        for (module, name), value in self.constants.items():
            setattr(importlib.import_module(module), name, value)
        if self.rank not in (None, rank):
            return
        strike = functools.partial(replace_function, *self.place, self.act) if self.place else self.act
        if self.step is None:
            strike()
        else:
            at_step(self.step, strike if self.place is None else lambda _: strike())


def losses(config: Config) -> list[float]:
    """Return the loss of each step; of a step repeated after a restart, the last."""
    return list({line["step"]: line["loss"] for line in metric_lines(config.run.dir)}.values())
