"""megatron-core (0.16) on the same GPT-2: its model, tensor and data parallelism, and pipeline stages (1F1B).

Uses its layers without Transformer Engine and Apex, which need CUDA. Its optimizer needs CUDA too: it checks that
gradients are CUDA tensors. Without Apex it wraps torch's AdamW, which is called directly here, with the global norm
computed as megatron does (each shard once, summed over the tensor-parallel group).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.adapters.torch_gpt import adamw, torch_state_dict
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.settings import WorkerConfig, parse_sizes
from benchmarks.worker import Contender, repeat_step, share_process_groups
from benchmarks.workloads import (
    OPTIM,
    OneDeviceConfig,
    StagesConfig,
    Workload,
    gpt_workload,
    initial_weights,
    with_states,
)
from gpt4d.model.gpt2 import GPT2Config

# name: (tensor-parallel size, gradient reductions overlap with the backward)
SETTINGS = {
    "TP4 × DP2": (4, True),
    "TP4 × DP2, not overlapped": (4, False),
    "TP2 × DP4": (2, True),
    "TP8": (8, True),
    "DP8": (1, True),
}
# The default of at least 40 million is more than a rank's part of the model, and prevents overlap. Among 256 Ki to 4 Mi
# this was the fastest: by a fifth on cores, and by a tenth for the larger model on virtual devices.
BUCKET_PARAMETERS = 256 << 10

_NAMES = {
    "head.weight": "output_layer.weight",  # tied: only a last stage that is not the first has it
    "tokens.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "norm": "decoder.final_layernorm",
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "output": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}


def without_cuda() -> None:
    """Patch megatron and torch for CPUs: megatron requests CUDA's current device, and its random state for dropout.

    Its stages move tied weights to CUDA and count tokens in a tensor there.
    """
    from megatron.core import tensor_parallel

    zeros = torch.zeros
    torch.zeros = lambda *size, device=None, **options: zeros(  # type: ignore[assignment]
        *size, device=None if device == "cuda" else device, **options
    )
    torch.Tensor.cuda = lambda tensor: tensor  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)


class MegatronGroups:
    """Process groups for tensor-, pipeline- and expert-parallel sizes, which megatron keeps in a module's globals."""

    def __init__(self, tensor: int, pipeline: int = 1, experts: int = 1):
        from megatron.core import parallel_state

        self.globals = vars(parallel_state)
        self.before = self._values()
        parallel_state.initialize_model_parallel(
            tensor, pipeline, expert_model_parallel_size=experts, create_gloo_process_groups=False
        )
        self.values = self._values()
        self.globals.update(self.before)

    def _values(self) -> dict:
        return {name: value for name, value in self.globals.items() if name.startswith("_") and name.isupper()}

    @contextmanager
    def current(self):
        self.globals.update(self.values)
        try:
            yield
        finally:
            self.globals.update(self.before)


