"""gpt4d: training steps of a GPT-2 or a U-Net, and blocks with some overlaps on (4D paper, Fig. 3)."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn

from benchmarks.adapters.gpt4d_stages import stages  # noqa: F401 – a function of this adapter
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.settings import WorkerConfig, parse_grid, parse_sizes
from benchmarks.worker import Contender, repeat_step, share_process_groups
from benchmarks.workloads import (
    OPTIM,
    UNET,
    OneDeviceConfig,
    Workload,
    block_workload,
    gpt_workload,
    inputs_and_upstream,
    take_gradient_norms,
    with_states,
)
from gpt4d.config import Config, OptimConfig, OverlapConfig, ParallelConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel import compile
from gpt4d.parallel.engine.interleave import Node, run_graph
from gpt4d.parallel.engine.prefetch import weight_order
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import TokenIndex, own_segments
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.parallel.pipeline.schedule import single_stage
from gpt4d.parallel.stage_plan import ranks_in_grid_order
from gpt4d.plan import one_stage
from gpt4d.step import TrainStep, build_stage

# name: (all-reduce, reduce-scatter, all-gather, cached blocks)
OVERLAPS = {
    "none": (False, False, False, 0),
    "+OAR": (True, False, False, 0),
    "+ORS": (True, True, False, 0),
    "+OAG": (True, True, True, 0),
    "+cache": (True, True, True, "all"),
}


class Training:
    """The trainer's optimizer step on a grid such as ``4x1x2x1/chunks=2``, with a rank's share of the batch at once.

    Args:
        name: a grid with settings (``benchmarks.settings.parse_grid``).
        work: model and batch.
        device: the rank's device.
        compiled: whether functions are compiled; None: the default of the device.
        optim: the optimizer's settings, without the sharding of its states.
        train: fields of TrainConfig.
    """

    def __init__(
        self,
        name: str,
        work: Workload,
        device: torch.device | None = None,
        compiled: bool | None = None,
        optim: OptimConfig = OPTIM,
        **train: int | str,
    ):
        self.device, self.compiled = device or torch.device("cpu"), compiled
        sizes, parallel, self.sharded = parse_grid(name)
        ranks = ranks_in_grid_order(sizes, parallel.get("rank_order"))
        self.grid, self.units = Grid(sizes, ranks=ranks, context=parallel.get("context", 1)), work.units
        is_unet = isinstance(work.model, UNetConfig)
        config = Config(
            model=work.model,
            train=TrainConfig(seq_len=work.units // work.batch, batch_size=work.batch, **train),
            optim=replace(optim, shard_states=self.sharded),
            # As in all adapters, gathered weights stay until the backward.
            parallel=ParallelConfig(cache_layers="all", **parallel),
        )
        self.stage = build_stage(one_stage(config, self.grid.sizes), self.grid, self.device)
        loss_sum = squared_error if is_unet else lambda module, batch: module.loss_sum(*batch)
        self.train_step = TrainStep(self.stage, whole_model(loss_sum), config.optim)
        share = work.share(self.grid.sample_shard, self.grid.sample_shards)
        if (context := self.grid.context).size > 1:
            *text, sample_ids = share
            share = (*(own_segments(ids, context.size, context.index) for ids in text), sample_ids)
        self.microbatch = tuple(tensor.to(self.device) for tensor in share)

    def step(self) -> Callable[[], dict]:
        if self.compiled is not None:
            compile.enable(self.compiled, self.device)  # for the entire process, in which contenders alternate
        self.loss = self.train_step([self.microbatch], 1, self.units, OPTIM.lr).loss
        return self.collect_results

    def collect_results(self) -> dict:
        exposed = {axis.name: axis.traffic.read()["exposed_s"] for axis in self.grid if axis.size > 1}
        return {"loss": self.loss.item(), "exposed_s": exposed}

    def tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors that exist between steps."""
        return with_states(self.stage.module.parameters(), self.train_step.optimizer)


