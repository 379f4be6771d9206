"""Check 2: the host of a training step never waits for the GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch

from gpt4d.trainer import Trainer
from tests.gpu import runs
from tests.gpu.check import Check

_WARM_UP, _STEPS = 2, 3
_RUNS = {
    "dropout": ["model.dropout=0.1"],
    "documents": ["model.dropout=0.1", "model.attention_dropout=0.1", "data.reset_attention=true"],
}


@pytest.mark.gpu(number=2, part=1, limit_s=60)
def test_the_host_of_a_step_never_waits_for_the_gpu(check: Check) -> None:
    device = check.device
    model = runs.TINY_MODEL if check.rehearsal else []
    corpus = runs.write_corpus(check.directory, runs.TINY_VOCABULARY if check.rehearsal else 4096, 30_000)
    for name, overrides in _RUNS.items():
        run_dir = check.directory / name
        # Metrics are read a step later, as in training; a logged step needs its values at once.
        steps = [f"train.steps={_WARM_UP + _STEPS}", "logging.every=100", "train.precision=bf16"]
        runs.train([*model, *corpus, *overrides, *steps, f"run.dir={run_dir}"], device, _reject_synchronization)
        check.values[name] = runs.losses(run_dir)
    check.figure = f"{_STEPS} steps each with {' and '.join(_RUNS)}"


def _reject_synchronization(trainer: Trainer) -> None:
    """Make the steps after the first ones, and the reading of their metrics, raise where they wait for the GPU."""
    runs.save_only_at(None)
    if trainer.device.type == "cuda":
        with _error_mode():
            try:
                torch.ones((), device=trainer.device).item()
            except RuntimeError:
                pass
            else:
                raise AssertionError("torch does not report that item() waits for the GPU; the check shows nothing")

    def after_warm_up(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def strict(*args: Any) -> Any:
            if trainer.device.type == "cpu" or trainer.progress.step < _WARM_UP:
                return function(*args)
            with _error_mode():
                return function(*args)

        return strict

    trainer._step = after_warm_up(trainer._step)
    trainer._read = after_warm_up(trainer._read)


@contextmanager
def _error_mode() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
