"""Each thread that may call CUDA uses the GPU of its rank: a new thread has GPU 0, and would create a context there."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt4d.checkpoint.saving import Saver
from gpt4d.config import CheckpointConfig
from gpt4d.data.loader import Loader
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.resharding.transfer import Link
from gpt4d.runtime import job
from gpt4d.runtime.launch import Launch
from gpt4d.runtime.watchdog import Watchdog

GPU = torch.device("cuda", 3)


@pytest.fixture
def current_gpu(monkeypatch):
    """Give each thread a current GPU, 0 at first, as CUDA does. Return a function that returns the thread's GPU."""
    thread = threading.local()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(thread, "gpu", device.index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(thread, "gpu", 0))
    monkeypatch.setattr(torch.cuda, "Stream", MagicMock())
    return torch.cuda.current_device


def test_a_link_transfers_on_the_gpu_of_its_rank(current_gpu, monkeypatch):
    monkeypatch.setattr(Axis, "all_reduce", lambda axis, tensor: tensor)
    with FakeTensorMode():
        link = Link("forward", SimpleNamespace(size=lambda: 2, rank=lambda: 0), GPU)
    assert link.worker.submit(current_gpu).wait() == 3
    link.close()
    assert current_gpu() == 0, "only the new thread has changed"


def test_batches_are_pinned_on_the_gpu_of_their_rank(current_gpu):
    loader = Loader(SimpleNamespace(count=8, row_shape=(2,)), 8, 0, 1, None, GPU, workers=1)
    assert loader._threads.submit(current_gpu).result() == 3
    loader.close()


def test_checkpoints_are_saved_on_the_gpu_of_their_rank(current_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: None)
    torch.cuda.set_device(GPU)
    saver = Saver(CheckpointConfig(), tmp_path, SimpleNamespace(device_type="cuda"))
    assert saver._thread.submit(current_gpu).result() == 3
    saver.close()


def test_the_watchdog_asks_the_gpu_of_its_rank_for_unfinished_collectives(current_gpu, monkeypatch):
    monkeypatch.setattr("gpt4d.runtime.watchdog.HEARTBEAT_S", 0.0)
    watchdog, asked, gpus = Watchdog(dist.HashStore(), 0, 1, "nid1", lambda failure: None), threading.Event(), []

    def overdue(since: float) -> None:
        gpus.append(current_gpu())
        asked.set()

    watchdog.device = GPU
    watchdog.hang_detector = SimpleNamespace(activities={}, peer_lost=False, overdue=overdue)
    watchdog.start()
    assert asked.wait(60)
    watchdog.stop()
    assert set(gpus) == {3}


def test_a_job_selects_the_gpu_of_its_rank_for_itself_and_for_its_watchdog(current_gpu, monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    watchdog = SimpleNamespace(limit=lambda activity: nullcontext())
    with job._initialize(Launch(), dist.HashStore(), GPU, None, 120.0, watchdog):
        assert current_gpu() == 3 and watchdog.device == GPU
