"""A stage fails, hangs, is signaled or has a non-finite loss: all stages end, save or skip the step together."""

import functools
import re
import signal

import pytest
import torch

from gpt4d.parallel.pipeline.runtime import LOSS, StageRuntime
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import StageTransfer
from gpt4d.parallel.resharding.transfer import Resharding
from gpt4d.runtime import watchdog
from tests.support.faults import at_step, block, fail, kill, losses, shorten_timeouts, signal_itself
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.jobs import ended_job
from tests.support.training import build_trainer

PIPELINE = "parallel.pipeline."
TWO = ("train.steps=6", PIPELINE + "stages=2", PIPELINE + "microbatches=4")
THREE = (*TWO, "model.layers=3", PIPELINE + "stages=3")


def fail_while_it_receives(rank):
    """In step 3, let stage 0 fail after it has started to receive what stage 1 never sends."""

    def act(profile):
        profile.stage.exchange.start(StageTransfer(Action("B", 0, 1), 0), None)
        fail()

    if rank == 0:
        at_step(3, act)


def fail_to_send(rank):
    """In step 3, fail to send the second microbatch to stage 1. Stage 0 waits for the gradient of the first."""
    original, calls = Resharding.run, []

    def run(self, local):
        calls.append(self.link.axis.name)
        if calls[-1] == "stage 0 to 1" and calls.count("stage 0 to 1") == 2:
            fail()
        original(self, local)

    shorten_timeouts()
    if rank == 0:
        at_step(3, lambda _: setattr(Resharding, "run", run))


@pytest.mark.parametrize(
    ("settings", "prepare"),
    [
        pytest.param(TWO, fail_while_it_receives, id="in a step, with a pending receive"),
        pytest.param(
            (*THREE, PIPELINE + "schedule=zb_h1", "parallel.timeout_s=2"), fail_to_send, id="on the thread of a link"
        ),
    ],
)
def test_an_exception_on_one_stage_ends_all_stages_with_its_message_before_they_hang(ranks, tiny, settings, prepare):
    config = tiny(*settings)
    outputs = ended_job(ranks.context, config, [1] * config.parallel.pipeline.stages, prepare).outputs()
    assert re.search(r"error: rank 0 on \S+ failed: ValueError: the dog ate it\n", outputs[0]), outputs[0]
    assert outputs[0].count("Traceback") == 1 and not any("Traceback" in output for output in outputs[1:])


def kill_the_last_stage(rank):
    """In step 5, kill rank 2. Rank 0 counts as hung what rank 1 does not send, before rank 1 has found out why."""
    shorten_timeouts()
    watchdog.SILENT_AFTER_ERROR_S = 10.0
    if rank == 2:
        at_step(5, functools.partial(kill, signal.SIGKILL))


def test_a_stage_that_is_lost_is_named_even_if_the_stage_before_it_is_late(ranks, tiny):
    config = tiny(*THREE, "parallel.timeout_s=1")
    output = "".join(ended_job(ranks.context, config, [1, 1, -signal.SIGKILL], kill_the_last_stage).outputs())
    assert re.search(r"error: (hang: .*: )?rank 2 \(stage 2\) on \S+ does not answer", output), output
    assert output.count("error:") == 1 and "rank 1" not in output.partition("error:")[2]


def block_forward(microbatch, begins, rank):
    """In step 5, let rank 0 hang in a forward of the chunk that begins the model, or of its other chunk."""
    original, forwards = StageRuntime.forward_backward, []

    def forward_backward(runtime, *arguments):
        compute = runtime.compute

        def hanging(module, part, *tensors):
            forwards.append(part.begins)
            return block() if forwards.count(begins) > microbatch else compute(module, part, *tensors)

        runtime.compute = hanging
        return original(runtime, *arguments)

    if rank == 0:
        at_step(5, lambda _: setattr(StageRuntime, "forward_backward", forward_backward))


@pytest.mark.parametrize(
    ("hang", "edge", "chunks"),
    [
        full((3, True), "stream of microbatch 3, forward from stage 0 to stage 1", ()),
        (
            (1, False),
            "stream of microbatch 1, forward from chunk 1 of stage 0 to chunk 1 of stage 1",
            ("model.layers=4", PIPELINE + "schedule=interleaved_1f1b", PIPELINE + "chunks_per_stage=2"),
        ),
    ],
)
def test_a_hang_is_reported_with_stages_edge_microbatch_and_missing_rank(ranks, tiny, hang, edge, chunks):
    config = tiny(*TWO, *chunks, "parallel.timeout_s=1")
    output = ended_job(ranks.context, config, [1, 1], functools.partial(block_forward, *hang)).outputs()[0]
    message = rf"hang: rank 1 \(stage 1\) on \S+ waited \d+ s \(parallel.timeout_s\) for {edge}: rank 0 \(stage 0\) on"
    assert re.search(rf"error: {message} \S+ has not started it and is in runtime.py:\d+ \(_forward\)", output), output


@pytest.mark.parametrize(("number", "target"), [full(signal.SIGUSR1, 0), (signal.SIGTERM, 1)])
def test_a_signal_to_a_rank_of_one_stage_saves_all_stages(ranks, tiny, tmp_path, number, target):
    uninterrupted, config = tiny(*TWO, f"run.dir={tmp_path / 'uninterrupted'}"), tiny(*TWO)
    ranks.run(2, train_in_rank, uninterrupted)
    job = ended_job(ranks.context, config, [75, 75], functools.partial(signal_itself, number, 3, target))
    (stopped,) = job.events("signal")
    assert 3 <= stopped["step"] <= 5
    ranks.run(2, train_in_rank, config)
    assert losses(config) == losses(uninterrupted)


def train_with_a_nan(config):
    """On a rank: train with a loss of step 3 that is not a number. Return the weight of embedding and head."""
    trainer = build_trainer(config)
    compute = trainer.train_step.runtime.compute

    def broken(*arguments):
        produced = compute(*arguments)
        broken_step = LOSS in produced and trainer.progress.step == 2
        return {LOSS: produced[LOSS] * torch.nan} if broken_step else produced

    trainer.train_step.runtime.compute = broken
    trainer.run()
    return dict(trainer.stage.module.named_parameters())["tokens.weight"].detach()


def test_a_nan_on_the_last_stage_skips_the_step_on_all_stages_as_one_stage_does(ranks, tiny, tmp_path):
    serial, config = tiny("train.steps=6", f"run.dir={tmp_path / 'serial'}"), tiny(*TWO)
    (expected,) = ranks.run(1, train_with_a_nan, serial)
    owned, copied = ranks.run(2, train_with_a_nan, config)
    assert torch.equal(owned, copied) and torch.allclose(owned, expected, rtol=1e-4)
    steps = {run.run.dir: metric_lines(run.run.dir) for run in (serial, config)}
    for lines in steps.values():
        assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 1, 1] and lines[2]["loss"] is None
    serial_losses, pipeline_losses = ([line["loss"] for line in lines if line["loss"]] for lines in steps.values())
    assert pipeline_losses == pytest.approx(serial_losses, rel=1e-5)
