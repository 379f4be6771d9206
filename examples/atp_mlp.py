"""A torch MLP whose two linear layers are ATP's (ATP paper, Fig. 9).

torchrun --nproc-per-node 4 -m examples.atp_mlp
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from gpt4d.parallel.atp import ATPLinear, gather_features, init_mesh, split_features


def train(device: torch.device, steps: int = 20) -> float:
    """Train on a mesh of all ranks and return the last loss, which is equal on all of them."""
    torch.manual_seed(0)  # the same weights and data on all ranks
    init_mesh((2, dist.get_world_size() // 2), device.type)
    up = ATPLinear(64, 256, [Shard(1), Shard(0)], device=device)
    down = ATPLinear(256, 64, [Shard(0), Shard(1)], device=device)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=1e-2)
    x, target = torch.randn(2, 32, 64).to(device)
    for _ in range(steps):
        out = gather_features(down(nn.functional.gelu(up(split_features(x)))))
        loss = nn.functional.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    loss = train(device)
    if dist.get_rank() == 0:
        print(f"loss after 20 steps: {loss:.6f}")
    dist.destroy_process_group()
