"""A pool of gloo ranks that all tests of a session share: modules are imported once, not once per rank and test."""

import gc
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait

_TIMEOUT_S = 180.0
# Every rank is a fork of a process with these modules. A rank imports any other module by itself.
_PRELOAD = [
    "torch.distributed.tensor",
    "torch.profiler",
    "torch._inductor.config",  # torch.use_deterministic_algorithms imports it, which takes 0.4 s
    "hydra",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pytest",
    "rich.progress",
    "tokenizers",
    "gpt4d.parallel.resharding.transfer",
    "gpt4d.planner.calibrate",
    "gpt4d.training.run",
    "gpt4d.task.language",
    "gpt4d.training.trainer",
    "tests.support.stages",
]


def start_forkserver() -> None:
    """Start the process that forks the ranks, which imports their modules while the first tests run.

    A session has one such process. Call this function before anything else starts it with fewer modules.
    """
    multiprocessing.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


class RankFailure(AssertionError):
    """An exception on one or more ranks, with their tracebacks."""


class RankPool:
    """A pool of processes. ``run(n, function, *args)`` calls a function on n ranks and returns the list of results.

    The ranks form a process group of their own. The function must be importable; it and all values are pickled. After a
    failure the ranks are replaced, so that no test is affected by another.
    """

    def __init__(self):
        start_forkserver()
        self.context = multiprocessing.get_context("forkserver")
        self.ranks: list[tuple[multiprocessing.Process, Connection]] = []

    def run(self, world_size: int, function, *args) -> list:
        while len(self.ranks) < world_size:
            parent_end, child_end = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(child_end,), daemon=True)
            process.start()
            child_end.close()
            self.ranks.append((process, parent_end))
        with tempfile.TemporaryDirectory() as directory:
            task = pickle.dumps((function, args, world_size, os.path.join(directory, "store")))
            for rank in range(world_size):
                self.ranks[rank][1].send_bytes(pickle.dumps(rank))
                self.ranks[rank][1].send_bytes(task)
            return self._collect(world_size)

    def _collect(self, world_size: int) -> list:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.ranks[:world_size])}
        results, failures = [None] * world_size, {}
        deadline = time.monotonic() + _TIMEOUT_S
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), "no answer in time")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    succeeded, value = False, "the process died"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + 10)  # the remaining ranks probably wait for this one
        if failures:
            self.close()
            raise RankFailure("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        return results

    def close(self) -> None:
        for process, connection in self.ranks:
            connection.close()
            process.kill()  # a process that has ended by itself is no error
            process.join()
        self.ranks.clear()


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # imported objects stay: a collection only visits objects of tests
    # It warns that gathering a dim that two axes split takes two all-gathers, which tests do on purpose.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    while True:
        try:
            rank = pickle.loads(connection.recv_bytes())
            function, args, world_size, path = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            store = dist.FileStore(path, world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_TIMEOUT_S)
            )
            dist.barrier()  # a rank that ends while its peers still connect would make them fail
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        finally:
            gc.collect()  # models hold process groups, which hold threads
            dist.destroy_process_group()
            torch.use_deterministic_algorithms(False)
        connection.send_bytes(pickle.dumps(answer))
