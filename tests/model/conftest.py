import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt4d.parallel.comm.cpu import hosts
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.comm.transport import Transport
from gpt4d.parallel.layers import experts, linear


class Ended:
    """The handle of an exchange that is complete."""

    def wait(self):
        pass

    def on_end(self, record):
        record(0.0)


class NoExchange(Transport):
    """Returns tensors with the shapes of the results, without values of other ranks."""

    def __init__(self, group):
        self.size = group.size()

    def start_all_reduce(self, tensor, op):
        return Pending(tensor, Ended())

    def start_all_gather(self, shard):
        if shard.dtype == torch.int64:  # indices, of which a layer uses the values
            return Pending(shard, Ended(), lambda shard: torch.cat([shard] * self.size))
        return Pending(shard, Ended(), lambda shard: shard.new_empty(self.size * shard.shape[0], *shard.shape[1:]))

    def start_reduce_scatter(self, full):
        return Pending(full, Ended(), lambda full: full.chunk(self.size)[0])

    def start_shift(self, tensor):
        return Pending(tensor, Ended(), torch.empty_like)

    def start_all_to_all(self, sent, sent_rows, received_rows):
        if sent.dtype == torch.int64:  # every rank sends the numbers that this rank sends to itself
            return Pending(sent, Ended(), lambda sent: torch.cat([sent[: sent_rows[0]]] * self.size))
        return Pending(sent, Ended(), lambda sent: sent.new_empty(sum(received_rows), *sent.shape[1:]))


@pytest.fixture
def rank_0(monkeypatch):
    """Return a function that makes this process rank 0 of a job whose remaining ranks do not exist.

    Collectives return at once and compute nothing. Products run the operations of a GPU.
    """

    def start_process_group(world_size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)

    def multiply(a, b, dtype, added_to=None):
        if added_to is None:
            return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
        if a.dtype == dtype:
            return added_to.addmm_(a, b)
        return torch.addmm(added_to, a, b, out_dtype=dtype, out=added_to)

    monkeypatch.setattr(hosts, "connect", lambda group, yielding: NoExchange(group))
    for module in linear, experts:
        monkeypatch.setattr(module, "product", multiply)
    yield start_process_group
    dist.destroy_process_group()
