"""Saving checkpoints, optionally in the background. A crash at any instant loses no committed checkpoint."""

import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from gpt4d.checkpoint import checkpoint_dir, lifecycle
from gpt4d.checkpoint.host_memory import HostMemory
from gpt4d.checkpoint.storage import LocalShard
from gpt4d.checkpoint.writer import SavePlanner, Writer
from gpt4d.config import CheckpointConfig, ConfigError
from gpt4d.parallel.grid import Grid
from gpt4d.runtime import gpu
from gpt4d.runtime.activity import MAIN, SAVE
from gpt4d.runtime.consensus import all_ranks_true, run_on_rank0


@dataclass
class Saved:
    """A committed checkpoint: its progress, the time it took to write, and for how long training was blocked."""

    path: Path
    progress: checkpoint_dir.Progress
    seconds: float
    blocked_s: float
    best: Path | None = None  # the best checkpoint after this save, on rank 0


class _PendingSave(NamedTuple):
    written: Future
    copied: torch.cuda.Event | None  # recorded after a GPU's copies to the host
    saved: Saved


class Saver:
    """Saves the checkpoints of a run, one at a time. All ranks call the same methods in the same order.

    With ``async_save``, a thread with its own process group writes from a copy in host memory. A GPU copies during the
    next forward and backward passes; only its next update waits for the copy.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, grid: Grid, timeout: timedelta | None = None):
        """Create the saving thread and its process group. ``timeout``: None for torch's default."""
        self.config, self.run_dir, self.grid = config, run_dir, grid
        with MAIN.begin("connecting the threads that save checkpoints") as activity, activity.waiting():
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        on_gpu = grid.device_type != "cpu"
        self._host_memory = HostMemory(pinned=on_gpu)  # reused by every save
        self._stream = torch.cuda.Stream() if on_gpu else None
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._thread = ThreadPoolExecutor(1, "checkpoint", gpu.select, (device,))
        self._pending: _PendingSave | None = None

    def start(
        self, meta: checkpoint_dir.Meta, shards: Mapping[str, LocalShard], documents: Mapping[str, bytes]
    ) -> None:
        """Start to save ``shards`` (``storage.parts``) and ``documents``, additional files as contents by name.

        Call ``before_change`` before ``shards`` change, and ``finished`` to learn whether the save has ended.
        """
        assert self._pending is None, "one save at a time"
        started = time.perf_counter()
        copied = None
        if self.config.async_save:
            shards, copied = self._copy_to_host(shards)
        values = {
            name: (shard.stored(self.grid), shard.spec.stored_shape, shard.region(self.grid))
            for name, shard in shards.items()
        }
        step = meta.progress.step
        partial = Path(run_on_rank0(lambda: str(self._begin(step)), f"beginning to save step {step}"))
        extra = [name.removeprefix("extra.") for name in shards if name.startswith("extra.")]
        documents = {**documents, checkpoint_dir.META: replace(meta, extra=extra).to_json()}
        saved = Saved(partial.with_suffix(""), meta.progress, 0.0, 0.0)
        writer = Writer(partial, documents, lambda: self._commit(partial, saved))
        planner = SavePlanner(values, *([copied.synchronize] if copied else []))
        written = self._thread.submit(self._write, planner, writer, saved, started)
        self._pending = _PendingSave(written, copied, saved)
        if not self.config.async_save:
            written.exception()
        saved.blocked_s += time.perf_counter() - started

    def before_change(self) -> None:
        """Make the next update wait for the GPU's copies; the caller does not wait. Call it before every update."""
        if self._pending and self._pending.copied:
            torch.cuda.current_stream().wait_event(self._pending.copied)

    def finished(self, wait: bool = False) -> Saved | None:
        """Return the save that has ended since the last call; None if it is still running or no save was started.

        Raises ConfigError on all ranks if the checkpoint could not be written.
        """
        if self._pending is None:
            return None
        future, saved = self._pending.written, self._pending.saved
        started = time.perf_counter()
        if wait:
            future.exception()
        elif not all_ranks_true(future.done(), f"asking whether {saved.path.name} is saved"):
            return None
        saved.blocked_s += time.perf_counter() - started
        self._pending = None
        if failure := future.exception():
            raise self._to_user_error(failure, saved)
        return saved

    def close(self) -> None:
        """Wait for a pending save, so that it completes even if the run has failed."""
        self._thread.shutdown()
        self._host_memory.close()
        if self._pending and (failure := self._pending.written.exception()) and self.grid.world.index == 0:
            saved, error = self._pending.saved, self._to_user_error(failure, self._pending.saved)
            # An error of torch's collectives only means that a rank has ended.
            cause = f" ({error!r})" if isinstance(failure, CheckpointException) else ""
            problem = error if isinstance(error, ConfigError) else f"{saved.path} is incomplete{cause}"
            print(f"error: {problem}", file=sys.stderr, flush=True)

    def finish(self, seconds: float) -> None:
        """Wait until a pending save has ended or failed, at most for ``seconds``. Any thread may call this."""
        if pending := self._pending:
            wait([pending.written], seconds)

    def _copy_to_host(self, shards: Mapping[str, LocalShard]) -> tuple[dict[str, LocalShard], torch.cuda.Event | None]:
        """Return the shards in host memory, and the event after their copies if a GPU is still copying."""
        memory = self._host_memory.like({name: shard.local for name, shard in shards.items()})
        copies = {name: shard._replace(local=memory[name]) for name, shard in shards.items()}
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, copy in copies.items():
                copy.local.copy_(shards[name].local, non_blocking=True)
        return copies, self._stream.record_event() if self._stream else None

    def _begin(self, step: int) -> Path:
        try:
            return lifecycle.begin(self.run_dir, step)
        except OSError as error:
            raise self._save_error(checkpoint_dir.name(step), error) from None

    def _write(self, planner: SavePlanner, writer: Writer, saved: Saved, started: float) -> None:
        with SAVE.begin(f"saving {saved.path.name}"):
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self._group)
        saved.seconds = time.perf_counter() - started

    def _commit(self, partial: Path, saved: Saved) -> None:
        config = self.config
        saved.best = lifecycle.retain(lifecycle.commit(partial), config.keep, config.keep_every, config.keep_best)

    def _to_user_error(self, failure: BaseException, saved: Saved) -> BaseException:
        """Return the error to raise for a failed save. Its files are removed, since they may fill the disk."""
        if self.grid.world.index == 0:
            with suppress(ConfigError):  # The user needs to see the first failure.
                lifecycle.remove_leftovers(self.run_dir)
        if not isinstance(failure, CheckpointException):
            return failure
        rank, (error, stack) = min(failure.failures.items())
        if isinstance(error, OSError):
            return self._save_error(saved.path.name, error, f"rank {rank}: ")
        if rank == self.grid.world.index:
            error.add_note(f"{saved.path} could not be saved:\n{''.join(stack.format())}")
            return error
        return RuntimeError(f"{saved.path} could not be saved; rank {rank}: {error!r}")

    def _save_error(self, name: str, error: OSError, where: str = "") -> ConfigError:
        newest = next(reversed(checkpoint_dir.committed(self.run_dir)), None)
        remaining = f"the run can resume from {newest.name}" if newest else "there is no older checkpoint"
        return ConfigError(
            f"run.dir={self.run_dir}: {name} could not be saved ({where}{error.strerror or error}); free "
            f"disk space and use a file system that all nodes share; {remaining}"
        )
