"""The lifetime of a job: its ranks meet, form a process group, watch each other, and end together."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpt4d.runtime import compile_cache, gpu, machine
from gpt4d.runtime.activity import MAIN
from gpt4d.runtime.errors import ConfigError, NodeError, RankError
from gpt4d.runtime.launch import Launch, print_error, select_device
from gpt4d.runtime.rendezvous import Connector, StoreLost, claim_rank, job_key
from gpt4d.runtime.watchdog import Failure, Watchdog

RAISED_ON_ALL_RANKS = ConfigError, SystemExit
CONNECT_S = 300.0  # timeout for all ranks to connect
_LEAVE_S = 60.0  # timeout for all ranks to finish
SAVE_S = 60.0  # timeout for a pending save to end after the error of a rank
_RECORD_S = 3.0  # timeout for the run's files to be written
NOTICE_S = 3.0  # time for other ranks to read why the job ends


@dataclass
class JobContext:
    """This rank's device and, if there are other ranks, its connection to them."""

    device: torch.device
    ranks: "Ranks | None" = None


class Ranks:
    """The job's store, from the first rank's arrival to the last rank's exit, and this rank's watchdog.

    Nothing here waits forever for a store that does not answer: the watchdog ends this process.

    Args:
        launch: this process's rank in the job and its launcher.
        timeout_s: as for the watchdog.
        directory: the directory of the job's secret (``job_key``).

    Attributes:
        record_failure: writes to the run's files why the job ends.
        finish_save: lets a pending save end, at most for some seconds.
    """

    def __init__(self, launch: Launch, timeout_s: float, directory: Path | None = None):
        self.launch = launch
        connector = Connector(launch, job_key(launch, directory), CONNECT_S)
        self.store, watchdog_store = connector.connect()
        claim_rank(self.store, launch.rank)
        self._exiting = threading.Lock()  # taken by the thread that ends this process
        self.watchdog = Watchdog(
            watchdog_store, launch.rank, launch.world_size, connector.host, self._on_failure, timeout_s
        )
        self.record_failure: Callable[[str], None] = lambda message: None
        self.finish_save: Callable[[float], None] = lambda seconds: None
        self.watchdog.start()

    def wait_for_all_ranks(self) -> None:
        """Return when all ranks have connected. Raises ConfigError with the first missing rank after a timeout."""
        if not self._barrier("here", CONNECT_S):
            size = self.launch.world_size
            missing = [rank for rank in range(size) if not self.store.check([f"host/{rank}"])]
            raise ConfigError(
                f"{len(missing)} of {size} ranks did not connect within {CONNECT_S:.0f} s, the first of them rank "
                f"{missing[0]}; check its output and that its node has started"
            )

    def leave(self, briefly: bool = False) -> None:
        """Wait until all ranks leave, because srun ends ranks that exit later than the first, then stop the watchdog.

        Args:
            briefly: wait only as long as other ranks need to read why the job ends.
        """
        with MAIN.begin("the end of all ranks") as activity, activity.waiting():
            # A watchdog with a hang detector finds a missing rank earlier.
            detector = self.watchdog.hang_detector
            leave_s = max(_LEAVE_S, 2 * detector.timeout_s if detector else 0.0)
            self._barrier("left", NOTICE_S if briefly else leave_s)
        self.watchdog.stop()
        self._keep_store_alive()

    def _keep_store_alive(self, lost: Sequence[int] = ()) -> None:
        """Let rank 0, whose exit ends the store, wait briefly for the ranks that may still read from it.

        ``lost``: ranks that do not answer any more.
        """
        deadline, remaining = time.monotonic() + NOTICE_S, self.launch.world_size - len(lost)
        with suppress(StoreLost):
            store = self.watchdog.store  # the main thread may be blocked on its own connection
            count = store.add("finished", 1)
            while self.launch.rank == 0 and count < remaining and time.monotonic() < deadline:
                time.sleep(0.01)
                count = store.add("finished", 0)

    def _barrier(self, name: str, timeout_s: float) -> bool:
        """Wait until all ranks have called this with ``name``. Return False after ``timeout_s``."""
        if self.store.add(name, 1) == self.launch.world_size:
            self.store.set(f"all {name}", "")
        try:
            self.store.wait([f"all {name}"], timedelta(seconds=timeout_s))
        except RuntimeError:
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """End this process and, by reporting ``error`` in the store, all other ranks. Any thread may call this."""
        is_first = self._exiting.acquire(blocking=False)
        # A collective often fails because another rank has exited. The report names that rank.
        own = torch.OutOfMemoryError, torch.AcceleratorError, RankError
        may_be_secondary = isinstance(error, RuntimeError) and not isinstance(error, own)
        cause = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        failure = self.watchdog.fail(cause, may_be_secondary, getattr(error, "exit_code", 1))
        # This rank may have reported a hang before, and its error results from the exit of another rank.
        is_reported = (failure.rank, failure.cause) == (self.launch.rank, cause)
        if is_reported and not isinstance(error, RankError):
            traceback.print_exception(error)
        self._print_and_exit(failure, is_first)

    def _on_failure(self, failure: Failure) -> None:
        """End this process. The watchdog's thread calls this; the main thread may be blocked forever."""
        self._print_and_exit(failure, self._exiting.acquire(blocking=False))

    def _print_and_exit(self, failure: Failure, is_first: bool) -> None:
        if not is_first:
            threading.Event().wait(_LEAVE_S + SAVE_S)  # the thread that holds the lock ends the process
        try:
            self._print(failure)
            if failure.all_ranks_answer:
                self.finish_save(SAVE_S)
            self._keep_store_alive(failure.lost)
        except Exception:
            traceback.print_exc()
        finally:  # exit even if the body fails, because the main thread may be blocked
            os._exit(failure.exit_code)

    def _print(self, failure: Failure) -> None:
        """Print why the job ends, and write it to the run's files."""
        rank, local_rank = self.launch.rank, self.launch.local_rank
        message = " ".join(str(failure).split())
        # The first rank of each node prints the failure, or the second if the first one is lost.
        if local_rank == 0 or (local_rank == 1 and rank - 1 in failure.lost):
            print_error(message)
        self._record(message)
        sys.stdout.flush()

    def _record(self, message: str) -> None:
        """Write the reason for the end to the run's files, with the timeout ``_RECORD_S``.

        A file system that does not answer may itself be the reason.
        """

        def write() -> None:
            with suppress(OSError):
                self.record_failure(message)

        thread = threading.Thread(target=write, name="record", daemon=True)
        thread.start()
        thread.join(_RECORD_S)


