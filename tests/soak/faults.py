"""The faults of the soak: their kinds, the phase of a run that they strike, and the expected end of the job."""

import errno
import functools
import importlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.soak.plans import SoakPlan, phases_of
from tests.support.faults import at_step, shorten_timeouts

# Where each phase is: a module, and a function or a method in it.
_START = {
    "preflight": "gpt4d.training.preflight:compute",
    "resume": "gpt4d.checkpoint.run:RunCheckpoints.resume",
    "load": "gpt4d.checkpoint.storage:fill",
}
_STEP = {
    "forward": "gpt4d.parallel.pipeline.runtime:_Step._forward",
    "backward": "gpt4d.parallel.pipeline.runtime:_Step._backward",
    "reduce": "gpt4d.parallel.gradient_reducer:GradientReducer.finish",
    "update": "gpt4d.optim.optimizer:Optimizer.step",
    "measure": "gpt4d.training.measuring:StepMeter.measure",
    "evaluate": "gpt4d.step:TrainStep.evaluate",
    "next step": "gpt4d.training.trainer:Trainer.step",
}
_SOME_PLANS = {
    "gather": "gpt4d.parallel.sharded_weights:ShardedWeights.gather",
    "transfer": "gpt4d.parallel.resharding.transfer:Resharding.run",
    "copy": "gpt4d.parallel.pipeline.stage_links:Exchange.start_weight",
    "weight_gradients": "gpt4d.parallel.pipeline.runtime:_Step._weight_gradients",
}
_SAVE = {
    "save": "gpt4d.checkpoint.storage:write_shards",
    "copy to host": "gpt4d.checkpoint.saving:Saver.start",
}
_RANK_0 = {
    "begin save": "gpt4d.checkpoint.lifecycle:begin",
    "commit": "gpt4d.checkpoint.lifecycle:commit",
    "prune": "gpt4d.checkpoint.lifecycle:_remove",
    "log": "gpt4d.runtime.files:LineLog._open",
}
_END = {"finish": "gpt4d.training.trainer:Trainer.finish", "plot": "gpt4d.runs.logger:plot_losses"}
_HARMLESS = ("log", "prune", "plot")  # phases in which a full disk ends no run
_PLACES = _START | _STEP | _SOME_PLANS | _SAVE | _RANK_0 | _END
LAUNCHER = "launcher"  # the agent of torchrun is struck, at any time

