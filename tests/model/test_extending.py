"""The examples of docs/guides/extending.md: a layer and a model family from outside the package train on a grid."""

import re
import sys
from pathlib import Path

import pytest
import torch

from gpt4d.config import ClusterConfig, Config, GridSizes, OptimConfig, TrainConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.plan import one_stage
from gpt4d.step import TrainStep, build_stage
from tests.model.recording import collectives_of_a_step, computation_s
from tests.support.environment import REPOSITORY
from tests.support.grids import batch_part, token_loss

PAGE = REPOSITORY / "docs/guides/extending.md"
MODULES = ["mixer.py", "mixing.py"]
LENGTH, BATCH = 16, 8
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

    cluster = ClusterConfig(device="cuda", matmul_tflops=0.02, memory_gb_s=1000, operation_us=0.1)
    train = TrainConfig(seq_len=length, batch_size=BATCH, precision="fp32", compile=False)
    return Config(model=MixerConfig(**sizes), train=train, cluster=cluster)


def losses_and_norms(examples: Path, sizes: GridSizes) -> list[float]:
    grid = Grid(sizes)
    stage = build_stage(one_stage(config_of(examples), sizes), grid, torch.device("cpu"), torch.float64)
    ids = torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = tuple(batch_part(tensor, grid) for tensor in (ids, ids.roll(-1, 1), torch.arange(BATCH)))
    step = TrainStep(stage, whole_model(token_loss), OptimConfig())
    results = [step([batch], 1, BATCH * LENGTH, 1e-2) for _ in range(3)]
    return [value.item() for result in results for value in (result.loss, result.norm)]


def test_the_family_of_the_page_trains_on_a_grid_as_on_one_device(ranks, examples):
    (expected,) = ranks.run(1, losses_and_norms, examples, GridSizes())
    for found in ranks.run(8, losses_and_norms, examples, GRID):
        assert found == pytest.approx(expected, rel=1e-10)
    assert expected[4] < expected[0]


def test_its_planned_collectives_are_those_of_a_step_in_the_same_order(rank_0, examples):
    rank_0(8)
    started, planned = collectives_of_a_step(config_of(examples), GRID)
    assert started == planned


def test_its_planned_computation_takes_as_long_as_a_steps_operations(rank_0, examples):
    rank_0(8)
    planned_s, busy_s = computation_s(config_of(examples, 256, **LARGE), GRID)
    assert planned_s == pytest.approx(busy_s, rel=0.02)
