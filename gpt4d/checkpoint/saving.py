"""Saving a run: in the background, if it may, and so that a crash at any instant loses nothing that was committed."""

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gpt4d.checkpoint import checkpoint_dir, storage
from gpt4d.checkpoint.sharded import Part
from gpt4d.config import CheckpointConfig, ConfigError
from gpt4d.parallel.grid import Grid
from gpt4d.runtime.consensus import all_ranks_true, run_on_rank0


@dataclass
class Saved:
    """A committed checkpoint: how far the run was, how long writing it took, how long the training stood still."""

    path: Path
    progress: checkpoint_dir.Progress
    seconds: float
    blocked_s: float


class _UnderWay(NamedTuple):
    written: Future
    copied: torch.cuda.Event | None  # by a GPU, beside its computation
    saved: Saved


class Saver:
    """Saves the checkpoints of a run, one at a time. All ranks call the same methods in the same order.

    With ``async_save`` a thread writes them, from a copy in the host's memory; its messages have a process group of
    their own. A GPU copies beside the next forward and backward: only its update waits for it.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, grid: Grid):
        self.config, self.run_dir, self.grid = config, run_dir, grid
        self._group = dist.new_group(backend="gloo")
        self._buffers: dict[str, torch.Tensor] = {}  # on the host, for every save
        self._stream, of_thread = None, {}
        if grid.device_type == "cuda":
            self._stream = torch.cuda.Stream()
            of_thread = {"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}
        self._thread = ThreadPoolExecutor(1, "checkpoint", **of_thread)
        self._under_way: _UnderWay | None = None

    def start(self, meta: checkpoint_dir.Meta, parts: Mapping[str, Part], tokenizer: bytes) -> None:
        """Starts to save. ``before_change`` says when ``parts`` may change; ``finished`` tells the end."""
        assert self._under_way is None, "one save at a time"
        started = time.perf_counter()
        copied = None
        if self.config.async_save:
            parts, copied = self._copied(parts)
        tiles = {name: (part.local, part.spec.shape, part.tile(self.grid)) for name, part in parts.items()}
        partial = run_on_rank0(lambda: self._begin(meta.progress.step))
        documents = {checkpoint_dir.META: meta.to_json(), checkpoint_dir.TOKENIZER: tokenizer}
        writer = storage.Writer(partial, documents, lambda: self._commit(partial))
        saved = Saved(partial.with_suffix(""), meta.progress, 0.0, 0.0)
        planner = storage.Planner(tiles, *([copied.synchronize] if copied else []))
        written = self._thread.submit(self._write, planner, writer, saved, started)
        self._under_way = _UnderWay(written, copied, saved)
        if not self.config.async_save:
            written.exception()
        saved.blocked_s += time.perf_counter() - started

    def before_change(self) -> None:
        """Called before every update of what is being saved: on a GPU the update waits, this thread does not."""
        if self._under_way and self._under_way.copied:
            torch.cuda.current_stream().wait_event(self._under_way.copied)

    def finished(self, wait: bool = False) -> Saved | None:
        """The save that ended since it was last asked; None while it goes on or if there is none.

        ConfigError, on all ranks alike, if it could not be written.
        """
        if self._under_way is None:
            return None
        future, saved = self._under_way.written, self._under_way.saved
        started = time.perf_counter()
        if wait:
            future.exception()
        elif not all_ranks_true(future.done()):
            return None
        saved.blocked_s += time.perf_counter() - started
        self._under_way = None
        if failure := future.exception():
            raise self._explained(failure, saved)
        return saved

    def close(self) -> None:
        """Waits for a save under way: what was begun is not lost because something else failed."""
        self._thread.shutdown()
        if self._under_way and (failure := self._under_way.written.exception()) and self.grid.world.index == 0:
            print(f"error: {self._explained(failure, self._under_way.saved)}", file=sys.stderr, flush=True)

    def _copied(self, parts: Mapping[str, Part]) -> tuple[dict[str, Part], torch.cuda.Event | None]:
        """The parts in the host's memory, and when they are there if that is not yet."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, (local, _) in parts.items():
                if name not in self._buffers:
                    self._buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
                self._buffers[name].copy_(local, non_blocking=True)
        copies = {name: Part(self._buffers[name], spec) for name, (_, spec) in parts.items()}
        return copies, self._stream and self._stream.record_event()

    def _begin(self, step: int) -> Path:
        try:
            return checkpoint_dir.begin(self.run_dir, step)
        except OSError as error:
            raise self._unwritable(checkpoint_dir.name(step), error) from None

    def _write(self, planner: storage.Planner, writer: storage.Writer, saved: Saved, started: float) -> None:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=self._group)
        saved.seconds = time.perf_counter() - started

    def _commit(self, partial: Path) -> None:
        newest = checkpoint_dir.commit(partial)
        try:
            checkpoint_dir.retain(newest, self.config.keep, self.config.keep_every)
        except OSError as error:  # the checkpoint is there all the same
            print(f"warning: {error}; an old checkpoint stays until the next is saved", file=sys.stderr, flush=True)

    def _explained(self, failure: BaseException, saved: Saved) -> BaseException:
        """What a user is told of a save that failed; its files are removed, since they may fill the disk."""
        if self.grid.world.index == 0:
            with suppress(ConfigError):  # what the user is to know is the first failure
                checkpoint_dir.remove_leftovers(self.run_dir)
        if not isinstance(failure, CheckpointException):
            return failure
        rank, (error, _) = min(failure.failures.items())
        if isinstance(error, OSError):
            return self._unwritable(saved.path.name, error, f"rank {rank}: ")
        return RuntimeError(f"{saved.path} could not be saved; rank {rank}: {error!r}").with_traceback(
            error.__traceback__
        )

    def _unwritable(self, name: str, error: OSError, where: str = "") -> ConfigError:
        newest = next(reversed(checkpoint_dir.committed(self.run_dir)), None)
        rest = f"the run can go on from {newest.name}" if newest else "there is none older to go on from"
        return ConfigError(
            f"run.dir={self.run_dir}: {name} could not be saved ({where}{error.strerror or error}); it needs room, and "
            f"a file system that all nodes share; {rest}"
        )
