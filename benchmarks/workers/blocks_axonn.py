"""AxoNN's blocks (axonn 0.2.0) on its own 2×2×2 grid: its overlaps off, and all of them on.

Its linear layers as they are, in expert mode: activations stay split between layers, as ours do. It has no layer norm
for split activations. With ours it computes the same function as our blocks; the code its authors published
(Megatron-AxoNN) takes the norm of each rank's part by itself, which communicates nothing and is another function, and
is here to show what that makes of the time.

Checkpointing is torch's reentrant kind: under the other one AxoNN loses its weights' gradients.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.interleave import redirect_stdout_for_answers, serve, share_groups
from benchmarks.workers import blocks
from benchmarks.workers.blocks import HEADS, HIDDEN, LAYERS, SIZES
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.norm import LayerNorm
from gpt4d.parallel.weights import WeightStream
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


def without_cuda() -> None:
    """AxoNN asks for CUDA by name where any device would do. To be called before its ``init``.

    It asks for NCCL too; ``share_groups`` has made groups all of one kind.
    """
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    # It gathers parameters as they are; gloo's gather writes on a copy that autograd watches over, and refuses.
    gather = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda output, shard, **how: gather(output, shard.detach(), **how)
    from axonn.intra_layer import fully_connected, overlap_communication

    fully_connected.initialize_params = partial(fully_connected.initialize_params, init_device="cpu")

    def clear_handles() -> None:
        # There the end of the reduce-scatters is a synchronisation of the device.
        for handle in overlap_communication.handles:
            handle.wait()
        overlap_communication.handles = []

    overlap_communication.clear_handles = clear_handles


class Block(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]):
        super().__init__()
        from axonn.intra_layer import Linear

        # In the order of their use, which is the one that AxoNN gathers ahead in.
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

    def load(self, number: int, whole: dict[str, torch.Tensor]) -> None:
        """Our initial weights. AxoNN's are [out, in]; queries, keys and values of a rank's heads lie side by side."""

        def per_rank(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.unflatten(-1, (SIZES.x, -1)).movedim(-2, -3).flatten(-3)

        for theirs, ours in (
            (self.qkv, "attention.qkv"),
            (self.output, "attention.output"),
            (self.up, "mlp.up"),
            (self.down, "mlp.down"),
        ):
            weight, bias = (whole[f"blocks.{number}.{ours}.{kind}"] for kind in ("weight", "bias"))
            if theirs is self.qkv:
                weight, bias = per_rank(weight), per_rank(bias)
            theirs.load_state_dict({"weight": weight.t().contiguous(), "bias": bias})


class Blocks:
    def __init__(self, grid: Grid, whole: dict[str, torch.Tensor], overlapping: bool, norm: Callable[[], nn.Module]):
        self.overlapping = overlapping
        self.blocks = nn.ModuleList(Block(norm) for _ in range(LAYERS))
        for number, block in enumerate(self.blocks):
            block.load(number, whole)
        self.inputs, self.upstream = blocks.ends(grid.z.index, grid.y.index)
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
                # With its cache, a recomputation finds its weights where the forward left them.
                x = checkpoint(block, x, self.overlapping, use_reentrant=True, preserve_rng_state=False)
            x.backward(self.upstream)
        return self.told

    def told(self) -> dict:
        self.norms_axis.traffic.read()
        matrices = [p for name, p in self.blocks.named_parameters() if name.endswith("weight") and "norm" not in name]
        norms = blocks.take_gradient_norms(self.inputs, matrices)
        self.blocks.zero_grad(set_to_none=True)
        return norms


if __name__ == "__main__":
    answers = redirect_stdout_for_answers()
    whole = blocks.whole_weights()
    launch = Launch.from_environment()
    with process_group(launch, torch.device("cpu")):
        share_groups()
        grid = Grid(SIZES)
        # What splits the residual stream's features is AxoNN's innermost axis and the second of ours.
        grid.x, grid.y = grid.y, grid.x
        without_cuda()
        from axonn import axonn

        axonn.init(G_intra_r=SIZES.x, G_intra_c=SIZES.y, G_intra_d=SIZES.z, gpus_per_node=launch.local_world_size)
        exact = partial(LayerNorm, WeightStream(grid), HIDDEN)
        of_parts = partial(nn.LayerNorm, HIDDEN // SIZES.y)
        contenders = {
            "none": Blocks(grid, whole, False, exact),
            "all": Blocks(grid, whole, True, exact),
            "all, norms of parts": Blocks(grid, whole, True, of_parts),
        }
        for contender in contenders.values():  # LayerNorm leaves its values unset
            for name, parameter in contender.blocks.named_parameters():
                if "norm" in name:
                    nn.init.constant_(parameter, float(name.endswith("weight")))
        serve({name: contender.step for name, contender in contenders.items()}, answers)
