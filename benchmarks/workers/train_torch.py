"""torch's own parallelism on ``TorchGPT``: DDP, FSDP2, and tensor parallelism inside FSDP2."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.settings import WorkerConfig
from benchmarks.workers.torch_gpt import TorchGPT, adamw, build_torch_gpt
from benchmarks.workers.training import OPTIM, initial_weights, repeat_step, run_worker, sequences, workload


def apply_tensor_parallelism(model: TorchGPT, mesh: DeviceMesh) -> None:
    """Split layers as Megatron does, with torch's styles. Logits stay split over the vocabulary, also for the loss."""
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {
        "tokens": rows(input_layouts=Replicate()),
        "head": columns(output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(len(model.blocks)):
        block = {"qkv": columns(), "output": rows(), "up": columns(), "down": rows()}
        plan |= {f"blocks.{index}.{name}": style for name, style in block.items()}
    parallelize_module(model, mesh, plan)
    model.tie()


def apply_fsdp(model: TorchGPT, mesh: DeviceMesh) -> None:
    """Shard the model with FSDP2. Gathered weights stay until the backward, as in the other workers."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # On a CPU, gathers are prefetched only with these settings; the first has no public API.
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    for block, following in pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([following])


class TorchTraining:
    """A training step of ``model`` on this rank's token ids and targets; ``split_logits`` if its logits are split."""

    def __init__(self, model: nn.Module, batch: tuple[torch.Tensor, ...], split_logits: bool = False):
        self.model, self.context = model, loss_parallel if split_logits else nullcontext
        self.ids, self.targets = batch
        # Tensors on different meshes cannot be summed or updated together.
        self.by_mesh = defaultdict(list)
        for parameter in model.parameters():
            self.by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
        self.optimizer = adamw(*self.by_mesh.values())

    def step(self) -> Callable[[], dict]:
        with self.context():
            logits = self.model(self.ids)
            loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
            loss.backward()
        norms = [_full(get_total_norm([p.grad for p in group])) for group in self.by_mesh.values()]
        norm = torch.stack(norms).norm()
        for group in self.by_mesh.values():
            clip_grads_with_norm_(group, OPTIM.clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = _full(loss.detach())
        return self.collect_results

    def collect_results(self) -> dict:
        dist.all_reduce(self.loss)
        return {"loss": self.loss.item() / dist.get_world_size()}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build_contenders(config: WorkerConfig) -> dict[str, Callable]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, batch, steps = workload(config.virtual)
    weights = initial_weights(model)

    def shares(share: int, shares: int) -> tuple[torch.Tensor, ...]:
        return sequences(share, shares, model, batch)

    # Among buckets of 2 to 25 MB (the default), the smallest were the fastest on cores, by a few percent. The default
    # is an eighth of the larger model's gradients.
    replicated = DistributedDataParallel(
        build_torch_gpt(weights, model), bucket_cap_mb=None if config.virtual else 2, gradient_as_bucket_view=True
    )
    sharded = build_torch_gpt(weights, model)
    apply_fsdp(sharded, init_device_mesh("cpu", (world,)))
    trainings = {
        f"DDP{world}": TorchTraining(replicated, shares(rank, world)),
        f"FSDP2 {world}": TorchTraining(sharded, shares(rank, world)),
    }
    for tensor in (4, 2):
        mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
        split = build_torch_gpt(weights, model)
        apply_tensor_parallelism(split, mesh["tensor"])
        apply_fsdp(split, mesh["data"])
        training = TorchTraining(split, shares(rank // tensor, world // tensor), split_logits=True)
        trainings[f"TP{tensor} × FSDP2 {world // tensor}"] = training
    return {name: repeat_step(training.step, steps) for name, training in trainings.items()}


if __name__ == "__main__":
    run_worker(build_contenders)
