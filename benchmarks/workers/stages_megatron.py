"""megatron-core's pipeline stages: its schedule 1F1B with the tensor and data parallelism of our grid.

Its layers, gradient buffers and their reduction run as in ``train_megatron``, whose notes on a machine without CUDA
hold here too.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.settings import parse_sizes
from benchmarks.workers.stages import StagesConfig
from benchmarks.workers.torch_gpt import adamw, torch_state_dict
from benchmarks.workers.train_megatron import (
    BUCKET_PARAMETERS,
    MegatronGroups,
    causal_mask,
    load,
    transformer_config,
    without_cuda,
)
from benchmarks.workers.training import OPTIM, initial_weights
from gpt4d.config import from_arguments
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


def without_cuda_tensors() -> None:
    """Patch torch for megatron's stages, which move tied weights to CUDA and count tokens in a tensor there."""
    zeros = torch.zeros
    torch.zeros = lambda *size, device=None, **options: zeros(  # type: ignore[assignment]
        *size, device=None if device == "cuda" else device, **options
    )
    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[assignment]


class MegatronPipeline:
    """A training step of this rank's stage."""

    def __init__(self, config: StagesConfig):
        self.config, sizes = config, parse_sizes(config.grid)
        assert sizes.z == 1, "megatron-core has no counterpart of z"
        self.state = MegatronGroups(sizes.x * sizes.y, config.stages)
        with self.state.current():
            self._build()

    def _build(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        sizes, stages = self.config.gpt, self.config.stages
        self.tensor, self.replicas = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )
        self.model_parallel = parallel_state.get_model_parallel_group()
        index = parallel_state.get_pipeline_model_parallel_rank()
        settings = transformer_config(
            sizes, self.tensor.size(), pipeline_model_parallel_size=stages, pipeline_dtype=torch.float32
        )
        settings.batch_p2p_sync = False  # it would synchronize CUDA
        begins, self.ends = index == 0, index == stages - 1
        model = GPTModel(
            settings,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=sizes.padded_vocab_size,
            max_sequence_length=sizes.max_positions,
            pre_process=begins,
            post_process=self.ends,
            share_embeddings_and_output_weights=True,
        )
        layers = range(index * sizes.layers // stages, (index + 1) * sizes.layers // stages)
        self._check_cuts(index, layers)
        load(model, torch_state_dict(initial_weights(sizes), sizes), self.tensor, layers)
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=BUCKET_PARAMETERS)
        self.model = DistributedDataParallel(settings, ddp, model)
        settings.no_sync_func = self.model.no_sync
        settings.grad_sync_func = self.model.start_grad_sync
        settings.finalize_model_grads_func = finalize_model_grads
        self.parameters = list(model.parameters())
        self.counted = [
            p
            for p in self.parameters
            if param_is_not_tensor_parallel_duplicate(p, self.tensor) and not getattr(p, "shared", False)
        ]
        self.optimizer = adamw(self.parameters)
        self.microbatches = self.config.share(self.replicas.rank(), self.replicas.size())
        ids = self.microbatches[0][0]
        self.positions = torch.arange(sizes.max_positions).expand_as(ids)
        self.mask = causal_mask(sizes)

    def _check_cuts(self, index: int, layers: range) -> None:
        plan = self.config.plan("1f1b", "broadcast")
        part = plan.description.part(*plan.stages[index].parts[0])
        assert [*part.blocks] == [*layers], f"stage {index} has the blocks {part.blocks}, megatron-core's {layers}"

    def step(self) -> Callable[[], dict]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with self.state.current():
            self.model.zero_grad_buffer()
            losses = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter(self.microbatches),
                model=[self.model],
                num_microbatches=len(self.microbatches),
                seq_length=self.config.length,
                micro_batch_size=len(self.positions),
            )
            for parameter in self.parameters:
                parameter.grad = parameter.main_grad
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.losses = losses
        return self.collect_results

    def _forward(self, batches: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        ids, targets, _ = next(batches)
        return model(ids, self.positions, self.mask, labels=targets), _mean_loss

    def _clip(self) -> None:
        square = torch.stack(torch._foreach_norm([p.grad for p in self.counted])).square().sum()
        dist.all_reduce(square, group=self.model_parallel)
        scale = OPTIM.clip_norm / square.sqrt().clamp(min=OPTIM.clip_norm)
        torch._foreach_mul_([p.grad for p in self.parameters], scale)

    def collect_results(self) -> dict:
        loss = torch.stack(self.losses).mean() if self.ends else torch.zeros(())
        dist.all_reduce(loss)
        return {"loss": loss.item() / self.replicas.size() / self.tensor.size()}


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = losses.mean()
    return mean, mean.detach()


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    config = from_arguments(StagesConfig, sys.argv[1:])
    device = config.virtual_device()
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_process_groups()
        without_cuda()
        without_cuda_tensors()
        with device or nullcontext():
            contenders = {name: MegatronPipeline(config) for name in config.contenders.split(",")}
        serve({name: contender.step for name, contender in contenders.items()}, answers, device)