def squared_error(module: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean squared error of each image, summed over the images."""
    *inputs, targets = batch
    return (module(*inputs) - targets).square().mean((1, 2, 3)).sum()


def training(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the training of a GPT-2 on each of ``settings.grids``."""
    share_process_groups()
    work, contenders = gpt_workload(settings), {}
    for name in settings.grids.split(","):
        trainer = Training(name, work)
        finish = () if device else (trainer.train_step.reducer.wait_params,)
        # With sharded states, a step leaves gathers of updated weights to the next step. On virtual devices the first
        # measured step has them from the lead-in, and the last step leaves them to the next run.
        lead_in = trainer.step if trainer.sharded else None
        contenders[name] = Contender(repeat_step(trainer.step, work.steps, *finish), lead_in)
    return contenders


def unet(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    """Return the training of a U-Net on each of ``settings.grids``."""
    share_process_groups()
    names = settings.grids.split(",")
    return {name: Contender(repeat_step(Training(name, UNET).step, UNET.steps)) for name in names}


def one_device(config: OneDeviceConfig) -> dict[str, Training]:
    """Return the trainings of ``benchmarks.experiments.one_device``."""
    device, train = torch.device(config.device), {"precision": config.precision, "loss_chunks": config.loss_chunks}
    return {
        name: Training(config.grid, config.work, device, compiled, **train)
        for name, compiled in (("eager", False), ("compiled", True))
    }


class Blocks:
    """Transformer blocks with some overlaps on. ``cached``: how many blocks keep their gathered weights, or all."""

    def __init__(
        self,
        grid: Grid,
        work: Workload,
        all_reduce: bool,
        reduce_scatter: bool,
        all_gather: bool,
        cached: int | str,
    ):
        config = Config(
            model=work.model,
            train=TrainConfig(activation_checkpointing="full"),
            parallel=ParallelConfig(overlap=OverlapConfig(all_reduce, reduce_scatter, all_gather), cache_layers=cached),
        )
        stage = build_stage(one_stage(config, grid.sizes), grid, torch.device("cpu"))
        self.model, self.weights, self.blocks = stage.module, stage.weights, stage.module.blocks
        # Embedding and head are not run, so the order of uses has the weights of the blocks only.
        model = registry.describe(work.model)
        layer_weights = replace(model, parts=(model.blocks,)).layer_weights(recompute=True)
        order = weight_order(single_stage(microbatches=1), {0: layer_weights})
        self.plan = self.weights.schedule.plan(order, stage.cached)
        self.inputs, self.upstream = inputs_and_upstream(work, grid.sizes, grid.z.index, grid.y.index)
        self.tokens = TokenIndex(torch.arange(len(self.inputs)), work.model.max_positions, grid.axis(None))

    def step(self) -> Callable[[], dict]:
        self.weights.schedule.begin(self.plan)
        nodes = [Node(block, ("x",), "x") for block in self.blocks.values()]
        x = run_graph(self.model, nodes, {"x": self.inputs.flatten(0, 1)}, "x", self.tokens)["x"]
        x.backward(self.upstream.flatten(0, 1))
        self.weights.schedule.finish()
        return self.collect_results

    def collect_results(self) -> dict:
        grid = self.weights.context.grid
        exposed = {axis.name: axis.traffic.read()["exposed_s"] for axis in (grid.x, grid.y, grid.z)}
        matrices = [p for p in self.blocks.parameters() if p.spec.group == "matrices"]
        norms = take_gradient_norms(self.inputs, matrices, grid.sizes)
        self.blocks.zero_grad(set_to_none=True)
        return {"exposed_s": exposed, **norms}


def blocks(settings: WorkerConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    share_process_groups()
    grid, work = Grid(parse_sizes(settings.grids)), block_workload(settings.virtual)
    return {name: Contender(Blocks(grid, work, *overlap).step) for name, overlap in OVERLAPS.items()}
