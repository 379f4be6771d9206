"""The collectives and the computation of a step of rank 0, and those that are planned for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from benchmarks.laboratory.virtual_device import VirtualDevice
from gpt4d.config import Config, GridSizes, OptimConfig
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.plan import one_stage
from gpt4d.planner.device import KINDS, Device, sent_bytes
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.topology import ALL_TO_ALL
from gpt4d.step import TrainStep, build_stage
from tests.support.fake_time import FakeTime
from tests.support.grids import token_loss


def squared_error(module: torch.nn.Module, batch: tuple) -> torch.Tensor:
    *inputs, targets = batch
    return (module(*inputs) - targets).square().sum()


def step_of(config: Config, sizes: GridSizes):
    """Return a function that trains rank 0 for a step, and one that plans the step."""
    model, train = config.model, config.train
    pictures = isinstance(model, UNetConfig)
    stage = build_stage(one_stage(config, sizes), Grid(sizes), torch.device("cpu"), initialized=False)
    loss = whole_model(squared_error if pictures else token_loss)
    step = TrainStep(stage, loss, OptimConfig(), config.parallel.overlap.data)
    share = train.batch_size // sizes.batch_shards
    size = train.micro_batch_size or share
    ids = torch.arange(size)
    if pictures:
        images = torch.zeros(size, model.image_size, model.image_size, model.image_channels)
        batch = images, ids, ids, images
    else:
        tokens = torch.zeros(size, train.seq_len, dtype=torch.int64)
        batch = tokens, tokens, ids
    count, estimate = share // size, Estimate(config, sizes)
    blocks = estimate.description.blocks
    return lambda: step([batch] * count, count, share, 1e-3), lambda: estimate.walk(size, blocks).run(count)


def computation_s(config: Config, sizes: GridSizes) -> tuple[float, float]:
    """Return the planned seconds of a step's computation, and those on a virtual device with the cluster's rates."""
    cluster, (step, planned) = config.cluster, step_of(config, sizes)
    rates = cluster.matmul_tflops * 1e12, cluster.memory_gb_s, cluster.operation_us
    with VirtualDevice(*rates, source=FakeTime()) as device:
        step()
    return planned().compute_s, device.stream.busy_s


def collectives_of_a_step(config: Config, sizes: GridSizes) -> tuple[list, list]:
    """Return (kind, axis, bytes) of each collective that a step starts, and of each that is planned."""
    step, planned_step = step_of(config, sizes)
    with recorded_collectives() as (started, planned):
        step()
        planned_step()
    return started, planned


@contextmanager
def recorded_collectives() -> Iterator[tuple[list, list]]:
    """Record (kind, axis, bytes) of each collective that is started, and of each that is planned, in their order."""
    started, planned = [], []

    def recorded(kind, start):
        def record(axis, tensor, *rest, **options):
            if axis.size > 1:
                started.append((kind, axis.name, sent_bytes(kind, axis.size, tensor.nbytes)))
            return start(axis, tensor, *rest, **options)

        return record

    start_exchange = Axis.start_all_to_all

    def exchange(axis, sent, sent_rows, received_rows):
        if axis.size > 1:
            others = len(sent) - sent_rows[axis.index]
            started.append((ALL_TO_ALL, axis.name, sent[:1].nbytes * others))
        return start_exchange(axis, sent, sent_rows, received_rows)

    class RecordingDevice(Device):
        def start(self, kind, axis, nbytes, *received):
            if self.links.sizes[axis] > 1:
                planned.append((kind, axis, sent_bytes(kind, self.links.sizes[axis], nbytes)))
            return super().start(kind, axis, nbytes, *received)

    patches = {f"start_{kind}": recorded(kind, getattr(Axis, f"start_{kind}")) for kind in KINDS}
    patches["start_all_to_all"] = exchange
    with patch.multiple(Axis, **patches), patch("gpt4d.planner.step.Device", RecordingDevice):
        yield started, planned
