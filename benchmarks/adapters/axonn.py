"""AxoNN's blocks (axonn 0.2.0) on its own grid, with its overlaps all off and all on.

Uses its linear layers unmodified, in expert mode: activations stay split between layers, as in gpt4d. AxoNN has no
layer norm for split activations. With gpt4d's layer norm it computes the same function as gpt4d's blocks. The
authors' code (Megatron-AxoNN) normalizes each rank's shard separately. This needs no communication but is a different
function; it is included to show the effect on the time.

Checkpointing is torch's reentrant variant: with the non-reentrant variant, AxoNN loses its weights' gradients.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.settings import WorkerConfig, parse_sizes
from benchmarks.worker import Contender, share_process_groups
from benchmarks.workloads import Workload, block_workload, initial_weights, inputs_and_upstream, take_gradient_norms
from gpt4d.config import GridSizes
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.parallel.context import Context
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layers.norm import LayerNormSpec
from gpt4d.parallel.sharded_weights import ShardedWeights
from gpt4d.runtime.launch import Launch


def without_cuda() -> None:
    """Patch AxoNN and torch so that AxoNN, which requests CUDA by name, runs on CPUs. Call it before its ``init``.

    AxoNN also requests NCCL. After ``share_process_groups`` all groups have the default backend.
    """
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    # AxoNN gathers parameters directly, but gloo's gather writes to a copy that autograd tracks, which raises an error.
    gather = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda output, shard, **options: gather(output, shard.detach(), **options)
    from axonn.intra_layer import fully_connected, overlap_communication

    fully_connected.initialize_params = partial(fully_connected.initialize_params, init_device="cpu")

    def clear_handles() -> None:
        # The original synchronizes the CUDA device to wait for the reduce-scatters.
        for handle in overlap_communication.handles:
            handle.wait()
        overlap_communication.handles = []

    overlap_communication.clear_handles = clear_handles


class GlobalNorm(nn.Module):
    """Our norm of all features, alone: the block adds to the stream itself."""

    def __init__(self, weights: ShardedWeights, features: int):
        super().__init__()
        self.norm = Layer(LayerNormSpec(features), weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)[1]


class AxonnBlock(nn.Module):
    def __init__(self, model: GPT2Config, sizes: GridSizes, norm: Callable[[], nn.Module]):
        super().__init__()
        from axonn.intra_layer import Linear

        self.sizes, self.local_heads, hidden = sizes, model.heads // sizes.x, model.hidden
        # AxoNN prefetches in the order of construction, so this is the order of use.
        self.attention_norm = norm()
        self.qkv = Linear(hidden, 3 * hidden, expert_mode=True)
        self.output = Linear(hidden, hidden, expert_mode=True, transpose=True)
        self.mlp_norm = norm()
        self.up = Linear(hidden, 4 * hidden, expert_mode=True)
        self.down = Linear(4 * hidden, hidden, expert_mode=True, transpose=True)

    def forward(self, x: torch.Tensor, cache: bool) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x), cache)
        q, k, v = qkv.unflatten(-1, (3, self.local_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2), cache)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x), cache), approximate="tanh"), cache)

    def load(self, index: int, weights: dict[str, torch.Tensor]) -> None:
        """Load our initial weights of block ``index``.

        AxoNN's are [out, in], and the queries, keys and values of a rank's heads are adjacent.
        """

        def group_by_rank(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(-1, (self.sizes.x, -1)).movedim(-2, -3).flatten(-3)

        for theirs, ours in (
            (self.qkv, "attention.qkv"),
            (self.output, "attention.output"),
            (self.up, "mlp.up"),
            (self.down, "mlp.down"),
        ):
            weight, bias = (weights[f"blocks.{index}.{ours}.{kind}"] for kind in ("weight", "bias"))
            if theirs is self.qkv:
                weight, bias = group_by_rank(weight), group_by_rank(bias)
            theirs.load_state_dict({"weight": weight.t().contiguous(), "bias": bias})


class AxonnBlocks:
    def __init__(
        self,
        grid: Grid,
        work: Workload,
        weights: dict[str, torch.Tensor],
        overlapping: bool,
        norm: Callable[[], nn.Module],
    ):
        self.grid, self.overlapping = grid, overlapping
        self.blocks = nn.ModuleList(AxonnBlock(work.model, grid.sizes, norm) for _ in range(work.model.layers))
        for index, block in enumerate(self.blocks):
            block.load(index, weights)
        self.inputs, self.upstream = inputs_and_upstream(work, grid.sizes, grid.z.index, grid.y.index)

    def step(self) -> Callable[[], dict]:
        from axonn.intra_layer import optimize_communication

        communication = nullcontext()
        if self.overlapping:
            communication = optimize_communication(
                overlap_all_reduce=True,
                overlap_reduce_scatter=True,
                overlap_all_gather=True,
                model_object_for_overlapping_allgathers=self.blocks,
            )
        with communication:
            x = self.inputs
            for block in self.blocks:
                # With the cache, a recomputation reuses the weights gathered in the forward.
                x = checkpoint(block, x, self.overlapping, use_reentrant=True, preserve_rng_state=False)
            x.backward(self.upstream)
        return self.collect_results

    def collect_results(self) -> dict:
        self.grid.y.traffic.read()
        matrices = [p for name, p in self.blocks.named_parameters() if name.endswith("weight") and "norm" not in name]
        norms = take_gradient_norms(self.inputs, matrices, self.grid.sizes)
        self.blocks.zero_grad(set_to_none=True)
        return norms


def blocks(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    from axonn import axonn

    share_process_groups()
    sizes, ranks_per_host = parse_sizes(settings.grids), Launch.from_environment().local_world_size
    # The axis that splits the residual stream's features is AxoNN's innermost, but gpt4d's second.
    grid = Grid(GridSizes(sizes.y, sizes.x, sizes.z))
    grid.x, grid.y, grid.sizes = grid.y, grid.x, sizes
    without_cuda()
    axonn.init(G_intra_r=sizes.x, G_intra_c=sizes.y, G_intra_d=sizes.z, gpus_per_node=ranks_per_host)
    work = block_workload(settings.virtual)
    build = partial(AxonnBlocks, grid, work, initial_weights(work.model))
    global_norm = partial(GlobalNorm, ShardedWeights(Context(grid, torch.float32)), work.model.hidden)
    shard_norm = partial(nn.LayerNorm, work.model.hidden // sizes.y)
    trainings = {
        "none": build(False, global_norm),
        "all": build(True, global_norm),
        "all, norms of parts": build(True, shard_norm),
    }
    for training in trainings.values():  # gpt4d's LayerNorm does not initialize its parameters
        for name, parameter in training.blocks.named_parameters():
            if "norm" in name:
                nn.init.constant_(parameter, float(name.endswith("weight")))
    return {name: Contender(training.step) for name, training in trainings.items()}
