"""Time of saving and loading, compared with a plain write, torch.save and torch.distributed.checkpoint.

    python -m benchmarks checkpoint [mib=2048] [ranks=4] [where=.] [repeats=5] [out=benchmarks/results/checkpoint]

The ranks, all on this machine, hold ``mib`` MiB of matrices, split by rows. The operations alternate in one run. The
time of ``save in the background`` is the time for which training waits. A load verifies all checksums first and reads
from the page cache. ``where`` is a directory on the disk to measure.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import report
from benchmarks.cluster import LocalHost
from benchmarks.driver import print_rows
from benchmarks.interleave import WorkerSpec, interleave
from benchmarks.settings import WorkerSettings, arguments_of
from benchmarks.worker import Contender
from gpt4d.checkpoint import checkpoint_dir, storage
from gpt4d.checkpoint.saving import Saver
from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import CheckpointConfig, GridSizes
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout, ParameterSpec

PACKAGES = ("torch",)
ROWS, COLUMNS = Layout(("z",), ()), Layout((), ("x",))


@dataclass
class SavingSettings(WorkerSettings):
    mib: int = 2048  # size of all matrices over all ranks
    side: int = 4096  # rows and columns of each matrix
    where: str = "."  # directory on the disk to measure


@dataclass
class Settings(SavingSettings):
    ranks: int = 4
    repeats: int = 5
    out: str = "benchmarks/results/checkpoint"


def run(settings: Settings) -> Iterator[dict]:
    with tempfile.TemporaryDirectory(dir=settings.where, prefix="benchmark-") as directory:
        arguments = arguments_of(settings, SavingSettings, where=directory)
        rows = interleave(
            LocalHost(settings.ranks), [WorkerSpec("ours", __name__, "saving", "torch", arguments)], settings.repeats
        )
    seconds = {row["name"]: row["median_s"] for row in rows}
    for row in rows:
        if row["name"].startswith("torch."):
            row["family"], _, row["name"] = row["name"].partition(".")
        elif row["name"].startswith("raw"):
            row["family"] = "plain"
    print_rows(rows)
    ratios = {
        "raw / save": seconds["raw write and fsync"] / seconds["save"],
        "waiting for a save in the background / save": seconds["save in the background"] / seconds["save"],
        "load, rows to columns / load": seconds["load, rows to columns"] / seconds["load"],
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    yield {"mib": settings.mib, "ratios": ratios, "rows": rows}


def plot(settings: Settings, results: dict) -> Any:
    return report.bars(results["rows"], f"{settings.mib} MiB on {settings.ranks} ranks, float32 matrices split by rows")


def random_shards(config: SavingSettings, layout: Layout, grid: Grid) -> dict[str, LocalShard]:
    """Return this rank's shards of random float32 matrices in ``layout``."""
    spec = ParameterSpec((config.side, config.side), layout)
    shape = grid.local_shape(spec.shape, layout)
    count = (config.mib << 20) // (4 * config.side**2)
    return {f"model.{n}": LocalShard(torch.randn(shape), spec) for n in range(count)}


class Saving:
    """The operations to time. Each returns a function that removes its files and returns the rest of the answer."""

    def __init__(self, config: SavingSettings):
        self.ranks = dist.get_world_size()
        self.rows_grid, self.columns_grid = Grid(GridSizes(z=self.ranks)), Grid(GridSizes(x=self.ranks))
        self.rows = random_shards(config, ROWS, self.rows_grid)
        self.columns = random_shards(config, COLUMNS, self.columns_grid)
        mesh = init_device_mesh("cpu", (self.ranks,))
        self.dtensors = {name: DTensor.from_local(shard.local, mesh, [Shard(0)]) for name, shard in self.rows.items()}
        self.rank = self.rows_grid.world.index
        self.directory = Path(config.where)
        self.savers = {
            name: Saver(CheckpointConfig(async_save=name == "async", keep=10), self.directory / name, self.rows_grid)
            for name in ("sync", "async", "load")
        }
        self.step = 0
        self.start_saving("load")
        self.source = self.savers["load"].finished(wait=True).path

    def start_saving(self, name: str) -> None:
        self.step += 1
        family = registry.get("gpt2")  # The tensors belong to no model, so any family works.
        meta = checkpoint_dir.Meta(checkpoint_dir.Progress(self.step), family.config(vocab_size=1), [], family.task, {})
        self.savers[name].start(meta, self.rows, {})

    def save(self) -> Callable[[], dict]:
        self.start_saving("sync")
        return self.checkpoint_cleanup("sync")

    def save_in_background(self) -> Callable[[], dict]:
        self.start_saving("async")
        self.savers["async"].before_change()
        return self.checkpoint_cleanup("async")

    def checkpoint_cleanup(self, name: str) -> Callable[[], dict]:
        def clean_up() -> dict:
            saved = self.savers[name].finished(wait=True)
            if self.rank == 0:
                shutil.rmtree(saved.path)
            return {"until_committed_s": saved.seconds}

        return clean_up

    def raw_write(self) -> Callable[[], dict]:
        with open(self.rank_file("raw"), "wb", buffering=0) as file:
            for shard in self.rows.values():
                file.write(shard.local.numpy().data.cast("B"))
            os.fsync(file.fileno())
        return self.file_cleanup("raw")

    def torch_save(self) -> Callable[[], dict]:
        with open(self.rank_file("torch"), "wb") as file:
            torch.save({name: shard.local for name, shard in self.rows.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        return self.file_cleanup("torch")

    def rank_file(self, name: str) -> Path:
        return self.directory / f"{name}{self.rank}"

    def file_cleanup(self, name: str) -> Callable[[], dict]:
        def clean_up() -> dict:
            self.rank_file(name).unlink()
            return {}

        return clean_up

    def dcp_save(self) -> Callable[[], dict]:
        self.step += 1
        directory = self.directory / f"dcp{self.step}"
        dcp.save(self.dtensors, checkpoint_id=directory)

        def clean_up() -> dict:
            if self.rank == 0:
                shutil.rmtree(directory)
            return {}

        return clean_up

    def load(self) -> Callable[[], dict]:
        return self.verify_and_fill(self.rows, self.rows_grid)

    def load_resharded(self) -> Callable[[], dict]:
        return self.verify_and_fill(self.columns, self.columns_grid)

    def verify_and_fill(self, shards: dict[str, LocalShard], grid: Grid) -> Callable[[], dict]:
        checkpoint = checkpoint_dir.Checkpoint(self.source)
        storage.verify_files(checkpoint, self.rank, self.ranks)
        dist.barrier()  # Loading starts once every rank has verified its share.
        storage.fill(shards, checkpoint.files, grid)
        return dict

    def contenders(self) -> dict[str, Contender]:
        steps = {
            "save": self.save,
            "save in the background": self.save_in_background,
            "load": self.load,
            "load, rows to columns": self.load_resharded,
            "raw write and fsync": self.raw_write,
            "torch.save and fsync": self.torch_save,
            "torch.distributed.checkpoint": self.dcp_save,
        }
        return {name: Contender(step) for name, step in steps.items()}


def saving(settings: SavingSettings, device: None) -> dict[str, Contender]:
    return Saving(settings).contenders()
