"""The rendezvous: the store through which all ranks connect, the watchdog that uses it, and a joint exit."""

import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

from gpt4d.runtime.activity import MAIN
from gpt4d.runtime.connection import Connector
from gpt4d.runtime.deadline_store import StoreLost
from gpt4d.runtime.errors import ConfigError, RankError
from gpt4d.runtime.identity import job_key
from gpt4d.runtime.job_store import JobStore
from gpt4d.runtime.launch import Launch, print_error
from gpt4d.runtime.watchdog import Failure, Watchdog

CONNECT_S = 300.0  # timeout for all ranks to connect
_LEAVE_S = 60.0  # timeout for all ranks to finish
SAVE_S = 60.0  # timeout for a pending save to end after the error of a rank
_RECORD_S = 3.0  # timeout for the run's files to be written
NOTICE_S = 3.0  # time for other ranks to read why the job ends


class Rendezvous:
    """The job's store, from the first rank's arrival to the last rank's exit, and this rank's watchdog.

    Nothing here waits forever for a store that does not answer: the watchdog ends this process.

    Args:
        launch: this process's rank in the job and its launcher.
        timeout_s: as for the watchdog.
        directory: the directory of the job's secret (``identity.job_key``).
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
        self.watchdog.end_job = self.fail
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
            self._barrier("left", NOTICE_S if briefly else self._leave_s)
        self.watchdog.stop()
        self._keep_store_alive()

    @property
    def _leave_s(self) -> float:
        """Timeout for all ranks to finish. A watchdog with a hang detector finds a missing rank earlier."""
        detector = self.watchdog.hang_detector
        return max(_LEAVE_S, 2 * detector.timeout_s if detector else 0.0)

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
            if self.watchdog.finish_save and failure.all_ranks_answer:
                self.watchdog.finish_save(SAVE_S)
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
        if record := self.watchdog.record_failure:

            def write() -> None:
                with suppress(OSError):
                    record(message)

            thread = threading.Thread(target=write, name="record", daemon=True)
            thread.start()
            thread.join(_RECORD_S)


def claim_rank(store: JobStore, rank: int) -> None:
    """Reserve ``rank`` for this process. Raises ConfigError if another process has it: the job was started twice."""
    process = f"{secrets.token_hex()} {socket.gethostname()}"
    owner = store.compare_set(f"process/{rank}", "", process).decode()
    if owner != process:
        raise ConfigError(f"rank {rank} of this job runs already, on {owner.split()[1]}; wait until that job ends")
