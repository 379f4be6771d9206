"""AxoNN's blocks (axonn 0.2.0) on its own 2×2×2 grid, with its overlaps all off and all on.

Uses its linear layers unmodified, in expert mode: activations stay split between layers, as ours do. AxoNN has no layer
norm for split activations. With our layer norm it computes the same function as our blocks. The code that its authors
published (Megatron-AxoNN) normalizes each rank's shard separately, which needs no communication but is a different
function; it is included to show the effect on the time.

Checkpointing is torch's reentrant variant: with the other one, AxoNN loses its weights' gradients.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_process_groups
from benchmarks.workers import blocks
from benchmarks.workers.blocks import HEADS, HIDDEN, LAYERS, MODEL, SIZES
from benchmarks.workers.training import initial_weights
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.norm import LayerNorm
from gpt4d.parallel.weights import WeightStream
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


def without_cuda() -> None:
    """Patch AxoNN and torch so that AxoNN, which requests CUDA by name, runs on CPUs. Call it before its ``init``.

    AxoNN requests NCCL too; after ``share_process_groups`` all groups have the default backend.
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


class AxonnBlock(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        from axonn.intra_layer import Linear

        # AxoNN prefetches in the order of construction, so this is the order of use.
        self.attention_norm = norm()
        self.qkv = Linear(HIDDEN, 3 * HIDDEN, expert_mode=True)
        self.output = Linear(HIDDEN, HIDDEN, expert_mode=True, transpose=True)
        self.mlp_norm = norm()
        self.up = Linear(HIDDEN, 4 * HIDDEN, expert_mode=True)
        self.down = Linear(4 * HIDDEN, HIDDEN, expert_mode=True, transpose=True)

    def forward(self, x: torch.Tensor, cache: bool) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x), cache)
        q, k, v = qkv.unflatten(-1, (3, HEADS // SIZES.x, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2), cache)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x), cache), approximate="tanh"), cache)

    def load(self, index: int, weights: dict[str, torch.Tensor]) -> None:
        """Load our initial weights of block ``index``.

        AxoNN's are [out, in], and the queries, keys and values of a rank's heads are adjacent.
        """

        def group_by_rank(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(-1, (SIZES.x, -1)).movedim(-2, -3).flatten(-3)

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
    def __init__(self, grid: Grid, weights: dict[str, torch.Tensor], overlapping: bool, norm: Callable[[], nn.Module]):
        self.overlapping = overlapping
        self.blocks = nn.ModuleList(AxonnBlock(norm) for _ in range(LAYERS))
        for index, block in enumerate(self.blocks):
            block.load(index, weights)
        self.inputs, self.upstream = blocks.inputs_and_upstream(grid.z.index, grid.y.index)
        self.norms_axis = grid.y

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
        self.norms_axis.traffic.read()
        matrices = [p for name, p in self.blocks.named_parameters() if name.endswith("weight") and "norm" not in name]
        norms = blocks.take_gradient_norms(self.inputs, matrices)
        self.blocks.zero_grad(set_to_none=True)
        return norms


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    weights = initial_weights(MODEL)
    launch = Launch.from_environment()
    with process_group(launch, torch.device("cpu")):
        share_process_groups()
        grid = Grid(SIZES)
        # The axis that splits the residual stream's features is AxoNN's innermost, but our second.
        grid.x, grid.y = grid.y, grid.x
        without_cuda()
        from axonn import axonn

        axonn.init(G_intra_r=SIZES.x, G_intra_c=SIZES.y, G_intra_d=SIZES.z, gpus_per_node=launch.local_world_size)
        global_norm = partial(LayerNorm, WeightStream(grid), HIDDEN)
        shard_norm = partial(nn.LayerNorm, HIDDEN // SIZES.y)
        contenders = {
            "none": AxonnBlocks(grid, weights, False, global_norm),
            "all": AxonnBlocks(grid, weights, True, global_norm),
            "all, norms of parts": AxonnBlocks(grid, weights, True, shard_norm),
        }
        for contender in contenders.values():  # our LayerNorm does not initialize its parameters
            for name, parameter in contender.blocks.named_parameters():
                if "norm" in name:
                    nn.init.constant_(parameter, float(name.endswith("weight")))
        serve({name: contender.step for name, contender in contenders.items()}, answers)