@contextmanager
def process_group(
    launch: Launch,
    device: torch.device | None = None,
    timeout_s: float = 120.0,
    deterministic: bool = False,
    run_dir: Path | None = None,
) -> Iterator[JobContext]:
    """Create the process group of all ranks of the job.

    An exception inside ends the job on every rank, with one line that names the rank, its host and the cause. Only a
    ConfigError or SystemExit, which all ranks raise together, passes through.

    Args:
        launch: this process's rank in the job and its launcher.
        device: the rank's device; None to select its GPU, or the CPU without GPUs.
        timeout_s: time after which gpt4d's watchdog may end the job; torch's own watchdogs wait longer.
        deterministic: as in ``gpu.set_environment``.
        run_dir: the run's directory, which all ranks share, for the job's secret (``rendezvous.job_key``) and NCCL's
            trace (``gpu.set_environment``); None for a job without a run directory.
    """
    gpu.set_environment(deterministic, run_dir)
    own_cores = gpu.share_cores(machine.usable_cores(), launch.local_world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(own_cores)
    if launch.master is None:
        device = device or select_device(launch)
        with initialize(launch, dist.HashStore(), device, timeout_s):
            yield JobContext(device)
        return
    ranks = Ranks(launch, timeout_s, run_dir)
    try:
        device = device or select_device(launch)
        ranks.wait_for_all_ranks()
        store = ranks.store.for_process_groups()
        with initialize(launch, store, device, timeout_s, ranks.watchdog):
            yield JobContext(device, ranks)
    except NodeError as error:  # raised on this node only, and ranks of all other nodes wait for this rank
        ranks.watchdog.fail(str(error), may_be_secondary=False)
        ranks.leave(briefly=True)
        raise
    except RAISED_ON_ALL_RANKS as error:
        ranks.leave(briefly=not isinstance(error, SystemExit))
        if isinstance(error, ConfigError):
            error.all_ranks_raised = True
        raise
    except BaseException as error:
        ranks.fail(error)
    else:
        ranks.leave()


@contextmanager
def initialize(
    launch: Launch,
    store: dist.Store,
    device: torch.device,
    timeout_s: float,
    watchdog: Watchdog | None = None,
    backend: str | None = None,
) -> Iterator[None]:
    """Select the rank's GPU and connect the rank to all others through ``store``. Disconnect it at the end.

    ``backend``: backend of collectives; None for NCCL on GPUs and gloo on the host.
    """
    if device.type == "cuda":
        if torch.version.hip:
            compile_cache.set_environment()  # MIOpen compiles kernels
        backend = backend or "cpu:gloo,cuda:nccl"
    gpu.select(device)
    if watchdog:
        watchdog.device = device
    timeout = gpu.backend_timeout(timeout_s)
    with watchdog.limit("connecting all ranks") if watchdog else nullcontext():
        dist.init_process_group(
            backend or "gloo", rank=launch.rank, world_size=launch.world_size, store=store, timeout=timeout
        )
    try:
        yield
    except BaseException as error:
        if isinstance(error, RAISED_ON_ALL_RANKS):
            dist.destroy_process_group()  # after any other error, this call blocks on ranks that have exited
        raise
    dist.destroy_process_group()
