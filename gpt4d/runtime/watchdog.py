"""The watchdog: heartbeats of all ranks, and the first failure of the job.

It uses the rendezvous store on a separate thread, because the main thread may be blocked in a collective with a rank
that has exited.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from gpt4d.runtime import gpu, hangs
from gpt4d.runtime.hangs import HangDescription, HangDetector, HangReport
from gpt4d.runtime.rendezvous import DeadlineStore, StoreLost

HEARTBEAT_S = 1.0  # between two heartbeats
SILENT_S = 40.0  # a rank without a heartbeat, or a store without an answer, for this long is lost
MIN_SILENT_S = 10.0  # replaces SILENT_S if parallel.timeout_s is shorter
_SUSPENDED_S = 10.0  # a longer pause means that all processes were suspended (Ctrl-Z, laptop lid)
SILENT_AFTER_ERROR_S = 6.0  # replaces SILENT_S once a collective has failed, probably because of a lost rank
_LOST = "no sign of life: killed, out of memory, or its node is gone"


@dataclass
class Failure:
    """The failure that ends a job: the first rank that failed, as far as the ranks can tell."""

    rank: int
    host: str
    cause: str
    waiting: dict | None = None  # for a hang: what that rank waited for, see HangDetector.waiting
    message: str = ""  # the complete message, if it is not about the failure of that rank
    lost: Sequence[int] = ()  # ranks that have ended without a report or do not answer
    exit_code: int = 1  # of all ranks

    @property
    def all_ranks_answer(self) -> bool:
        """Whether a rank has raised an error, and no rank is lost or hangs."""
        return not (self.lost or self.waiting or self.message)

    def __str__(self) -> str:
        return self.message or f"rank {self.rank} on {self.host} failed: {self.cause}"


class Watchdog:
    """One rank's watchdog thread. Each rank watches the next one in a ring, so the store's load grows linearly.

    Args:
        store: the job's store, through a separate connection.
        rank: rank of this process.
        size: number of ranks.
        rank0_host: the host of rank 0 and of the store, for the message if the store does not answer.
        on_failure: called on the watchdog's thread with the failure that ends the job.
        timeout_s: ``parallel.timeout_s``. A short one also shortens the time after which a silent rank is lost.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        rank0_host: str,
        on_failure: Callable[[Failure], None],
        timeout_s: float = 120.0,
    ):
        self.rank, self.size, self.rank0_host, self.on_failure = rank, size, rank0_host, on_failure
        self.silent_s = min(SILENT_S, max(MIN_SILENT_S, timeout_s))
        self.store = DeadlineStore(store, self.silent_s)
        self.device = torch.device("cpu")  # the rank's device, once it is known
        self.hang_detector: HangDetector | None = None  # set from the first collective to the end of a run
        self._limited: tuple[str, float] | None = None  # activity of the main thread, and its deadline
        self._description: HangDescription | None = None  # this rank's description of a hang
        self._describing = threading.Lock()
        self._stopped = threading.Event()
        self._resumed_at = 0.0  # when this process last resumed after it was suspended
        self._suspended_s = 0.0  # how long it was suspended
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self.store.set(f"host/{self.rank}", socket.gethostname())
        self.store.add(f"alive/{self.rank}", 1)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @contextmanager
    def limit(self, activity: str) -> Iterator[None]:
        """End the job if the body, named ``activity`` in the report, takes longer than five minutes on any rank."""
        self._limited = activity, time.monotonic() + hangs.STARTUP_S
        try:
            yield
        finally:
            self._limited = None

    def first_failure(self) -> Failure | None:
        text = self.store.get("failure")
        return Failure(**json.loads(text)) if text else None

    def fail(self, cause: str, may_be_secondary: bool, exit_code: int = 1) -> Failure:
        """Report that this rank has failed and return the failure that ends the job.

        Args:
            cause: the error, for the message.
            may_be_secondary: the error may be a consequence of a lost rank. Wait until that rank is found or has
                reported its own failure. If neither happens, report this rank's error.
            exit_code: exit code of all ranks if this rank's error is reported.
        """
        try:
            failure = self._primary_failure() if may_be_secondary else None
            return self._described(failure or self._report(self._own_failure(cause, exit_code=exit_code)))
        except StoreLost as error:
            return self.store_lost(error) if may_be_secondary else self._own_failure(cause, exit_code=exit_code)

    def _report(self, failure: Failure) -> Failure:
        """Store ``failure`` unless an earlier failure, its probable cause, is stored. Return the stored failure."""
        return Failure(**json.loads(self.store.set_first("failure", json.dumps(asdict(failure)))))

    def _own_failure(self, cause: str, waiting: dict | None = None, exit_code: int = 1) -> Failure:
        return Failure(self.rank, socket.gethostname(), cause, waiting, exit_code=exit_code)

    def _lost_ranks(self, *ranks: int) -> Failure:
        message = self._after_suspension(f"{self._name(ranks[0])} gives no sign of life")
        return Failure(ranks[0], self._host(ranks[0]), _LOST, message=message, lost=ranks)

    def _after_suspension(self, problem: str) -> str:
        """Return the message of a problem that this rank finds after it was suspended itself; otherwise ''."""
        if not self._resumed_at or time.monotonic() - self._resumed_at > 3 * self.silent_s:
            return ""
        return (
            f"rank {self.rank} on {socket.gethostname()} was suspended for {self._suspended_s:.0f} s, by a signal or "
            f"because its machine slept; after this {problem}"
        )

    def _described(self, failure: Failure) -> Failure:
        """Return ``failure``. If it is a hang, add the message that all ranks determine together.

        The main thread may fail after the watchdog's thread has described the hang, because another rank has ended. The
        first description and its record remain.
        """
        if failure.waiting and self.hang_detector:
            report = HangReport(self.store, self.rank, self._name, HEARTBEAT_S)
            try:
                with self._describing:
                    self._description = self._description or report.describe(
                        failure.rank, failure.waiting, self.hang_detector
                    )
                if self._description:
                    failure.message, failure.lost = self._description
            except StoreLost as error:
                if not error.ended:  # otherwise rank 0 has printed the message and ended
                    raise
        return failure

    def _primary_failure(self) -> Failure | None:
        """Return the failure that a rank reports soon, or the loss of a rank; None if neither happens."""
        if self.hang_detector:
            self.hang_detector.peer_lost = True
        for _ in range(2):
            deadline = time.monotonic() + SILENT_AFTER_ERROR_S
            before = [self._heartbeats(rank) for rank in range(self.size)]
            while time.monotonic() < deadline:
                if failure := self.first_failure():
                    return failure
                self._stopped.wait(HEARTBEAT_S / 10)
            others = (rank for rank in range(self.size) if rank != self.rank)
            if lost := [rank for rank in others if self._heartbeats(rank) == before[rank]]:
                return self._report(self._lost_ranks(*lost))
        return None

    def _name(self, rank: int) -> str:
        """Return a rank's number, stage and host: "rank 3 (stage 1) on nid002"."""
        place = self.hang_detector and self.hang_detector.places.get(rank)
        return f"rank {rank}{f' ({place})' if place else ''} on {self._host(rank)}"

    def _host(self, rank: int) -> str:
        return self.store.get(f"host/{rank}") or "an unknown host"

    def _heartbeats(self, rank: int) -> int:
        return self.store.add(f"alive/{rank}", 0)

    def _watch(self) -> None:
        try:
            try:
                failure = self._first_problem()
            except StoreLost:
                raise
            except Exception as error:  # probably a GPU error: after a failure, every call to the GPU fails
                failure = self._report(self._own_failure(f"{type(error).__name__}: {error}"))
            if failure is None:
                return
            failure = self._described(failure)
        except StoreLost as error:
            failure = self.store_lost(error)
        if not self._stopped.is_set():
            self.on_failure(failure)

    def _first_problem(self) -> Failure | None:
        """Send heartbeats until the job fails, and return its failure. Return None after ``stop``."""
        next_rank = (self.rank + 1) % self.size
        last_count, last_change = 0, time.monotonic()
        last_check = last_change
        while not self._stopped.wait(HEARTBEAT_S):
            now = time.monotonic()
            if now - last_check > _SUSPENDED_S:
                last_change = self._resumed_at = now
                self._suspended_s = now - last_check
            last_check = now
            gpu.select(self.device)  # the hang detector asks the GPU for unfinished collectives
            self.store.add(f"alive/{self.rank}", 1)
            if failure := self.first_failure():
                return failure
            count = self._heartbeats(next_rank)
            if count != last_count:
                last_count, last_change = count, now
            elif now - last_change > self.silent_s:
                return self._report(self._lost_ranks(next_rank))
            if failure := self._check_for_hang():
                return failure
        return None

    def store_lost(self, error: StoreLost) -> Failure:
        """Return the failure of the process that holds the store: rank 0, or torchrun."""
        host = self.rank0_host
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            problem = f"the launcher (torchrun) on {host} {'has ended' if error.ended else 'does not answer'}"
            return Failure(-1, host, "", message=self._after_suspension(problem) or problem)
        silent = f"rank 0 on {host} does not answer: it is stopped, or its node or the network to it is down"
        ended = self._after_suspension(f"rank 0 on {host} has ended")
        return Failure(0, host, _LOST, message=ended if error.ended else silent, lost=[0])

    def _check_for_hang(self) -> Failure | None:
        if (limited := self._limited) and time.monotonic() > max(limited[1], self._resumed_at + hangs.STARTUP_S):
            cause = f"{limited[0]} took longer than {hangs.STARTUP_S:.0f} s; check the network between the nodes"
            return self._report(self._own_failure(cause))
        if not (detector := self.hang_detector):
            return None
        for name, watch in detector.activities.items():
            if (progressed := watch.progressed()) is not None:
                watch.note(self.store.add(f"progress/{name}", int(progressed)))
        if detector.peer_lost:  # another thread already looks for the lost rank
            return None
        if not (waiting := detector.overdue(self._resumed_at)):
            return None
        limit_s, setting = detector.limit(waiting)
        cause = f"{waiting['name']} did not finish within {limit_s:g} s ({setting})"
        return self._report(self._own_failure(cause, waiting))
