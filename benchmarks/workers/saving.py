"""A state of matrices cut by rows over four ranks: written and read in turns, by us and by others."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from benchmarks.interleave import redirect_stdout_for_answers, serve
from gpt4d.checkpoint import checkpoint_dir, sharded, verifying
from gpt4d.checkpoint.saving import Saver
from gpt4d.checkpoint.sharded import Part
from gpt4d.config import CheckpointConfig, GridSizes, ModelConfig, from_arguments
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.weights import ParameterSpec
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch

RANKS = 4
ROWS, COLUMNS = Layout(("z",), ()), Layout((), ("x",))


@dataclass
class State:
    mib: int = 2048  # of all ranks together
    side: int = 4096  # of the square matrices
    where: str = "."  # a directory on the disk to measure


def parts_of(state: State, layout: Layout, grid: Grid) -> dict[str, Part]:
    """float32 matrices as ``layout`` has them, each rank's part of its own values."""
    spec = ParameterSpec((state.side, state.side), layout)
    shape = grid.local_shape(spec.shape, layout)
    count = (state.mib << 20) // (4 * state.side**2)
    return {f"model.{n}": Part(torch.randn(shape), spec) for n in range(count)}


class Saving:
    """Each method is one turn: what is timed. What it returns clears up."""

    def __init__(self, state: State):
        self.rows_grid, self.columns_grid = Grid(GridSizes(z=RANKS)), Grid(GridSizes(x=RANKS))
        self.rows = parts_of(state, ROWS, self.rows_grid)
        self.columns = parts_of(state, COLUMNS, self.columns_grid)
        mesh = self.rows_grid.mesh["z"]
        self.dtensors = {name: DTensor.from_local(p.local, mesh, [Shard(0)]) for name, p in self.rows.items()}
        self.rank = self.rows_grid.world.index
        self.home = Path(state.where)
        self.savers = {
            name: Saver(CheckpointConfig(async_save=name == "async", keep=10), self.home / name, self.rows_grid)
            for name in ("sync", "async", "load")
        }
        self.step = 0
        self.start("load")
        self.source = self.savers["load"].finished(wait=True).path

    def start(self, name: str) -> None:
        self.step += 1
        meta = checkpoint_dir.Meta(checkpoint_dir.Progress(self.step), ModelConfig(), {}, "", "")
        self.savers[name].start(meta, self.rows, b"{}")

    def save(self) -> Callable[[], dict]:
        self.start("sync")
        return self.removed("sync")

    def save_in_background(self) -> Callable[[], dict]:
        self.start("async")
        self.savers["async"].before_change()
        return self.removed("async")

    def removed(self, name: str) -> Callable[[], dict]:
        def after() -> dict:
            saved = self.savers[name].finished(wait=True)
            if self.rank == 0:
                shutil.rmtree(saved.path)
            return {"until_committed_s": saved.seconds}

        return after

    def raw(self) -> Callable[[], dict]:
        with open(self.own("raw"), "wb", buffering=0) as file:
            for part in self.rows.values():
                file.write(part.local.numpy().data.cast("B"))
            os.fsync(file.fileno())
        return self.unlinked("raw")

    def torch_save(self) -> Callable[[], dict]:
        with open(self.own("torch"), "wb") as file:
            torch.save({name: part.local for name, part in self.rows.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        return self.unlinked("torch")

    def own(self, name: str) -> Path:
        return self.home / f"{name}{self.rank}"

    def unlinked(self, name: str) -> Callable[[], dict]:
        def after() -> dict:
            self.own(name).unlink()
            return {}

        return after

    def dcp_save(self) -> Callable[[], dict]:
        self.step += 1
        directory = self.home / f"dcp{self.step}"
        dcp.save(self.dtensors, checkpoint_id=directory)

        def after() -> dict:
            if self.rank == 0:
                shutil.rmtree(directory)
            return {}

        return after

    def load(self) -> Callable[[], dict]:
        return self.filled(self.rows, self.rows_grid)

    def load_resharded(self) -> Callable[[], dict]:
        return self.filled(self.columns, self.columns_grid)

    def filled(self, parts: dict[str, Part], grid: Grid) -> Callable[[], dict]:
        files = verifying.verify_files(self.source, self.rank, RANKS)
        dist.barrier()  # each has read its share, and all of it is whole
        sharded.fill(parts, files, grid)
        return dict

    def turns(self) -> dict[str, Callable]:
        return {
            "save": self.save,
            "save in the background": self.save_in_background,
            "load": self.load,
            "load, rows to columns": self.load_resharded,
            "raw write and fsync": self.raw,
            "torch.save and fsync": self.torch_save,
            "torch.distributed.checkpoint": self.dcp_save,
        }


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    config = from_arguments(State, sys.argv[1:])
    with process_group(Launch.from_environment(), torch.device("cpu")):
        serve(Saving(config).turns(), answers)
