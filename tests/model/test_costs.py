"""The planned computation of a step takes as long as its operations take a device of the same rates."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.virtual import VirtualDevice
from gpt4d.config import ClusterConfig, Config, GridSizes, OptimConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel import collectives, hosts
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers import linear
from gpt4d.parallel.traffic import Works
from gpt4d.planner.device import Links
from gpt4d.planner.step import StepWalk
from gpt4d.step import TrainStep, build_stage
from tests.fake_time import FakeTime
from tests.grids import grid_name, token_loss

FLOPS, LAUNCH_US = 2e10, 20.0
MODEL = GPT2Config(layers=2, hidden=512, heads=8, vocab_size=512, max_positions=256)
BATCH = 16
GRIDS = [GridSizes(*sizes) for sizes in ((1, 1, 1, 1), (4, 1, 2, 1), (2, 2, 2, 1), (1, 4, 2, 1), (1, 1, 1, 8))]


@pytest.fixture
def rank_0(monkeypatch):
    """Return a function that makes this process the first of some ranks, the others of which do not exist.

    Collectives return at once and compute nothing, and products are those of a GPU.
    """

    def start_process_group(world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    def exchange(full, group, size):
        return Works([], []), full.chunk(size)[:1]

    def multiply(a, b, dtype):
        return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)

    monkeypatch.setattr(hosts, "connect", lambda group: None)
    monkeypatch.setattr(collectives, "_exchange_parts", exchange)
    monkeypatch.setattr(collectives, "_add_parts", lambda received, full: received[0])
    monkeypatch.setattr(linear, "product", multiply)
    yield start_process_group
    dist.destroy_process_group()


def planned_and_busy_s(config: Config, sizes: GridSizes) -> tuple[float, float]:
    stage = build_stage(config, Grid(sizes), torch.device("cpu"), initialized=False)
    step = TrainStep(stage, token_loss, OptimConfig())
    samples = BATCH // sizes.batch_shards
    ids = torch.zeros(samples, config.train.seq_len, dtype=torch.int64)
    with VirtualDevice(FLOPS, config.cluster.memory_gb_s, LAUNCH_US, source=FakeTime()) as device:
        step([(ids, ids, torch.arange(samples))], 1, ids.numel(), 1e-3)
    walk = StepWalk(config, registry.describe(MODEL), sizes, Links(config.cluster, sizes), samples)
    return walk.run(1).compute_s, device.stream.busy_s


@pytest.mark.parametrize("memory_gb_s", [1000, 0.3], ids="memory={}".format)
@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", GRIDS, ids=grid_name)
def test_planned_computation_takes_as_long_as_a_steps_operations(
    rank_0, sizes, precision, activation_checkpointing, memory_gb_s
):
    rank_0(sizes.devices)
    cluster = ClusterConfig(matmul_tflops=FLOPS / 1e12, memory_gb_s=memory_gb_s, operation_us=LAUNCH_US)
    train = TrainConfig(
        seq_len=MODEL.max_positions,
        batch_size=BATCH,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
    )
    planned_s, busy_s = planned_and_busy_s(Config(model=MODEL, cluster=cluster, train=train), sizes)
    assert planned_s == pytest.approx(busy_s, rel=0.02)
