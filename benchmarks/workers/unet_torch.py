"""torch's DDP and FSDP2 on diffusers' UNet2DModel, with the weights of ours."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import torch
import torch.distributed as dist
from diffusers import UNet2DModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.settings import WorkerConfig
from benchmarks.workers.torch_gpt import adamw
from benchmarks.workers.training import OPTIM, repeat_step
from benchmarks.workers.unets import MODEL, STEPS, pictures
from gpt4d.config import Config, TrainConfig, from_arguments
from gpt4d.model.unet import hugging_face as adapter
from gpt4d.parallel.grid import Grid
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch
from gpt4d.step import build_stage

_LAYERS = ("ResnetBlock2D", "Attention", "Downsample2D", "Upsample2D")


def unet() -> UNet2DModel:
    """Return a UNet2DModel with the initial weights of ours."""
    stage = build_stage(Config(model=MODEL, train=TrainConfig(seq_len=1)), Grid.single_device(), torch.device("cpu"))
    state = {}
    for name, parameter in stage.module.named_parameters():
        state |= zip(adapter.names(name, MODEL), adapter.to_hf(name, parameter.detach(), MODEL), strict=True)
    model = UNet2DModel.from_config(adapter.hf_config(MODEL).values)
    model.load_state_dict(state)
    return model


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


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    config = from_arguments(WorkerConfig, sys.argv[1:])
    device = config.virtual_device()
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_process_groups()
        with device or nullcontext():
            replicated, sharded = unet(), unet()
            apply_fsdp(sharded)
            world = dist.get_world_size()
            trainings = {
                f"DDP{world}": UNetTraining(DistributedDataParallel(replicated, gradient_as_bucket_view=True)),
                f"FSDP2 {world}": UNetTraining(sharded),
            }
        serve({name: repeat_step(each.step, STEPS) for name, each in trainings.items()}, answers, device)
