"""A training step on one device: the model's own layers, on symbolic tensors.

The layers come from a description (gpt4d.model.description); tests compare the step with what a run counts.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Any

from gpt4d.config import Config, GridSizes
from gpt4d.model.description import BLOCKS, Description, EdgeTensor, Unit, joined
from gpt4d.parallel import tape
from gpt4d.parallel.function import Function
from gpt4d.parallel.layout import CHUNK
from gpt4d.parallel.order import weight_order
from gpt4d.parallel.pipeline.schedule import single_stage
from gpt4d.parallel.symbolic import SymbolicTensor
from gpt4d.parallel.symbolic_context import MASTER_BYTES, MASTER_DTYPE, SymbolicContext, SymbolicLayer
from gpt4d.planner.device import Device, Links
from gpt4d.planner.workload import compiles, compute_bytes, splits_backwards, training_state


class StepWalk:
    """A step of ``config`` on a grid.

    Args:
        config: the settings.
        description: the model, perhaps with a few of its blocks only.
        sizes: the grid.
        links: how fast its collectives are.
        micro_batch: samples of a microbatch on one device.
        cached: names of the units whose gathered weights are kept.
        omitted: how many equal blocks to count, in memory alone, after each of some blocks.
        gradient_bytes: of the whole model on one device; None: of ``description``.
        continued_bytes: that the whole model holds from one microbatch to the next.
    """

    def __init__(
        self,
        config: Config,
        description: Description,
        sizes: GridSizes,
        links: Links,
        micro_batch: int,
        cached: Collection[str] = (),
        omitted: Mapping[str, int] | None = None,
        gradient_bytes: int | None = None,
        continued_bytes: int = 0,
    ):
        self.config, self.description, self.sizes, self.omitted = config, description, sizes, omitted or {}
        self.device = Device(config.cluster, links, compiles(config))
        self.dtype = "float32" if compute_bytes(config) == MASTER_BYTES else "bfloat16"
        self.length, self.micro_batch = config.train.seq_len, micro_batch
        weights = description.weights_of(cached)
        for_step = config.parallel.cache_scope == "step"
        self.cached = frozenset() if for_step else weights
        self.cached_for_step = weights if for_step else frozenset()
        if gradient_bytes is None:
            gradient_bytes = training_state(description, sizes, shard_states=False)["gradients"]
        self.gradient_bytes, self.continued_bytes = gradient_bytes, continued_bytes
        self.splits_backwards = splits_backwards(config)

    def run(self, microbatches: int, continued: bool = False, last: int | None = None) -> Device:
        """Compute microbatches and the update that follows them.

        Args:
            microbatches: how many.
            continued: the step has had earlier ones.
            last: the number of the microbatch after which to end, without the update; None: compute all.
        """
        self.continued = continued
        self.after_forward: list[tuple[float, int]] = []  # seconds, and bytes that layers have kept for the backward
        # Seconds, and bytes kept for weight gradients that are computed later.
        self.after_backward: list[tuple[float, int]] = []
        self.after_microbatch: list[tuple[float, ...]] = []
        config, description, device = self.config, self.description, self.device
        parallel, train = config.parallel, config.train
        self.context = context = SymbolicContext(
            device,
            self.sizes,
            description.parameters,
            parallel.overlap,
            self.gradient_bytes,
            config.optim.shard_states,
            compute_dtype=self.dtype,
            recompute=train.activation_checkpointing == "full",
            num_chunks=parallel.chunks,
            scatter_heads=parallel.scatter_heads,
            sequence_parallel=parallel.sequence_parallel,
            recompute_inputs=train.activation_checkpointing == "selective",
            loss_chunks=train.loss_chunks,
        )
        model: Any = SymbolicLayer(description.spec, context)
        for unit in description.blocks:
            if more := self.omitted.get(unit.name):
                blocks, (index,) = getattr(model, BLOCKS), unit.part.blocks
                setattr(blocks, str(index), _WithOmitted(getattr(blocks, str(index)), self, unit, more))
        expected = {name: count * microbatches for name, count in description.contributions.items()}
        chunk_terms = description.chunk_terms(parallel.chunks)
        added = {name: expected[name] * chunk_terms.get(name, 1) for name in self.cached_for_step}
        layers = {0: description.layer_weights(context.recompute)}
        order = weight_order(single_stage(microbatches), layers, chunk_terms)
        sums = context.reduction.sums
        sums.begin(expected | dict.fromkeys(self.cached_for_step, 1))
        sums.start_row_gathers()  # of the step before
        earlier = self._continue() if continued else None
        context.schedule.begin(order, self.cached, self.cached_for_step, {**chunk_terms, **added}, earlier)
        for _ in range(last or microbatches):
            self._microbatch(model)
            self.after_microbatch.append(device.totals())
        if last:
            return device
        context.schedule.finish()
        context.reduction.finish()
        context.reduction.update()
        return device

    def _continue(self) -> dict[str, tuple[SymbolicTensor, SymbolicTensor]]:
        """Hold what earlier microbatches have left. Return weights that stay gathered, with their gradients."""
        context, earlier, before = self.context, {}, self.device.held
        for name, spec in self.description.parameters.items():
            shard = context.shard(name)
            if name not in self.cached_for_step:
                context.gradients[name] = shard.like().new()
                continue
            parts = context.grid.z.size if "z" in spec.layout.axes else 1
            whole = shard.like((shard.shape[0] * parts, *shard.shape[1:]))
            copied = parts > 1 or self.dtype != MASTER_DTYPE
            gathered = whole.like(dtype=self.dtype)
            earlier[name] = gathered.new() if copied else gathered, whole.new()
        self.device.hold(self.continued_bytes - (self.device.held - before))  # of blocks that are not computed here
        return earlier

    def _microbatch(self, model: Any) -> None:
        device, context = self.device, self.context
        before = device.held - context.gathered_bytes
        computed = []
        for units in self.description.parts:
            tensors, names = self.description.tensors, self.description.received(units)
            received = {name: self._received(tensors[name]) for name in names}
            part = joined(units)
            batch = model.spec.planned_batch(self._new, self.micro_batch, self.length)
            computed.append(model.spec.compute(model, part, received, *batch))
            del received, batch
        self.after_forward.append((device.now, device.held - context.gathered_bytes - before))
        with context.delaying_weight_gradients() if self.splits_backwards else nullcontext():
            while computed:
                produced = computed.pop()
                results = [(out, out.like().new()) for out in produced.values() if out.edge is not None]
                del produced
                tape.backward(results)
                results.clear()
        self.after_backward.append((device.now, device.held - context.gathered_bytes - before))
        if self.splits_backwards:
            context.compute_delayed_gradients()

    def _new(self, shape: tuple[int, ...], dtype: str) -> SymbolicTensor:
        return SymbolicTensor(self.device, shape, dtype).new()

    def _received(self, tensor: EdgeTensor) -> SymbolicTensor:
        """Return this device's part of a tensor of another part of the model."""
        samples = self.micro_batch * self.sizes.batch_shards
        layout = (self.context.sequence_parallel and tensor.sequence_parallel) or tensor.layout
        extents = {**self.sizes._asdict(), CHUNK: 1}
        tile = layout.tile(tensor.shape(samples, self.length), extents, dict.fromkeys(extents, 0))
        shape = tuple(stop - start for start, stop in tile)
        if not tensor.has_gradient:
            return self._new(shape, tensor.dtype(self.dtype))
        new = self._new(shape, self.dtype)
        kept: list[SymbolicTensor] = []  # the gradient, until it is sent
        return new.alias(tape.leaf(self.device, shape, self.dtype, kept.append).edge)


