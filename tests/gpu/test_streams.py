"""Check 13: torch's sanitizer finds no unsynchronized access of two streams to the same memory."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from gpt4d.trainer import Trainer
from tests.gpu import runs
from tests.gpu.check import Check

_STEPS, _SAVED = 4, 2


@pytest.mark.gpu(number=13, part=3, limit_s=25, work_s=20)
def test_the_sanitizer_finds_no_race_of_two_streams(check: Check) -> None:
    overrides = [
        *runs.gpt_tiny(check),
        *runs.write_corpus(check.directory, runs.TINY_VOCABULARY if check.rehearsal else 4096, 30_000),
        f"run.dir={check.directory / 'run'}",
        f"train.steps={_STEPS}",
        "train.batch_size=4",
        "train.micro_batch_size=2",
        "train.compile=false",  # the sanitizer knows torch's operations only
        f"checkpoint.every={_SAVED}",
    ]
    found = runs.train(overrides, check.device, _sanitize)
    check.require(check.rehearsal or found, "torch's sanitizer does not find a race; the check shows nothing")
    check.figure = f"{_STEPS} steps and {_STEPS // _SAVED} saves without a race"


def _sanitize(trainer: Trainer) -> Callable[[], bool]:
    """Let a step raise an error at the first unsynchronized access.

    Return a function whose result is true if the sanitizer finds a planted race of two streams.
    """
    if trainer.device.type == "cpu":
        return lambda: False
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode, CUDASanitizerErrors

    mode = CUDASanitizerDispatchMode()

    def sanitized(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def run(*args: Any) -> Any:
            with mode:
                return step(*args)

        return run

    def finds_a_race() -> bool:
        with mode, torch.cuda.stream(torch.cuda.Stream()):
            written = torch.ones(1 << 20, device=trainer.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                try:
                    written.add_(1)
                except CUDASanitizerErrors:
                    return True
        return False

    trainer._step = sanitized(trainer._step)  # type: ignore[method-assign]
    trainer.checkpoints.save = sanitized(trainer.checkpoints.save)  # type: ignore[method-assign]
    return finds_a_race
