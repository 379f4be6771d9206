"""Checks 2 and 12: training steps of all families, in which the host never waits for the GPU, agree with the CPU."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from gpt4d.parallel import compile
from gpt4d.parallel.layers import float8
from gpt4d.training.trainer import Trainer
from tests.gpu import compiling, runs
from tests.gpu.check import Check, largest_difference
from tests.gpu.processes import in_process

_WARM_UP, _STEPS = 3, 3
_BOUNDS = {"loss": 1e-2, "grad_norm": 5e-2}  # relative difference to the CPU's, both in bf16


class Case(NamedTuple):
    """A training run: its overrides, and whether fused kernels are compiled."""

    overrides: list[str]
    compiled: bool = False


_DROPOUT, _DOCUMENTS = "model.dropout=0.1", "data.reset_attention=true"
_SELECTIVE = [_DOCUMENTS, "train.activation_checkpointing=selective", "train.loss_chunks=4", "optim.algorithm=muon"]
_FULL = [
    "model.attention_dropout=0.1", "train.micro_batch_size=2", "train.activation_checkpointing=full",
    "parallel.chunks=2", "parallel.cache_layers=all", "parallel.cache_scope=step",
]  # fmt: skip
OPTIONS = {
    "GPT compiled": Case([_DROPOUT], compiled=True),
    "GPT with documents, selective checkpointing, chunks of the loss, Muon": Case([_DROPOUT, *_SELECTIVE]),
    "GPT with chunks, weights cached per step, full checkpointing": Case([_DROPOUT, *_FULL]),
}
FLOAT8 = {"GPT in float8": Case(["train.precision=fp8"])}
_QWEN = ["model=llama_tiny", "model.qk_norm=true", "model.qkv_bias=true", _DOCUMENTS]
# With averaged weights, from which it draws images at the end.
_UNET = ["model=unet_tiny", "model.dropout=0.1", "logging.sample_images=2", "logging.sample_steps=4"]


@pytest.mark.gpu(number=2, part=1, limit_s=85, functions=10, work_s=20)
def test_the_host_of_a_step_never_waits_for_the_gpu(check: Check) -> None:
    # Short sequences, because the same steps take much longer on the CPU.
    text = [*runs.gpt_tiny(check, 30_000), *([] if check.rehearsal else ["train.seq_len=64"])]
    options = OPTIONS | (FLOAT8 if in_process(float8.supports, check.device) else {})
    _check(check, {name: Case([*text, *case.overrides], case.compiled) for name, case in options.items()})


@pytest.mark.gpu(number=12, part=3, limit_s=215, functions=36, work_s=20)
def test_llamas_and_unets_train_without_waits_and_recompilations(check: Check) -> None:
    qwen = [*_QWEN, *runs.small_corpus(check, 30_000), *(runs.TINY_LLAMA if check.rehearsal else [])]
    unet = [*_UNET, *runs.write_images(check.directory), *(runs.TINY_UNET if check.rehearsal else [])]
    _check(check, {"Qwen": Case(qwen, compiled=True), "U-Net": Case(unet, compiled=True)})
    check.require(bool(runs.events(_directory(check, "U-Net"), "sample")), "U-Net: no images at the end")


def _directory(check: Check, name: str) -> Path:
    return check.directory / name.replace(",", "")


def _check(check: Check, cases: Mapping[str, Case]) -> None:
    """Train each case on the device and, eager, on the CPU."""
    # A logged step needs its values at once. The values of other steps are read a step later.
    common = [f"train.steps={_WARM_UP + _STEPS}", "train.batch_size=4", "train.precision=bf16", "optim.lr=1e-3"]
    common.append("logging.every=100")
    largest = dict.fromkeys(_BOUNDS, 0.0)
    for name, case in cases.items():
        on_device, on_cpu = _directory(check, name), _directory(check, f"{name} on the CPU")
        overrides = [*common, *case.overrides]
        compiles = f"train.compile={str(case.compiled).lower()}"
        overrides_on_device = [*overrides, compiles, f"run.dir={on_device}"]
        graphs, late = runs.train(overrides_on_device, check.device, _reject_synchronization)
        runs.train([*overrides, "train.compile=false", f"run.dir={on_cpu}"], torch.device("cpu"), runs.never_save)
        check.require(late == 0, f"{name}: {late} functions are compiled after step {_WARM_UP}")
        check.require((graphs > 0) == case.compiled, f"{name}: {graphs} functions are compiled")
        actual, expected = (runs.logged_steps(run_dir)[-1] for run_dir in (on_device, on_cpu))
        check.values[name] = {"graphs": graphs, **{key: [actual[key], expected[key]] for key in _BOUNDS}}
        for key, bound in _BOUNDS.items():
            difference = largest_difference([actual[key]], [expected[key]])
            largest[key] = max(largest[key], difference)
            check.require(difference < bound, f"{name}: {key} differs from the CPU's by {difference:.1e}")
    differences = ", ".join(f"{key} within {difference:.1e}" for key, difference in largest.items())
    check.figure = f"{', '.join(cases)}: {differences} of the CPU's"


def _reject_synchronization(trainer: Trainer) -> Callable[[], tuple[int, int]]:
    """Make later steps raise where they wait for the GPU. Return a function of the numbers of all and late graphs."""
    runs.never_save(trainer)
    if trainer.device.type == "cuda":
        with _error_mode():
            try:
                torch.ones((), device=trainer.device).item()
            except RuntimeError:
                pass
            else:
                raise AssertionError("torch does not report that item() waits for the GPU; the check shows nothing")
    graphs, finish = dict[int, int](), trainer.finish  # number of compiled functions after each step

    def after_warm_up(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def strict(*args: Any) -> Any:
            graphs.setdefault(trainer.progress.step, compiling.num_graphs())
            if trainer.progress.step < _WARM_UP or trainer.device.type == "cpu":
                return function(*args)
            with _error_mode():
                return function(*args)

        return strict

    def eager_finish() -> None:
        graphs[trainer.progress.step] = compiling.num_graphs()
        compile.enabled = False  # samples have other shapes than batches
        finish()

    trainer.step = after_warm_up(trainer.step)
    trainer.read = after_warm_up(trainer.read)
    trainer.finish = eager_finish  # type: ignore[method-assign]
    return lambda: (graphs[_WARM_UP + _STEPS], graphs[_WARM_UP + _STEPS] - graphs[_WARM_UP])


@contextmanager
def _error_mode() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
