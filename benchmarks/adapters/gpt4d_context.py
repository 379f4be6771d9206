"""gpt4d: forward and backward of a Llama on sequences that the ranks of a grid share."""

import torch

from benchmarks.adapters.gpt4d import Training
from benchmarks.adapters.torch_llama import torch_tensors
from benchmarks.context_steps import ContextWorkerConfig
from benchmarks.gradient_steps import global_tensor, gradient_contender
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.worker import Contender, share_process_groups
from benchmarks.workloads import Workload
from gpt4d.parallel.layout import spec_of
from gpt4d.step import mask_replicas


class SharedSequences(Training):
    """Forward, backward and reduction of gradients on a grid such as ``1x1x1x8/context=8``."""

    def __init__(self, name: str, work: Workload):
        super().__init__(name, work)
        self.model = work.model

    def forward_backward(self) -> torch.Tensor:
        self.loss = self.train_step.runtime.forward_backward([self.microbatch], 1, self.units)
        return self.loss

    def collect_results(self) -> dict:
        self.train_step.optimizer.zero_grad()
        results = super().collect_results()
        return results | {"loss": self.grid.world.all_reduce(mask_replicas(self.loss, self.grid)).item()}

    def gradients(self) -> dict[str, torch.Tensor]:
        gradients = {}
        for name, parameter in self.stage.module.named_parameters():
            assert parameter.grad is not None
            spec = spec_of(parameter)
            place = self.grid.local_slices(spec.shape, spec.layout)
            gradients[name] = global_tensor(parameter.grad, spec.shape, place)
        return torch_tensors(gradients, self.model)


def steps(settings: ContextWorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the steps on each of ``settings.grids``."""
    begin_contender, contenders = share_process_groups(distinct=True), {}
    for name in settings.grids.split(","):
        begin_contender()
        contenders[name] = gradient_contender(name, SharedSequences(name, settings.work), settings.gradients)
    return contenders
