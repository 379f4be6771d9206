"""Runs whose ranks are all killed during a save, or between two saves."""

import os
import signal
import threading
from multiprocessing.connection import wait

from gpt4d.checkpoint import lifecycle
from tests.support.grids import train_in_rank

RANKS = 2


def run_rank(config, rank, store, messages, hold):
    """Train as one rank of a run. Sends a message when a save begins, and when the run is done.

    With ``hold`` the message comes when a save is committed, and nothing happens after it.
    """
    import torch.distributed as dist

    begin, retain = lifecycle.begin, lifecycle.retain

    def begin_and_report(*args):
        if not hold:
            messages.send_bytes(b"begun")
        return begin(*args)

    def retain_and_hold(*args):
        retain(*args)
        if hold:
            messages.send_bytes(b"begun")
            threading.Event().wait()

    lifecycle.begin, lifecycle.retain = begin_and_report, retain_and_hold
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    train_in_rank(config)
    dist.destroy_process_group()
    messages.send_bytes(b"done")


def run_until_killed(context, config, store, delay, hold=False):
    """Run, and kill all ranks ``delay`` seconds after a save began, or never if None. Returns whether it finished.

    With ``hold`` they are killed between a save and the next.
    """
    receiver, sender = context.Pipe()
    processes = [
        context.Process(target=run_rank, args=(config, rank, store, sender, hold), daemon=True) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    sender.close()
    ended = 0
    try:
        while ended < RANKS:
            assert receiver.poll(60), "no save begins"
            message = receiver.recv_bytes()
            ended += message == b"done"
            if message == b"begun" and delay is not None:
                wait([process.sentinel for process in processes], timeout=delay)
                return False
    finally:
        for process in processes:
            if ended < RANKS:
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        receiver.close()
    return True
