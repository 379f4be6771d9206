"""The examples of docs/guides/extending.md: a layer and a model family from outside the package train on a grid."""

import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.laboratory.virtual_device import VirtualDevice
from gpt4d.config import ClusterConfig, Config, GridSizes, OptimConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.planner.device import Links
from gpt4d.planner.step import StepWalk
from gpt4d.step import TrainStep, build_stage
from tests.model.recording import recorded_collectives
from tests.support.fake_time import FakeTime
from tests.support.grids import batch_part, token_loss

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/extending.md"
MODULES = ["mixer.py", "mixing.py", "mixing_kernels.py"]
LENGTH, BATCH, FLOPS, LAUNCH_US = 16, 8, 2e10, 0.1
LARGE = {"hidden": 256, "vocab_size": 512, "max_positions": 256}  # sizes at which the virtual device takes time
GRID = GridSizes(2, 2, 2, 1)


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """Return the directory of the modules that the page shows."""
    directory = tmp_path_factory.mktemp("examples")
    page = PAGE.read_text(encoding="utf-8")
    for name, code in re.findall(r"\(`(\w+\.py)`\):\n\n```python\n(.*?)```", page, re.DOTALL):
        (directory / name).write_text(code)
    return directory


def test_the_page_shows_a_layer_and_a_family_that_are_short(examples):
    assert sorted(path.name for path in examples.iterdir()) == MODULES
    for name in MODULES:
        lines = [line for line in (examples / name).read_text().splitlines() if line.strip()]
        assert len(lines) <= 45, name


def config_of(examples: Path, length: int = LENGTH, **sizes: int) -> Config:
    if str(examples) not in sys.path:
        sys.path.insert(0, str(examples))
    from mixer import MixerConfig

    cluster = ClusterConfig(device="cuda", matmul_tflops=FLOPS / 1e12, memory_gb_s=1000, operation_us=LAUNCH_US)
    train = TrainConfig(seq_len=length, batch_size=BATCH, precision="fp32", compile=False)
    return Config(model=MixerConfig(**sizes), train=train, cluster=cluster)


def step_of(config: Config, sizes: GridSizes, dtype: torch.dtype) -> tuple[TrainStep, tuple]:
    grid = Grid(sizes)
    stage = build_stage(config, grid, torch.device("cpu"), dtype)
    shape = BATCH, config.train.seq_len
    ids = torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(0))
    batch = tuple(batch_part(tensor, grid) for tensor in (ids, ids.roll(-1, 1), torch.arange(BATCH)))
    return TrainStep(stage, whole_model(token_loss), OptimConfig()), batch


def losses_and_norms(examples: Path, sizes: GridSizes) -> list[float]:
    step, batch = step_of(config_of(examples), sizes, torch.float64)
    results = [step([batch], 1, BATCH * LENGTH, 1e-2) for _ in range(3)]
    return [value.item() for result in results for value in (result.loss, result.norm)]


def test_the_family_of_the_page_trains_on_a_grid_as_on_one_device(ranks, examples):
    (expected,) = ranks.run(1, losses_and_norms, examples, GridSizes())
    for found in ranks.run(8, losses_and_norms, examples, GRID):
        assert found == pytest.approx(expected, rel=1e-10)
    assert expected[4] < expected[0]


def walk_of(config: Config) -> StepWalk:
    links = Links(config.cluster, GRID)
    return StepWalk(config, registry.describe_run(config), GRID, links, BATCH // GRID.batch_shards)


def test_its_planned_collectives_are_those_of_a_step_in_the_same_order(rank_0, examples):
    rank_0(8)
    config = config_of(examples)
    step, batch = step_of(config, GRID, torch.float32)
    with recorded_collectives() as (started, planned):
        step([batch], 1, BATCH * LENGTH, 1e-2)
        walk_of(config).run(1)
    assert started == planned


def test_its_planned_computation_takes_as_long_as_a_steps_operations(rank_0, examples):
    rank_0(8)
    config = config_of(examples, 256, **LARGE)
    step, batch = step_of(config, GRID, torch.float32)
    with VirtualDevice(FLOPS, config.cluster.memory_gb_s, LAUNCH_US, source=FakeTime()) as device:
        step([batch], 1, BATCH * 256, 1e-2)
    assert walk_of(config).run(1).compute_s == pytest.approx(device.stream.busy_s, rel=0.02)
