"""megatron-core (0.16): forward and backward of layers of a mixture of experts, with its all-to-all dispatcher."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.adapters.megatron import MegatronGroups, without_cuda
from benchmarks.gradient_steps import global_tensor, gradient_contender
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.moe_steps import MoeConfig, MoeWork, MoeWorkerConfig, token_tensors
from benchmarks.worker import Contender, share_process_groups

_TENSOR_SIZES = 1, 2  # tensor-parallel sizes, which also split each expert


def without_copies_to_host() -> None:
    """Patch megatron and torch for the dispatcher, which copies numbers of rows to the host on a stream of CUDA.

    megatron's router also reads a name that is undefined without Transformer Engine.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = SimpleNamespace(
        wait_stream=lambda other: None, record_event=lambda: SimpleNamespace(synchronize=lambda: None)
    )
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, misc]
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and tensor is not None else tensor
    )
    moe_utils.te_general_gemm = None


def with_unequal_parts() -> None:
    """Patch torch for gloo, which can neither gather nor reduce-scatter parts of unequal sizes: by all-to-alls."""
    gather = dist.all_gather

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        if len({len(part) for part in parts}) == 1:
            gather(parts, own, group)
            return
        out = own.new_empty((sum(map(len, parts)), *own.shape[1:]))
        sent = [len(own)] * len(parts)
        dist.all_to_all_single(out, torch.cat([own] * len(parts)), list(map(len, parts)), sent, group=group)
        torch._foreach_copy_(parts, list(out.split(list(map(len, parts)))))

    def reduce_scatter(own: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
        received = own.new_empty((len(parts) * len(own), *own.shape[1:]))
        sent = list(map(len, parts))
        dist.all_to_all_single(received, torch.cat(parts), [len(own)] * len(parts), sent, group=group)
        torch.sum(received.unflatten(0, (len(parts), len(own))), 0, out=own)

    torch.distributed.all_gather, torch.distributed.reduce_scatter = all_gather, reduce_scatter


def mixture_config(config: MoeConfig, experts: int, tensor: int) -> Any:
    """Return megatron's configuration of the layers."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=8,
        ffn_hidden_size=config.inner,
        moe_ffn_hidden_size=config.inner,
        num_moe_experts=config.experts,
        moe_router_topk=config.per_token,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        calculate_per_token_loss=True,  # gradients are not averaged
    )


class Mixtures:
    """The layers with an expert-parallel and a tensor-parallel size."""

    def __init__(self, experts: int, tensor: int, work: MoeWork):
        self.state = MegatronGroups(tensor, experts=experts)
        with self.state.current():
            self._build(experts, tensor, work)

    def _build(self, experts: int, tensor: int, work: MoeWork) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe.router_replay import RouterReplayAction
        from megatron.core.transformer.spec_utils import build_module

        self.work, config = work, work.config
        self.config = mixture_config(config, experts, tensor)
        spec = get_moe_module_spec(use_te=False, num_experts=config.experts)
        layers = [build_module(spec, config=self.config, layer_number=1 + n) for n in range(config.layers or 0)]
        own, part = config.experts // experts, config.inner // tensor
        first = parallel_state.get_expert_model_parallel_rank() * own
        start = parallel_state.get_expert_tensor_parallel_rank() * part
        self.own, self.columns = slice(first, first + own), slice(start, start + part)
        tokens = work.place(dist.get_rank(), dist.get_world_size())
        for index, layer in enumerate(layers):
            self._load(layer, index)
            layer.router.router_replay.set_target_indices(work.routes[tokens, index].contiguous())
            layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self.layers = torch.nn.ModuleList(layers)
        self.model = DistributedDataParallel(self.config, DistributedDataParallelConfig(), self.layers)
        self.place = tokens, slice(None)
        self.inputs = work.inputs[tokens].clone().requires_grad_()
        self.upstream = work.upstream[tokens]

    @torch.no_grad()
    def _load(self, layer: Any, index: int) -> None:
        weights = self.work.weights
        layer.router.weight.copy_(weights[f"{index}.router"].t())
        for expert, module in zip(range(self.own.start, self.own.stop), layer.experts.local_experts, strict=True):
            up, down = weights[f"{index}.up"][expert], weights[f"{index}.down"][expert]
            module.linear_fc1.weight.copy_(up[..., self.columns].flatten(1).t())
            module.linear_fc2.weight.copy_(down[self.columns].t())

    def forward_backward(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        with self.state.current():
            self.model.zero_grad_buffer()
            x = self.inputs.unsqueeze(1)
            for layer in self.layers:
                out, _ = layer(x)
                x = x + out
            self.output = x.squeeze(1)
            self.output.backward(self.upstream)
            finalize_model_grads([self.model])

    def collect_results(self) -> dict:
        self.inputs.grad = None
        return {}

    def gradients(self) -> dict[str, torch.Tensor]:
        found = token_tensors(self.output, self.inputs, self.work, self.place)
        for index, layer in enumerate(self.layers):
            experts = layer.experts.local_experts
            found[f"{index}.router"] = layer.router.weight.main_grad.t().contiguous()
            up = torch.stack([e.linear_fc1.weight.main_grad.t().unflatten(1, (2, -1)) for e in experts])
            down = torch.stack([e.linear_fc2.weight.main_grad.t() for e in experts])
            weights = self.work.weights
            everything = slice(None)
            place = self.own, everything, everything, self.columns
            found[f"{index}.up"] = global_tensor(up, weights[f"{index}.up"].shape, place)
            found[f"{index}.down"] = global_tensor(down, weights[f"{index}.down"].shape, (self.own, self.columns))
        return found


def steps(settings: MoeWorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the steps with each tensor-parallel size. Expert parallelism takes the remaining ranks."""
    share_process_groups()
    without_cuda()
    without_copies_to_host()
    with_unequal_parts()
    contenders = {}
    for tensor in _TENSOR_SIZES:
        experts = dist.get_world_size() // tensor
        name = f"EP{experts}" + (f" × TP{tensor}" if tensor > 1 else "")
        contenders[name] = gradient_contender(name, Mixtures(experts, tensor, settings.work), settings.gradients)
    return contenders
