"""torch's pipeline stages on ``TorchGPT``: its schedules 1F1B and interleaved 1F1B, with DDP inside each stage.

Every rank of a stage is a replica, and sends to the rank with the same index in the next stage. As with megatron-core,
the gradients of the tied embedding are summed over the first and the last stage when all microbatches are done.
"""

from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_

from benchmarks.adapters.torch_gpt import TorchGPT, adamw, build_torch_gpt
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.worker import Contender, share_process_groups
from benchmarks.workloads import OPTIM, StagesConfig, initial_weights
from gpt4d.model.parts import Part

SCHEDULES = {
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
}  # and gpt4d's schedule with the same cuts


class TorchPart(nn.Module):
    """A part of a ``TorchGPT``."""

    def __init__(self, model: TorchGPT, part: Part):
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[index] for index in part.blocks)
        if part.begins:
            self.tokens, self.positions = model.tokens, model.positions
        if part.ends:
            self.norm, self.head = model.norm, model.head
        self.begins, self.ends = part.begins, part.ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.begins:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.ends else x


class TorchPipeline:
    """A training step of this rank's stage."""

    def __init__(self, name: str, config: StagesConfig):
        plan = config.plan(SCHEDULES[name])
        rank, size = dist.get_rank(), dist.get_world_size() // config.stages
        index, replica = divmod(rank, size)
        columns = [dist.new_group([*range(place, dist.get_world_size(), size)]) for place in range(size)]
        rows = [dist.new_group([*range(stage * size, (stage + 1) * size)]) for stage in range(config.stages)]
        last = size * (config.stages - 1)
        ends = [dist.new_group([place, last + place]) for place in range(size)]
        self.pipeline, self.tied = columns[replica], ends[replica]
        self.index, self.replicas, self.samples = index, size, config.samples // size
        model = build_torch_gpt(initial_weights(config.gpt), config.gpt)
        parts = [TorchPart(model, plan.description.part(*bounds)) for bounds in plan.stages[index].parts]
        self.parameters = list(chain.from_iterable(part.parameters() for part in parts))
        self.embedding = next((p.tokens.weight for p in parts if p.begins), None)
        self.head = next((p.head.weight for p in parts if p.ends), None)
        shape = self.samples, config.length
        ids = torch.zeros(shape, dtype=torch.long)
        hidden = torch.zeros(*shape, config.hidden, requires_grad=True)  # so that its gradient crosses too
        logits = torch.zeros(*shape, config.gpt.padded_vocab_size, requires_grad=True)
        stages = [
            PipelineStage(
                DistributedDataParallel(part, process_group=rows[index]) if size > 1 else part,
                index + chunk * config.stages,
                plan.virtual_stages,
                torch.device("cpu"),
                input_args=ids if part.begins else hidden,
                output_args=logits if part.ends else hidden,
                group=self.pipeline,
            )
            for chunk, part in enumerate(parts)
        ]
        count = config.microbatches
        if len(stages) > 1:
            self.schedule = ScheduleInterleaved1F1B(stages, count, loss_fn=_loss)
        else:
            self.schedule = Schedule1F1B(stages[0], count, loss_fn=_loss)
        self.optimizer = adamw(self.parameters)
        share = config.share(replica, size)
        self.ids, self.targets = (torch.cat(tensors) for tensors in list(zip(*share, strict=True))[:2])

    def step(self) -> Callable[[], dict]:
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *([self.ids] if self.embedding is not None else []),
            **({"target": self.targets, "losses": losses} if self.head is not None else {}),
            return_outputs=False,
        )
        self._add_gradients_of_tied()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses = [loss.detach() for loss in losses]
        return self.collect_results

    def _add_gradients_of_tied(self) -> None:
        for weight in (self.embedding, self.head):
            if weight is not None:
                dist.all_reduce(weight.grad, group=self.tied)

    def _clip(self) -> None:
        counted = [p for p in self.parameters if p is not self.head]  # the first stage counts the tied weight
        square = torch.stack(torch._foreach_norm([p.grad for p in counted])).square().sum()
        dist.all_reduce(square, group=self.pipeline)
        clip_grads_with_norm_(self.parameters, OPTIM.clip_norm, square.sqrt())

    def collect_results(self) -> dict:
        loss = torch.stack(self.losses).mean() if self.losses else torch.zeros(())
        dist.all_reduce(loss)
        return {"loss": loss.item() / self.replicas}


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def stages(settings: StagesConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    share_process_groups()
    return {name: Contender(TorchPipeline(name, settings).step) for name in settings.contenders.split(",")}
