"""torch: DDP, FSDP2 and tensor parallelism on ``TorchGPT`` and on diffusers' U-Net, and plain steps on one device."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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

from benchmarks.adapters.library_models import library_model
from benchmarks.adapters.torch_gpt import TorchGPT, adamw, build_torch_gpt
from benchmarks.adapters.torch_stages import stages  # noqa: F401 – a function of this adapter
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.settings import WorkerConfig
from benchmarks.worker import Contender, repeat_step, share_process_groups
from benchmarks.workloads import OPTIM, UNET, OneDeviceConfig, gpt_workload, initial_weights, our_stage, with_states
from gpt4d.parallel.grid import Grid

_UNET_LAYERS = ("ResnetBlock2D", "Attention", "Downsample2D", "Upsample2D")


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


def apply_fsdp(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Shard each layer and the rest of the model with FSDP2. As in all adapters, gathered weights stay."""
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # On a CPU, gathers are prefetched only with these settings; the first has no public API.
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch([layers[0]])
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


class TorchTraining:
    """A training step of a GPT-2 on this rank's share of the batch; ``split_logits`` if its logits are split."""

    def __init__(self, model: nn.Module, batch: tuple[torch.Tensor, ...], split_logits: bool = False):
        self.model, self.context = model, loss_parallel if split_logits else nullcontext
        self.ids, self.targets, _ = batch
        # Tensors on different meshes cannot be summed or updated together.
        self.by_mesh = defaultdict(list)
        for parameter in model.parameters():
            self.by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
        self.optimizer = adamw(*self.by_mesh.values())

    def forward_backward(self) -> torch.Tensor:
        """Compute all gradients and return this rank's mean loss."""
        with self.context():
            logits = self.model(self.ids)
            loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
            loss.backward()
        return loss.detach()

    def step(self) -> Callable[[], dict]:
        loss = self.forward_backward()
        norms = [_full(get_total_norm([p.grad for p in group])) for group in self.by_mesh.values()]
        norm = torch.stack(norms).norm()
        for group in self.by_mesh.values():
            clip_grads_with_norm_(group, OPTIM.clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = _full(loss)
        return self.collect_results

    def collect_results(self) -> dict:
        return {"loss": mean_loss(self.loss)}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_loss(loss: torch.Tensor) -> float:
    """Return the mean of the losses of all ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def training(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return DDP, FSDP2, and tensor parallelism inside FSDP2, on a GPT-2."""
    share_process_groups()
    rank, world = dist.get_rank(), dist.get_world_size()
    work = gpt_workload(settings)
    weights = initial_weights(work.model)
    # Among buckets of 2 to 25 MB (the default), the smallest were the fastest on cores, by a few percent. The default
    # is an eighth of the larger model's gradients.
    replicated = DistributedDataParallel(
        build_torch_gpt(weights, work.model),
        bucket_cap_mb=None if settings.virtual else 2,
        gradient_as_bucket_view=True,
    )
    sharded = build_torch_gpt(weights, work.model)
    apply_fsdp(sharded, sharded.blocks, init_device_mesh("cpu", (world,)))
    trainings = {
        f"DDP{world}": TorchTraining(replicated, work.share(rank, world)),
        f"FSDP2 {world}": TorchTraining(sharded, work.share(rank, world)),
    }
    for tensor in (4, 2):
        mesh = init_device_mesh("cpu", (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
        split = build_torch_gpt(weights, work.model)
        apply_tensor_parallelism(split, mesh["tensor"])
        apply_fsdp(split, split.blocks, mesh["data"])
        share = work.share(rank // tensor, world // tensor)
        trainings[f"TP{tensor} × FSDP2 {world // tensor}"] = TorchTraining(split, share, split_logits=True)
    return {name: Contender(repeat_step(training.step, work.steps)) for name, training in trainings.items()}


class UNetTraining:
    """A training step of diffusers' U-Net on this rank's images."""

    def __init__(self, model: nn.Module):
        self.model, self.optimizer = model, adamw(model.parameters())
        noisy, self.timesteps, _, targets = UNET.share(dist.get_rank(), dist.get_world_size())
        self.noisy, self.targets = noisy.movedim(-1, 1), targets.movedim(-1, 1)

    def step(self) -> Callable[[], dict]:
        loss = (self.model(self.noisy, self.timesteps).sample - self.targets).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        return lambda: {"loss": mean_loss(self.loss)}


def unet(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return DDP and FSDP2 on diffusers' UNet2DModel with gpt4d's weights."""
    share_process_groups()
    ours, world = our_stage(Grid.single_device(), UNET.model).module, dist.get_world_size()
    replicated, sharded = library_model(UNET.model, ours), library_model(UNET.model, ours)
    layers = [module for module in sharded.modules() if type(module).__name__ in _UNET_LAYERS]
    apply_fsdp(sharded, layers, init_device_mesh("cpu", (world,)))
    trainings = {
        f"DDP{world}": UNetTraining(DistributedDataParallel(replicated, gradient_as_bucket_view=True)),
        f"FSDP2 {world}": UNetTraining(sharded),
    }
    return {name: Contender(repeat_step(training.step, UNET.steps)) for name, training in trainings.items()}


class PlainTraining:
    """The usual training step of a torch module from token ids to logits, on one device.

    ``forward`` computes the logits: the module itself or a compiled module.
    """

    def __init__(self, module: nn.Module, config: OneDeviceConfig, forward: Callable):
        self.module, self.forward = module, forward
        device = torch.device(config.device)
        self.ids, self.targets, _ = (tensor.to(device) for tensor in config.work.share(0, 1))
        self.optimizer = adamw(module.parameters())
        self.autocast: Callable[[], AbstractContextManager] = nullcontext
        if config.precision == "bf16":
            self.autocast = lambda: torch.autocast(device.type, torch.bfloat16)

    def step(self) -> Callable[[], dict]:
        with self.autocast():
            logits = self.forward(self.ids)
            loss = F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        del logits  # so that they do not stay until the end of the backward
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), OPTIM.clip_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lambda: {"loss": loss.item()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors that exist between steps."""
        return with_states(self.module.parameters(), self.optimizer)


class Logits(nn.Module):
    """transformers' GPT2LMHeadModel, from token ids to logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def one_device(config: OneDeviceConfig, library: bool) -> dict[str, PlainTraining]:
    """Return the trainings of ``benchmarks.experiments.one_device``, of transformers' model if ``library``."""

    def build() -> nn.Module:
        if library:
            model: nn.Module = Logits(library_model(config.model, our_stage(Grid.single_device(), config.model).module))
        else:
            model = build_torch_gpt(initial_weights(config.model), config.model)
        return model.to(config.device)

    eager, compiled = build(), build()
    return {
        "eager": PlainTraining(eager, config, eager),
        "compiled": PlainTraining(compiled, config, torch.compile(compiled)),
    }
