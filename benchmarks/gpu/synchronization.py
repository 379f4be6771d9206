"""Check 2: the host of a training step never waits for the GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from benchmarks.gpu import runs
from benchmarks.gpu.check import CheckContext, Outcome
from benchmarks.gpu.timing import device_of
from gpt4d.trainer import Trainer

_WARM_UP, _STEPS = 2, 3
_RUNS = {
    "dropout": ["model.dropout=0.1"],
    "documents": ["model.dropout=0.1", "model.attention_dropout=0.1", "data.reset_attention=true"],
}


def check(context: CheckContext) -> Outcome:
    device, outcome = device_of(context.device_type), Outcome()
    model = runs.TINY_MODEL if context.rehearsal else []
    corpus = runs.write_corpus(context.directory, runs.TINY_VOCABULARY if context.rehearsal else 4096, 30_000)
    for name, overrides in _RUNS.items():
        run_dir = context.directory / name
        # Metrics are read a step later, as in training; logging a step would need its values at once.
        steps = [f"train.steps={_WARM_UP + _STEPS}", "logging.every=100", "train.precision=bf16"]
        runs.train([*model, *corpus, *overrides, *steps, f"run.dir={run_dir}"], device, _reject_synchronization)
        outcome.values[name] = runs.losses(run_dir)
    outcome.figure = f"{_STEPS} steps each with {' and '.join(_RUNS)}"
    return outcome


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
