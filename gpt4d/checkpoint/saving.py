"""Saving checkpoints, optionally in the background. A crash at any instant loses no committed checkpoint."""

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from gpt4d.checkpoint import checkpoint_dir, lifecycle, storage, tensor_files
from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import CheckpointConfig, ConfigError
from gpt4d.parallel.grid import Grid
from gpt4d.runtime import gpu
from gpt4d.runtime.activity import MAIN, SAVE
from gpt4d.runtime.consensus import all_ranks_true, gather_in_group, run_on_all_ranks, run_on_rank0


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
        extra = [name.removeprefix("extra.") for name in shards if name.startswith("extra.")]
        documents = {**documents, checkpoint_dir.META: replace(meta, extra=extra).to_json()}
        shards, copied = storage.own_shards(shards, self.grid), None
        if self.config.async_save:
            shards, copied = self._copy_to_host(shards)
        step = meta.progress.step
        partial = Path(run_on_rank0(lambda: str(self._begin(step)), f"beginning to save step {step}"))
        saved = Saved(partial.with_suffix(""), meta.progress, 0.0, 0.0)
        written = self._thread.submit(self._write, partial, shards, documents, copied, saved, started)
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
            raise failure
        return saved

    def close(self) -> None:
        """Wait for a pending save, so that it completes even if the run has failed."""
        self._thread.shutdown()
        self._host_memory.close()
        if self._pending and (failure := self._pending.written.exception()) and self.grid.world.index == 0:
            # An error of torch's collectives means that a rank has ended.
            incomplete = f"{self._pending.saved.path} is incomplete ({failure!r})"
            problem = failure if isinstance(failure, ConfigError) else incomplete
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
        with self._user_errors(checkpoint_dir.name(step)):
            return lifecycle.begin(self.run_dir, step)

    def _write(
        self,
        partial: Path,
        shards: Mapping[str, LocalShard],
        documents: Mapping[str, bytes],
        copied: torch.cuda.Event | None,
        saved: Saved,
        started: float,
    ) -> None:
        """Write the rank's ``shards`` after its GPU has ``copied`` them, and on rank 0 all other files."""
        rank, name = self.grid.world.index, f"saving {saved.path.name}"

        def write() -> tuple:
            if copied:
                copied.synchronize()
            with self._user_errors(saved.path.name, f"rank {rank}: "):
                return storage.write_shards(partial, shards, self.grid)

        def complete() -> None:
            with self._user_errors(saved.path.name, f"rank {rank}: "):
                tensor_files.complete_directory(partial, written, documents)
                final, config = lifecycle.commit(partial), self.config
                saved.best = lifecycle.retain(final, config.keep, config.keep_every, config.keep_best)

        try:
            own = run_on_all_ranks(write, name, SAVE, self._group)
            with SAVE.begin(name) as activity, activity.waiting():
                written = gather_in_group(own, self._group, receiver=0)
            run_on_all_ranks(complete if rank == 0 else lambda: None, name, SAVE, self._group)
        except BaseException:
            if rank == 0:
                with suppress(ConfigError):  # The user needs to see the first failure.
                    lifecycle.remove_leftovers(self.run_dir)  # they may fill the disk
            raise
        saved.seconds = time.perf_counter() - started

    @contextmanager
    def _user_errors(self, name: str, where: str = "") -> Iterator[None]:
        """Raise a ConfigError about the checkpoint ``name`` if the body raises OSError."""
        try:
            yield
        except OSError as error:
            newest = next(reversed(checkpoint_dir.committed(self.run_dir)), None)
            remaining = f"the run can resume from {newest.name}" if newest else "there is no older checkpoint"
            raise ConfigError(
                f"run.dir={self.run_dir}: {name} could not be saved ({where}{error.strerror or error}); free "
                f"disk space and use a file system that all nodes share; {remaining}"
            ) from None


class HostMemory:
    """Tensors in host memory by name, in one block per dtype.

    For a GPU the blocks are pinned, so that it copies to them concurrently with the computation. torch's own allocator
    of pinned memory rounds each allocation up to a power of two, which takes up to twice the memory.

    Args:
        pinned: pin the memory.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self._tensors: dict[str, torch.Tensor] = {}
        self._blocks: list[torch.Tensor] = []

    def like(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return host tensors with the shapes and dtypes of ``tensors``. A name has the same tensor in each call."""
        new = {name: tensor for name, tensor in tensors.items() if name not in self._tensors}
        for dtype in dict.fromkeys(tensor.dtype for tensor in new.values()):
            own = {name: tensor for name, tensor in new.items() if tensor.dtype == dtype}
            sizes = [tensor.numel() for tensor in own.values()]
            block = self._allocate(sum(sizes), dtype)
            for (name, tensor), part in zip(own.items(), block.split(sizes), strict=True):
                self._tensors[name] = part.view(tensor.shape)
        return {name: self._tensors[name] for name in tensors}

    def _allocate(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        block = torch.empty(elements, dtype=dtype)
        if self.pinned and elements:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0))
            self._blocks.append(block)
        return block

    def close(self) -> None:
        """Unpin the memory. No copy may be in flight."""
        for block in self._blocks:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
        self._blocks.clear()
        self._tensors.clear()