def transformer_config(sizes: GPT2Config, tensor: int, **options: Any):
    """Return megatron's configuration of a GPT-2 with a tensor-parallel size."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        layernorm_epsilon=sizes.norm_epsilon,
        activation_func=partial(F.gelu, approximate="tanh"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **options,
    )


def causal_mask(sizes: GPT2Config) -> torch.Tensor:
    """Return the mask of attention, which megatron itself creates on CUDA."""
    future = torch.ones(sizes.max_positions, sizes.max_positions, dtype=torch.bool).triu_(1)
    return future[None, None]


def load(model: torch.nn.Module, state: Mapping[str, torch.Tensor], group: dist.ProcessGroup, layers: range) -> None:
    """Load what ``model``, which has these layers, has of a state dict of ``TorchGPT``.

    As in ``TorchGPT``, each head's query, key and value are adjacent.
    """
    index, parameters = group.rank(), dict(model.named_parameters())
    for name, tensor in state.items():
        if (parameter := parameters.pop(_megatron_name(name, layers.start), None)) is None:
            continue  # it is on another stage, or tied
        if getattr(parameter, "tensor_model_parallel", False):
            tensor = tensor.chunk(group.size(), parameter.partition_dim)[index]
        with torch.no_grad():
            parameter.copy_(tensor)
    assert not parameters, f"parameters without a value: {', '.join(parameters)}"


class MegatronStage:
    """A stage of megatron-core's GPT-2 with its gradient buffers and its optimizer; one stage has the entire model."""

    def __init__(self, sizes: GPT2Config, tensor: int, stages: int = 1, overlapping: bool = True):
        self.state = MegatronGroups(tensor, stages)
        with self.state.current():
            self._build(sizes, stages, overlapping)

    def _build(self, sizes: GPT2Config, stages: int, overlapping: bool) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        self.group = parallel_state.get_tensor_model_parallel_group()
        self.replicas = parallel_state.get_data_parallel_group()
        self.model_parallel = parallel_state.get_model_parallel_group()
        self.index = parallel_state.get_pipeline_model_parallel_rank()
        self.ends = self.index == stages - 1
        of_stages = {"pipeline_model_parallel_size": stages, "pipeline_dtype": torch.float32} if stages > 1 else {}
        self.config = transformer_config(sizes, self.group.size(), **of_stages)
        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=sizes.padded_vocab_size,
            max_sequence_length=sizes.max_positions,
            pre_process=self.index == 0,
            post_process=self.ends,
            share_embeddings_and_output_weights=True,
        )
        self.layers = range(self.index * sizes.layers // stages, (self.index + 1) * sizes.layers // stages)
        load(model, torch_state_dict(initial_weights(sizes), sizes), self.group, self.layers)
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlapping, bucket_size=BUCKET_PARAMETERS)
        self.model = DistributedDataParallel(self.config, ddp, model)
        self.parameters = list(model.parameters())
        self.counted = [
            p
            for p in self.parameters
            if param_is_not_tensor_parallel_duplicate(p, self.group) and not getattr(p, "shared", False)
        ]
        self.optimizer = adamw(self.parameters)
        self.mask = causal_mask(sizes)

    def update(self) -> None:
        """Clip the reduced gradients and update the parameters."""
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad
        square = torch.stack(torch._foreach_norm([p.grad for p in self.counted])).square().sum()
        dist.all_reduce(square, group=self.model_parallel)
        scale = OPTIM.clip_norm / square.sqrt().clamp(min=OPTIM.clip_norm)
        torch._foreach_mul_([p.grad for p in self.parameters], scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors that exist between steps."""
        gradients = (parameter.main_grad for parameter in self.parameters)
        return with_states(chain(self.parameters, gradients), self.optimizer)


class MegatronTraining(MegatronStage):
    """A training step of the entire model."""

    def __init__(self, tensor: int, overlapping: bool, work: Workload):
        super().__init__(work.model, tensor, overlapping=overlapping)
        self.ids, self.targets, _ = work.share(self.replicas.rank(), self.replicas.size())
        self.positions = torch.arange(work.model.max_positions).expand_as(self.ids)

    def step(self) -> Callable[[], dict]:
        with self.state.current():
            self.model.zero_grad_buffer()
            loss = self.model(self.ids, self.positions, self.mask, labels=self.targets).mean()
            loss.backward()
            self.model.finish_grad_sync()
            self.update()
        self.loss = loss.detach()
        return self.collect_results

    def collect_results(self) -> dict:
        dist.all_reduce(self.loss, group=self.replicas)
        return {"loss": self.loss.item() / self.replicas.size()}


class MegatronPipeline(MegatronStage):
    """A training step of this rank's stage by megatron-core's schedule 1F1B."""

    def __init__(self, config: StagesConfig):
        sizes = parse_sizes(config.grid)
        assert sizes.z == 1, "megatron-core has no counterpart of z"
        self.length = config.length
        super().__init__(config.gpt, sizes.x * sizes.y, config.stages)
        self._check_cuts(config)
        from megatron.core.distributed import finalize_model_grads

        self.config.batch_p2p_sync = False  # it synchronizes CUDA
        self.config.no_sync_func = self.model.no_sync
        self.config.grad_sync_func = self.model.start_grad_sync
        self.config.finalize_model_grads_func = finalize_model_grads
        self.microbatches = config.share(self.replicas.rank(), self.replicas.size())
        self.positions = torch.arange(config.length).expand_as(self.microbatches[0][0])

    def _check_cuts(self, config: StagesConfig) -> None:
        plan = config.plan("1f1b")
        blocks = plan.description.part(*plan.stages[self.index].parts[0]).blocks
        assert [*blocks] == [*self.layers], f"stage {self.index} has the blocks {blocks}, megatron-core's {self.layers}"

    def step(self) -> Callable[[], dict]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with self.state.current():
            self.model.zero_grad_buffer()
            self.losses = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=iter(self.microbatches),
                model=[self.model],
                num_microbatches=len(self.microbatches),
                seq_length=self.length,
                micro_batch_size=len(self.positions),
            )
            self.update()
        return self.collect_results

    def _forward(self, batches: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        ids, targets, _ = next(batches)
        return model(ids, self.positions, self.mask, labels=targets), _mean_loss

    def collect_results(self) -> dict:
        loss = torch.stack(self.losses).mean() if self.ends else torch.zeros(())
        dist.all_reduce(loss)
        return {"loss": loss.item() / self.replicas.size() / self.group.size()}


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = losses.mean()
    return mean, mean.detach()


def _megatron_name(name: str, first_layer: int) -> str:
    """Map ``blocks.2.qkv.weight`` to ``decoder.layers.2.self_attention.linear_qkv.weight``, for example.

    Layers count from the first one of a stage.
    """
    if name in _NAMES:
        return _NAMES[name]
    layer, _, kind = name.rpartition(".")
    if layer.startswith("blocks."):
        _, index, layer = layer.split(".")
        return f"decoder.layers.{int(index) - first_layer}.{_NAMES[layer]}.{kind}"
    return f"{_NAMES[layer]}.{kind}"


def training(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    share_process_groups()
    without_cuda()
    work = gpt_workload(settings)
    trainings = {name: MegatronTraining(*setting, work) for name, setting in SETTINGS.items()}
    return {name: Contender(repeat_step(training.step, work.steps)) for name, training in trainings.items()}


def stages(settings: StagesConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    share_process_groups()
    without_cuda()
    return {name: Contender(MegatronPipeline(settings).step) for name in settings.contenders.split(",")}


def one_device(config: OneDeviceConfig) -> dict[str, MegatronTraining]:
    """Return the training of ``benchmarks.experiments.one_device``."""
    without_cuda()
    return {"eager": MegatronTraining(parse_sizes(config.grid).x, True, config.work)}
