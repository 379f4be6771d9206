"""megatron-core (0.16) on the same GPT-2: its model, tensor parallelism and data parallelism.

Uses its layers without Transformer Engine and Apex, which need CUDA. Its optimizer needs CUDA too: it checks that
gradients are CUDA tensors. Without Apex it wraps torch's AdamW, which is called directly here, with the global norm
computed as megatron does (each shard once, summed over the tensor-parallel group).
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.settings import WorkerConfig
from benchmarks.workers.torch_gpt import adamw, torch_state_dict
from benchmarks.workers.training import OPTIM, Workload, initial_weights, repeat_step, sequences, workload
from gpt4d.config import from_arguments
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch

# name: (tensor-parallel size, gradient reductions overlap with the backward)
SETTINGS = {
    "TP4 × DP2": (4, True),
    "TP4 × DP2, not overlapped": (4, False),
    "TP2 × DP4": (2, True),
    "TP8": (8, True),
    "DP8": (1, True),
}
# The default of at least 40 million is more than a rank's part of the model, so nothing would overlap. Among 256 Ki to
# 4 Mi this was the fastest: by a fifth on cores, and by a tenth for the larger model on virtual devices.
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
    """Patch megatron and torch for CPUs: megatron requests CUDA's current device, and its random state for dropout."""
    from megatron.core import tensor_parallel

    torch.cuda.current_device = lambda: torch.device("cpu")
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)


class MegatronGroups:
    """Process groups for one tensor- and pipeline-parallel size, which megatron keeps in the globals of a module."""

    def __init__(self, tensor: int, pipeline: int = 1):
        from megatron.core import parallel_state

        self.globals = vars(parallel_state)
        self.before = self._values()
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
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
    """Return the mask of attention, which megatron would create on CUDA."""
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


class MegatronTraining:
    def __init__(self, tensor: int, overlapping: bool, work: Workload, weights: dict[str, torch.Tensor]):
        self.state = MegatronGroups(tensor)
        with self.state.current():
            self._build(overlapping, work, weights)

    def _build(self, overlapping: bool, work: Workload, weights: dict[str, torch.Tensor]) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        sizes = work.model
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.replicas = parallel_state.get_data_parallel_group()
        config = transformer_config(sizes, self.group.size())
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=sizes.padded_vocab_size,
            max_sequence_length=sizes.max_positions,
            share_embeddings_and_output_weights=True,
        )
        load(model, torch_state_dict(weights, sizes), self.group, range(sizes.layers))
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=overlapping, bucket_size=BUCKET_PARAMETERS)
        self.model = DistributedDataParallel(config, ddp_config, model)
        self.parameters = list(model.parameters())
        self.counted = [p for p in self.parameters if param_is_not_tensor_parallel_duplicate(p, self.group)]
        self.optimizer = adamw(self.parameters)
        self.ids, self.targets = sequences(self.replicas.rank(), self.replicas.size(), sizes, work.batch)
        self.positions = torch.arange(sizes.max_positions).expand_as(self.ids)
        self.mask = causal_mask(sizes)

    def step(self) -> Callable[[], dict]:
        with self.state.current():
            self.model.zero_grad_buffer()
            loss = self.model(self.ids, self.positions, self.mask, labels=self.targets).mean()
            loss.backward()
            self.model.finish_grad_sync()
            for parameter in self.parameters:
                parameter.grad = parameter.main_grad
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        return self.collect_results

    def _clip(self) -> None:
        norms = torch._foreach_norm([p.grad for p in self.counted])
        square = torch.stack(norms).square().sum()
        dist.all_reduce(square, group=self.group)
        scale = OPTIM.clip_norm / square.sqrt().clamp(min=OPTIM.clip_norm)
        torch._foreach_mul_([p.grad for p in self.parameters], scale)

    def collect_results(self) -> dict:
        dist.all_reduce(self.loss, group=self.replicas)
        return {"loss": self.loss.item() / self.replicas.size()}


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


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    config = from_arguments(WorkerConfig, sys.argv[1:])
    device, work = config.virtual_device(), workload(config.virtual)
    with process_group(Launch.from_environment(), torch.device("cpu")):
        share_process_groups()
        without_cuda()
        with device or nullcontext():
            weights = initial_weights(work.model)
            contenders = {name: MegatronTraining(*setting, work, weights) for name, setting in SETTINGS.items()}
        steps = {name: repeat_step(contender.step, work.steps) for name, contender in contenders.items()}
        serve(steps, answers, device)
