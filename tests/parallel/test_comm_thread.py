"""A worker executes tasks in order, passes their errors on, and ends when nobody needs it."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch

from gpt4d.parallel.comm.cpu.comm_thread import CommThread


def test_tasks_run_in_order_beside_the_thread_that_submits_them():
    worker, order, go_on = CommThread("order"), [], threading.Event()
    first = worker.submit(lambda: go_on.wait() and order.append(1))
    second = worker.submit(lambda: order.append(2))
    order.append(0)
    go_on.set()
    assert second.wait() is None and order == [0, 1, 2]
    assert first.stopped <= second.stopped


def test_the_error_of_a_task_reaches_whoever_waits_for_it():
    worker = CommThread("errors")
    failing = worker.submit(lambda: 1 / 0)
    assert worker.submit(lambda: 3).wait() == 3
    with pytest.raises(ZeroDivisionError):
        failing.wait()


def test_tasks_do_not_record_for_autograd():
    tensor = torch.ones(2, requires_grad=True)
    assert not CommThread("autograd").submit(lambda: tensor * 2).wait().requires_grad


def test_a_worker_keeps_neither_tensors_of_its_last_task_nor_its_thread():
    worker, tensor = CommThread("memory"), torch.ones(2)
    remaining = weakref.ref(tensor)
    worker.submit(partial(torch.sum, tensor)).wait()
    del tensor
    gc.collect()
    assert remaining() is None
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "memory"]
    del worker
    thread.join(60)
    assert not thread.is_alive()