class _WithOmitted:
    """A block in the place of several equal ones, of which the memory alone is counted."""

    def __init__(self, block: SymbolicLayer, walk: StepWalk, unit: Unit, more: int):
        self.block, self.walk, self.more = block, walk, more
        context = walk.context
        self.weights = walk.description.probe.weights(unit).forward
        prefix = f"{unit.name}."
        elements = sum(context.elements(name) for name in walk.description.parameters if name.startswith(prefix))
        self.gradient_bytes = 0 if walk.continued else more * elements * MASTER_BYTES
        self.entered = self.left = self.before = self.kept = 0

    def __call__(self, *inputs: Any) -> Any:
        if self.walk.context.recomputing:
            return self.block(*inputs)
        return self._counted(*inputs)

    def _layer_bytes(self) -> int:
        return self.walk.device.held - self.walk.context.gathered_bytes

    async def _counted(self, x: Any, *rest: Any) -> Any:
        context, device = self.walk.context, self.walk.device
        if self.entered == 0:
            self.before = self._layer_bytes()
            if self.walk.splits_backwards:
                x = _CallbackFunction.apply(x, self.end_backward)
        self.entered += 1
        out = await self.block(x, *rest)
        del x
        self.left += 1
        if self.left < context.num_chunks:
            return out
        self.entered = self.left = 0
        gathered = sum(context.schedule.ready[name].nbytes for name in self.weights if name in context.schedule.ready)
        self.kept = self.more * (self._layer_bytes() - self.before + gathered)
        device.hold(self.kept)
        return _CallbackFunction.apply(out, self.begin_backward)

    def begin_backward(self) -> None:
        """Release what the omitted blocks have kept, and hold their gradients."""
        device = self.walk.device
        device.release(self.kept)
        device.hold(self.gradient_bytes)
        self.before = self._layer_bytes()

    def end_backward(self) -> None:
        """Hold what the weight gradients of the omitted blocks will read."""
        device = self.walk.device
        delayed = self.more * (self._layer_bytes() - self.before) + self.kept
        device.hold(delayed)
        self.walk.context.delay(lambda: device.release(delayed))


class _CallbackFunction(Function):
    """The identity, whose backward calls a function first."""

    @staticmethod
    def forward(ctx, x, callback: Callable[[], None]):
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x):
        ctx.callback()
        return d_x, None