KILLED, STOPPED, HUNG, RAISED, SIGNALED, TWICE = "killed", "stopped", "hung", "raised", "signaled", "signaled twice"
FULL, SLOW_SAVE, DAMAGED = "disk full", "raised in a slow save", "damaged checkpoint"
_ANYWHERE = (KILLED, STOPPED, HUNG, RAISED)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Fault:
    """A fault that one rank suffers from a step on, at the ``call``-th time that it reaches a phase."""

    kind: str
    phase: str
    rank: int
    step: int
    call: int = 1
    signal: int = 0
    path: Path = Path()  # where the struck rank writes the time

    @classmethod
    def sample(cls, draw: random.Random, plan: SoakPlan, model: str, step: int, path: Path) -> "Fault":
        """Draw a fault that strikes within the steps that follow ``step``."""
        kind = draw.choice((*_ANYWHERE, *_ANYWHERE, SIGNALED, TWICE, FULL, SLOW_SAVE, DAMAGED))
        own = phases_of(plan, model)
        in_steps = [*_STEP, *own, *own]
        launcher = [LAUNCHER] if kind in (KILLED, STOPPED, SIGNALED) else []
        anywhere = [*in_steps, *_START, *_SAVE, *_RANK_0, *_END] if kind in _ANYWHERE else in_steps
        some = {FULL: ["save", "begin save", *_HARMLESS], SLOW_SAVE: ["save"], DAMAGED: ["resume"]}
        phases = some.get(kind, [*anywhere, *launcher])
        phase = draw.choice([phase for phase in phases if step or phase != "load"])
        rank = 0 if phase in _RANK_0 or phase == "plot" else draw.choice(plan.ranks_of(phase))
        call = draw.randint(1, 3) if phase in (*_STEP, *own) else 1
        return cls(kind, phase, rank, step + draw.randint(2, 8), call, draw.choice(_SIGNALS), path)

    def __str__(self) -> str:
        name = f" by {signal.Signals(self.signal).name}" if self.kind in (SIGNALED, TWICE) else ""
        if self.phase == LAUNCHER:
            return f"torchrun {self.kind}{name} at step {self.step}"
        return f"rank {self.rank} {self.kind}{name} in {self.phase}, call {self.call} from step {self.step} on"

    @property
    def ends_run(self) -> bool:
        """Whether the run has its last step when it is struck."""
        return self.phase in _END

    @property
    def is_harmless(self) -> bool:
        """Whether the run continues."""
        return (self.kind == FULL and self.phase in _HARMLESS) or (self.kind == RAISED and self.phase == "plot")

    def prepare(self, rank: int) -> None:
        """Arm the fault on a rank, before it trains."""
        prepare_rank()
        if self.kind == DAMAGED:
            at_step(self.step, lambda _: os.kill(os.getpid(), signal.SIGTERM))
            return
        if self.is_harmless and rank == self.rank:
            at_step(self.step + 4, lambda _: os.kill(os.getpid(), signal.SIGTERM))
        if rank == self.rank:
            if self.phase in _START:
                self._arm()
            else:
                at_step(self.step, lambda _: self._arm())
        elif self.kind == SLOW_SAVE and rank == (self.rank + 1) % 2:
            at_step(self.step + 1, _fail)

    def _arm(self) -> None:
        module, _, names = _PLACES[self.phase].partition(":")
        *path, name = names.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(module))
        original, calls = getattr(owner, name), [0]

        def struck(*arguments, **options):
            calls[0] += 1
            if calls[0] == self.call:
                self._strike()
            return original(*arguments, **options)

        setattr(owner, name, struck)

    def _strike(self) -> None:
        self.path.write_text(str(time.time()))
        match self.kind:
            case "killed" | "stopped":
                os.kill(os.getpid(), signal.SIGKILL if self.kind == KILLED else signal.SIGSTOP)
            case "signaled":
                os.kill(os.getpid(), self.signal)
            case "raised":
                _fail()
            case "disk full":
                code = random.Random(self.step).choice((errno.ENOSPC, errno.EIO))
                raise OSError(code, os.strerror(code), "a file")
            case "raised in a slow save":
                time.sleep(4.0)
            case "hung" | "signaled twice":
                threading.Event().wait()

    @property
    def number(self) -> int:
        """The signal that strikes torchrun."""
        return {KILLED: signal.SIGKILL, STOPPED: signal.SIGSTOP}.get(self.kind, self.signal)

    def problem(self, codes: Sequence[int], outputs: Sequence[str]) -> str:
        """Return a problem with the end of the job, or an empty text."""
        text = "".join(outputs)
        errors = [line for line in text.splitlines() if line.startswith("error:")]
        found = {"a raw message of gloo": "GLHF" in text}
        if self.phase == LAUNCHER:
            # torchrun passes all signals but this one on to its ranks.
            expected_errors = 0 if self.kind == SIGNALED and self.signal != signal.SIGUSR1 else 1
            found[f"{len(errors)} error lines"] = len(errors) != expected_errors
            found["no launcher in the error"] = not all("torchrun" in line for line in errors)
        elif self.is_harmless:
            end = 0 if self.ends_run else 75
            warnings = len(re.findall("^warning: (?!tensorboard)", text, re.MULTILINE))
            found[f"exit codes {codes}, not {end}"] = set(codes) != {end}
            found[f"{len(errors)} error lines"] = bool(errors)
            found[f"{warnings} warnings"] = warnings != 1
        elif self.kind in (SIGNALED, TWICE, DAMAGED):
            found[f"exit codes {codes}, not 75"] = set(codes) != {75}
            found["an error line after a signal"] = bool(errors)
        else:
            expected = [1] * len(codes)
            if self.kind in (KILLED, STOPPED):
                expected[self.rank] = -signal.SIGKILL
            found[f"exit codes {codes}, not {expected}"] = list(codes) != expected
            found[f"{len(errors)} error lines"] = len(errors) != 1
            if self.kind != FULL:
                named = f"rank {self.rank if self.kind != SLOW_SAVE else (self.rank + 1) % 2} "
                found[f"no {named}in the error"] = not any(named in line for line in errors)
        if self.kind not in (RAISED, SLOW_SAVE) and self.phase != LAUNCHER:  # torchrun prints one
            found["a traceback"] = "Traceback" in text
        return "; ".join(problem for problem, present in found.items() if present)


def _fail(*_: object) -> None:
    raise ValueError("a fault")


def prepare_rank() -> None:
    """Make the watchdog faster, also in the first steps, and the tracker fail in every fifth step."""
    from gpt4d.runtime import hangs
    from gpt4d.trackers.backends import TensorBoardTracker

    shorten_timeouts()
    hangs.STARTUP_S = 8.0
    original = TensorBoardTracker.scalars

    def scalars(self, values, step):
        if step % 5 == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        original(self, values, step)

    TensorBoardTracker.scalars = scalars  # type: ignore[method-assign]


def damage(run_dir: Path, draw: random.Random) -> str:
    """Damage a file of the newest checkpoint: flip a bit, truncate it or remove it. Return a description."""
    newest = max(run_dir.glob("checkpoints/step_????????"), default=None)
    if newest is None or len(list(run_dir.glob("checkpoints/step_????????"))) < 2:
        return "nothing"
    file = draw.choice(sorted(path for path in newest.iterdir() if path.is_file()))
    kind = draw.choice(("flip", "truncate", "remove"))
    data = bytearray(file.read_bytes())
    if kind == "remove" or not data:
        file.unlink()
    elif kind == "truncate":
        file.write_bytes(data[: draw.randrange(len(data))])
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
    return f"{kind} {newest.name}/{file.name}"
