"""Golden values: losses, gradient norms and bytes of gpt_tiny on four grids, and answers of the planner.

A change that is not meant to change results must reproduce them to 1e-6; bits depend on the processor. A change that is
meant to change results records them again, with the reason in its commit: ``python -m tests.test_golden``.
"""

import json
import math
import tempfile
from pathlib import Path

import pytest

from gpt4d.config import GridSizes
from gpt4d.data.corpus import corpus
from gpt4d.model import registry  # noqa: F401 – registers the families' settings
from gpt4d.planner import tables
from gpt4d.planner.search import rank
from tests.support.environment import REPOSITORY
from tests.support.grids import full, grid_name, metric_lines, on_grid, train_in_rank
from tests.support.rank_pool import RankPool
from tests.support.settings import configured

FILES = REPOSITORY / "tests/golden"
GRIDS = [GridSizes(), GridSizes(1, 2, 1, 2), GridSizes(2, 2, 2, 1), GridSizes(2, 1, 2, 2)]
RUN = [
    "model=gpt_tiny", "model.vocab_size=4096", "optim.algorithm=adamw", "optim.lr=4e-3", "train.steps=20",
    "train.activation_checkpointing=full", "parallel.cache_layers=2", "train.micro_batch_size=1", "model.dropout=0.1",
    "model.attention_dropout=0.1", "logging.every=1", "train.validate_every=0", "train.validation_batches=0",
    "checkpoint.every=0", "logging.sample_tokens=0",
]  # fmt: skip
QUERIES = [
    "world_size=8 model=gpt_tiny model.vocab_size=4096 cluster=local optim.algorithm=adamw",
    "world_size=32 model=gpt_20b cluster=perlmutter train.activation_checkpointing=full train.batch_size=64",
    "world_size=64 model=gpt_5b cluster=perlmutter train.batch_size=512 parallel.cache_layers=5 "
    "train.activation_checkpointing=full",
    "world_size=16384 model=gpt_80b cluster=frontier train.batch_size=16384 train.activation_checkpointing=full",
    "world_size=16384 model=gpt_40b cluster=perlmutter train.batch_size=16384 optim.shard_states=true "
    "train.micro_batch_size=1 train.activation_checkpointing=full",
    "world_size=16 model=gpt_1b3 cluster=dgx_a100 train.batch_size=64 optim.shard_states=true",
]


def train(ranks, sizes: GridSizes, directory: Path) -> list[list]:
    """Loss, gradient norm and bytes per axis of each of 20 steps."""
    config = configured([*RUN, *on_grid(sizes), f"run.dir={directory / str(sizes)}", f"data.cache_dir={directory}"])
    corpus(config.data)  # prepared here: ranks of the pool may not start encoding processes
    ranks.run(sizes.devices, train_in_rank, config)
    lines = metric_lines(config.run.dir)
    return [[x["loss"], x["grad_norm"], {a: c["bytes"] for a, c in x["comm"].items()}] for x in lines]


def answer(query: str) -> list[dict]:
    """Return the planner's three best grids."""
    world_size, *overrides = query.split()
    devices = int(world_size.partition("=")[2])
    return json.loads(tables.as_json(rank(configured(overrides), devices, top=3).plans))


def assert_close(found, expected, where="") -> None:
    if isinstance(expected, dict | list):
        assert type(found) is type(expected) and len(found) == len(expected), where
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            assert_close(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-6), f"{where}: {found} is not {expected}"
    else:
        assert found == expected, where


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.mark.full
@pytest.mark.parametrize("sizes", GRIDS, ids=grid_name)
def test_gpt_tiny_computes_its_golden_losses_norms_and_bytes(ranks, sizes, directory):
    assert_close(train(ranks, sizes, directory), json.loads((FILES / "gpt_tiny.json").read_text())[str(sizes)])


@pytest.mark.parametrize("number", [0, *map(full, (1, 2, 3, 4, 5))])
def test_the_planner_gives_its_golden_answers(number):
    assert_close(answer(QUERIES[number]), json.loads((FILES / "planner.json").read_text())[number])


def record() -> None:
    (FILES / "planner.json").write_text(json.dumps([answer(query) for query in QUERIES]) + "\n")
    pool = RankPool()
    with tempfile.TemporaryDirectory() as directory:
        runs = {str(sizes): train(pool, sizes, Path(directory)) for sizes in GRIDS}
    (FILES / "gpt_tiny.json").write_text(json.dumps(runs) + "\n")
    pool.close()


if __name__ == "__main__":
    record()
