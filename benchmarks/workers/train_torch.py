"""torch's own parallelism on the plain GPT-2: DDP, FSDP2, and its tensor parallelism inside FSDP2."""

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

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_groups
from benchmarks.workers.torch_gpt import PlainGPT, adamw, plain_model
from benchmarks.workers.training import MODEL, OPTIM, in_a_row, sequences, whole_weights
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


def tensor_parallel(model: PlainGPT, mesh: DeviceMesh) -> None:
    """Megatron's cuts as torch's styles; logits stay cut, and the loss is taken of them so."""
    columns, rows = ColwiseParallel, RowwiseParallel
    plan = {
        "tokens": rows(input_layouts=Replicate()),
        "head": columns(output_layouts=Shard(-1), use_local_output=False),
    }
    for number in range(len(model.blocks)):
        block = {"qkv": columns(), "output": rows(), "up": columns(), "down": rows()}
        plan |= {f"blocks.{number}.{name}": style for name, style in block.items()}
    parallelize_module(model, mesh, plan)
    model.tie()


def fully_sharded(model: PlainGPT, mesh: DeviceMesh) -> None:
    """Whole weights stay from the forward to the backward, as other teams' do: half the gathers."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # On a CPU gathers run ahead only so; the first has no public name.
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    for block, following in pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([following])


class Training:
    """A step of a model that learns from the part ``batch``, ids and targets, of the sequences."""

    def __init__(self, model: nn.Module, batch: tuple[torch.Tensor, ...], loss_cut: bool = False):
        self.model, self.context = model, loss_parallel if loss_cut else nullcontext
        self.ids, self.targets = batch
        # Tensors on different meshes cannot be summed or updated together.
        self.on_mesh = defaultdict(list)
        for parameter in model.parameters():
            self.on_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
        self.optimizer = adamw(*self.on_mesh.values())

    def step(self) -> Callable[[], dict]:
        with self.context():
            logits = self.model(self.ids)
            loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
            loss.backward()
        norms = [_whole(get_total_norm([p.grad for p in group])) for group in self.on_mesh.values()]
        norm = torch.stack(norms).norm()
        for group in self.on_mesh.values():
            clip_grads_with_norm_(group, OPTIM.clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = _whole(loss.detach())
        return self.told

    def told(self) -> dict:
        dist.all_reduce(self.loss)
        return {"loss": self.loss.item() / dist.get_world_size()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def contenders(whole: dict[str, torch.Tensor]) -> dict[str, Callable]:
    rank, world = dist.get_rank(), dist.get_world_size()

    # Of buckets of 2 to 25 MB, its default, the smallest were its best here, by a few per cent.
    replicated = DistributedDataParallel(plain_model(whole, MODEL), bucket_cap_mb=2, gradient_as_bucket_view=True)
    sharded = plain_model(whole, MODEL)
    fully_sharded(sharded, init_device_mesh("cpu", (world,)))
    mine = sequences(rank, world)
    found = {f"DDP{world}": Training(replicated, mine), f"FSDP2 {world}": Training(sharded, mine)}
    for tensor in (4, 2):
        mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
        both = plain_model(whole, MODEL)
        tensor_parallel(both, mesh["tensor"])
        fully_sharded(both, mesh["data"])
        training = Training(both, sequences(rank // tensor, world // tensor), loss_cut=True)
        found[f"TP{tensor} × FSDP2 {world // tensor}"] = training
    return {name: in_a_row(training.step) for name, training in found.items()}


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    whole = whole_weights()
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_groups()
        serve(contenders(whole), answers)
