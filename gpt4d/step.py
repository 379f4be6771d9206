"""One training step: forward and backward over microbatches, reduction, norm, clipping and update."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gpt4d.config import Config, OptimConfig
from gpt4d.model import registry
from gpt4d.model.description import copied_parameters
from gpt4d.model.edges import edges, plain, token_split
from gpt4d.model.module import initialize
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel import compile, gradient_reducer
from gpt4d.parallel.context import Context, layer_settings
from gpt4d.parallel.cuda_graphs import StepGraphs
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid, backend_of, options_of_links
from gpt4d.parallel.layers import attention_backends, conv, float8
from gpt4d.parallel.layers.routing import Routers
from gpt4d.parallel.layout import spec_of
from gpt4d.parallel.pipeline.runtime import Compute, StageRuntime
from gpt4d.parallel.pipeline.stage_links import Copy, Exchange
from gpt4d.parallel.sharded_weights import ShardedWeights, compute_dtype
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.runtime.activity import MAIN
from gpt4d.runtime.consensus import gather_in_group


class StepResult(NamedTuple):
    """Global values of one step, on the device. The step is skipped where ``skipped`` holds: no weight changes."""

    loss: torch.Tensor
    norm: torch.Tensor
    skipped: torch.Tensor
    stopping: torch.Tensor  # > 0: a rank has been asked to stop
    routing: torch.Tensor  # sums of each router's statistics (gpt4d.parallel.layers.routing); empty without routers


def build_stage(
    plan: ParallelPlan,
    grid: Grid,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    initialized: bool = True,
) -> Stage:
    """Build this rank's stage of a plan.

    Args:
        plan: the plan of all stages.
        grid: the ranks of the stage.
        device: the device of its parameters.
        dtype: dtype of the master weights; with float64, the computation is also in float64.
        initialized: set initial values; if false, a checkpoint must be loaded.
    """
    _choose_kernels(plan.config, grid, device)
    with MAIN.begin("building the model"):
        return _build(plan, grid, device, dtype, initialized)


def _choose_kernels(config: Config, grid: Grid, device: torch.device) -> None:
    """Determine the kernels of this process. All ranks of the job call this together."""
    replicates = grid.x.size * grid.y.size > 1  # vectors between layers, and the computation of their gradients
    compile.enable(config.train.compile, device, replicates)
    if config.train.precision == "fp8":
        float8.check_device(device)
    conv.choose_algorithms(device, replicates)
    attention_backends.use_installed_kernels(device)


def _build(plan: ParallelPlan, grid: Grid, device: torch.device, dtype: torch.dtype, initialized: bool) -> Stage:
    config, whole, own = plan.config, plan.description, plan.stage_of(grid.world.index)
    train, index, recompute = config.train, own.index, config.train.activation_checkpointing == "full"
    bounds = {index + chunk * len(plan.stages): part for chunk, part in enumerate(own.parts)}
    description = whole.stage(bounds.values())
    computed = dtype if dtype == torch.float64 else compute_dtype(train.precision, device)
    context = Context(grid, computed, config.parallel.overlap, **layer_settings(config))
    weights = ShardedWeights(context, dtype, device)
    parts = {place: whole.part(*part) for place, part in bounds.items()}
    module = registry.build(config.model, weights, list(parts.values()))
    weights.change(description.changed)
    if config.optim.uses_muon:
        grid.join()
    if initialized:
        initialize(module, train.seed, grid)
    cached = description.weights_of(description.cached_units(config.parallel.cache_layers))
    for_step = config.parallel.cache_scope == "step"
    return Stage(
        index=index,
        grid=grid,
        weights=weights,
        module=module,
        parts=parts,
        layer_weights={place: whole.stage([part]).layer_weights(recompute) for place, part in bounds.items()},
        contributions=dict(description.contributions),
        routers=whole.routers,
        copies=tuple(description.copied),
        cached=() if for_step else cached,
        cached_for_step=cached if for_step else (),
        chunk_contributions=description.chunk_contributions(config.parallel.chunks),
        crossing=plan.crossing,
        program=partial(plan.training_program, index),
        evaluation=partial(plan.evaluation_program, index),
    )


def connect_stages(plan: ParallelPlan, stage: Stage, ranks_per_host: int, timeout: timedelta | None = None) -> None:
    """Connect this rank's stage to all other stages of a pipeline. All ranks of the job call it together.

    Args:
        plan: the pipeline.
        stage: the stage of this rank.
        ranks_per_host: consecutive ranks of the job on each host.
        timeout: timeout of the links' process groups; None for torch's default.
    """
    train, parallel, whole = plan.config.train, plan.config.parallel, plan.description
    samples = train.batch_size // plan.microbatches
    edges_in = partial(edges, whole, plan.crossing, samples, train.seq_len, stage.weights.context.compute_dtype)
    described = [whole.stage(stage_plan.parts) for stage_plan in plan.stages]
    copies = [
        Copy(name, owner, holder, spec.layout, spec.shape, stage.weights.dtype)
        for name, owner, holder, spec in copied_parameters(described)
    ]
    # torch names a group after the number of groups that its ranks have created, which differs by stage.
    created = stage.weights.context.grid.num_groups
    for _ in range(max(gather_in_group(created)) - created):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    backend = backend_of(stage.weights.device.type)
    new_group = partial(dist.new_group, timeout=timeout, backend=backend, pg_options=options_of_links(backend, timeout))
    training_edges = edges_in(token_split if parallel.sequence_parallel else plain)
    stage.exchange = Exchange(
        plan.stages,
        training_edges,
        copies,
        ranks_per_host,
        stage.weights.device,
        new_group,
        parallel.chunks,
    )
    stage.evaluation_exchange = stage.exchange
    if parallel.sequence_parallel:
        stage.evaluation_exchange = stage.exchange.without_gradients(edges_in(plain))


class TrainStep:
    """Computes training steps of a stage and updates its parameters.

    Args:
        stage: the stage that this rank trains.
        compute: computes a part of the model on a microbatch (gpt4d.parallel.pipeline.runtime).
        config: the optimizer's settings.
        overlap_data: all-reduce gradients over the data axis concurrently with the backward.
        before_update: called before parameters change; a checkpoint may still read them.
        is_spike: returns a true value if a step with this loss and norm must be skipped. It runs on the host.
        cuda_graphs: record forwards, backwards and reductions as CUDA graphs (gpt4d.parallel.cuda_graphs).
    """

    def __init__(
        self,
        stage: Stage,
        compute: Compute,
        config: OptimConfig,
        overlap_data: bool = True,
        before_update: Callable[[], None] = lambda: None,
        is_spike: Callable[[float, float], object] | None = None,
        cuda_graphs: bool = False,
    ):
        self.stage, self.config = stage, config
        self.before_update, self.is_spike = before_update, is_spike
        named = stage.module.named_parameters()
        parameters = {name: p for name, p in named if name not in stage.copies and not spec_of(p).frozen}
        self.reducer = GradientReducer(stage.weights, parameters, overlap_data, shard=config.shard_states)
        self.shards: Sequence[nn.Parameter] = self.reducer.optimizer_shards
        self._counted = [shard for shard in self.shards if gradient_reducer.counted_once(shard, stage.grid)]
        self.optimizer = Optimizer(
            zip(parameters, self.shards, strict=True), config, stage.grid, stage.weights.context.compute_dtype
        )
        self.routers = Routers(stage.module, stage.routers)
        self.runtime = StageRuntime(stage, self.reducer, compute)
        self.graphs = StepGraphs(stage, self.reducer, self.runtime.forward_backward) if cuda_graphs else None

    def __call__(
        self,
        batches: Iterable[Any],
        microbatches: int,
        units: int,
        lr: float,
        stop: bool = False,
        unpadded: int | None = None,
    ) -> StepResult:
        """Train on one global batch.

        Args:
            batches: this rank's microbatches of the global batch.
            microbatches: number of microbatches.
            units: number of tokens or images of the global batch that have a loss, by which the loss is divided.
            lr: learning rate of this step.
            stop: this rank has been asked to stop; all ranks learn it.
            unpadded: number of units of the global batch that are no padding; None: all have a loss.
        """
        grid, device = self.stage.grid, self.stage.weights.device
        self.optimizer.lr = lr
        self.routers.begin(units if unpadded is None else unpadded)
        forward_backward = self.graphs.run if self.graphs else self.runtime.forward_backward
        loss = forward_backward(batches, microbatches, units)
        squared_norm = gradient_reducer.squared_norm(self._counted, device)
        stopping = torch.full((), float(stop), dtype=torch.float64, device=device)  # torch.tensor synchronizes
        totals = torch.stack((mask_replicas(loss, grid), squared_norm, stopping))
        totals = grid.world.all_reduce(torch.cat((totals, self.routers.totals().flatten())))
        loss, norm, stopping, routing = totals[0], totals[1].sqrt(), totals[2], totals[3:].view(self.routers.shape)
        skipped = ~(loss.isfinite() & norm.isfinite())
        if self.is_spike and self.is_spike(loss.item(), norm.item()):
            skipped = torch.ones_like(skipped)
        self.before_update()
        self.optimizer.step(skipped, norm, self.config.clip_norm)
        self.routers.update(routing, skipped)
        self.reducer.start_param_all_gather()
        self.stage.send_copied_weights()
        self.optimizer.zero_grad()
        return StepResult(loss, norm, skipped, stopping, routing)

    def evaluate(self, batches: Iterable[Any], microbatches: int) -> torch.Tensor:
        """Return the loss summed over all samples of the job, float64, without training on them."""
        self.release_graphs()
        loss = self.runtime.evaluate(batches, microbatches)
        return self.stage.grid.world.all_reduce(mask_replicas(loss, self.stage.grid))

    def release_graphs(self) -> None:
        """Free the memory of CUDA graphs for other work than steps."""
        if self.graphs is not None:
            self.graphs.release()


def mask_replicas(loss: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the loss for an all-reduce over the job: zero except on one rank of each x-y plane with equal samples."""
    return loss if grid.x.index == grid.y.index == 0 else torch.zeros_like(loss)
