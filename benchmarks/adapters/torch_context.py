"""torch: forward and backward of a plain Llama with ring attention and with Ulysses, whose weights DDP replicates."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from benchmarks.adapters.context_attention import ring_attention, ulysses
from benchmarks.adapters.torch import TorchTraining
from benchmarks.adapters.torch_llama import Attention, build_torch_llama
from benchmarks.context_steps import ContextWorkerConfig
from benchmarks.gradient_steps import gradient_contender
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.worker import Contender, share_process_groups
from benchmarks.workloads import Workload, initial_weights


class SharedSequences(TorchTraining):
    """Forward, backward and all-reduce of gradients of a plain Llama on this rank's positions of each sequence."""

    def __init__(self, work: Workload, attention: Attention, positions: torch.Tensor):
        ids, targets, sample_ids = work.share(0, 1)
        model = build_torch_llama(initial_weights(work.model), work.model, attention, positions)
        replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
        super().__init__(replicated, (ids[:, positions], targets[:, positions], sample_ids))

    def forward_backward(self) -> torch.Tensor:
        self.loss = super().forward_backward()
        # DDP waits in C++ code. A virtual device learns it where gradients are used.
        get_total_norm(p.grad for p in self.model.parameters())
        return self.loss

    def collect_results(self) -> dict:
        self.optimizer.zero_grad(set_to_none=True)
        return super().collect_results()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.model.module.named_parameters()}


def shared_sequences(work: Workload) -> dict[str, SharedSequences]:
    """Return the steps with ring attention and with Ulysses, in which all ranks share the sequence."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    positions = torch.arange(work.units)
    segments = positions.chunk(2 * world)
    balanced = torch.cat((segments[rank], segments[2 * world - 1 - rank]))
    return {
        "ring attention": SharedSequences(work, ring_attention(group), balanced),
        "Ulysses": SharedSequences(work, ulysses(group), positions.chunk(world)[rank]),
    }


def steps(settings: ContextWorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the steps of both."""
    share_process_groups()
    built = shared_sequences(settings.work)
    return {name: gradient_contender(name, step, settings.gradients) for name, step in built.items()}
