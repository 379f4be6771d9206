"""torch's DDP and FSDP2 on diffusers' UNet2DModel, with the weights of ours."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.settings import WorkerConfig
from benchmarks.workers.library_models import library_model
from benchmarks.workers.torch_gpt import adamw
from benchmarks.workers.training import OPTIM, repeat_step, run_worker
from benchmarks.workers.unets import MODEL, STEPS, pictures
from gpt4d.config import Config, TrainConfig
from gpt4d.parallel.grid import Grid
from gpt4d.step import build_stage

_LAYERS = ("ResnetBlock2D", "Attention", "Downsample2D", "Upsample2D")


def apply_fsdp(model: nn.Module) -> None:
    """Shard every layer with FSDP2. Gathered weights stay until the backward, as in ours."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [module for module in model.modules() if type(module).__name__ in _LAYERS]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    # On a CPU, gathers are prefetched only with these settings; the first has no public API.
    model._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch([layers[0]])
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


class UNetTraining:
    """A training step of ``model`` on this rank's pictures."""

    def __init__(self, model: nn.Module):
        self.model, self.optimizer = model, adamw(model.parameters())
        noisy, self.timesteps, _, targets = pictures(dist.get_rank(), dist.get_world_size())
        self.noisy, self.targets = noisy.movedim(-1, 1), targets.movedim(-1, 1)

    def step(self) -> Callable[[], dict]:
        loss = (self.model(self.noisy, self.timesteps).sample - self.targets).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), OPTIM.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        return self.collect_results

    def collect_results(self) -> dict:
        dist.all_reduce(self.loss)
        return {"loss": self.loss.item() / dist.get_world_size()}


def build_contenders(config: WorkerConfig) -> dict[str, Callable]:
    settings = Config(model=MODEL, train=TrainConfig(seq_len=1))
    ours = build_stage(settings, Grid.single_device(), torch.device("cpu")).module
    replicated, sharded = library_model(MODEL, ours), library_model(MODEL, ours)
    apply_fsdp(sharded)
    world = dist.get_world_size()
    trainings = {
        f"DDP{world}": UNetTraining(DistributedDataParallel(replicated, gradient_as_bucket_view=True)),
        f"FSDP2 {world}": UNetTraining(sharded),
    }
    return {name: repeat_step(training.step, STEPS) for name, training in trainings.items()}


if __name__ == "__main__":
    run_worker(build_contenders)
