import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt4d.parallel.comm import collectives
from gpt4d.parallel.comm.cpu import two_level
from gpt4d.parallel.comm.stats import Works
from gpt4d.parallel.layers import linear_kernels


@pytest.fixture
def rank_0(monkeypatch):
    """Return a function that makes this process rank 0 of a job whose remaining ranks do not exist.

    Collectives return at once and compute nothing. Products run the operations of a GPU.
    """

    def start_process_group(world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    def exchange(full, axis):
        return Works([], []), full.chunk(axis.size)[:1]

    def gather(shard, axis):
        return Works([], []), [shard.new_empty(axis.size, shard.numel())]

    def multiply(a, b, dtype, added_to=None):
        if added_to is None:
            return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
        if a.dtype == dtype:
            return added_to.addmm_(a, b)
        return torch.addmm(added_to, a, b, out_dtype=dtype, out=added_to)

    monkeypatch.setattr(two_level, "connect", lambda group: None)
    monkeypatch.setattr(collectives, "_exchange_parts", exchange)
    monkeypatch.setattr(collectives, "_gather_pieces", gather)
    monkeypatch.setattr(collectives, "_add_parts", lambda received, full: received[0])
    monkeypatch.setattr(linear_kernels, "product", multiply)
    yield start_process_group
    dist.destroy_process_group()
