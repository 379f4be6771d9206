"""What a whole step takes of a device on one grid: a few short steps walked through, and drawn out to their length."""

from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.config import Config, GridSizes
from gpt4d.planner.device import Links
from gpt4d.planner.step import Step, bucket_bytes
from gpt4d.planner.workload import compute_bytes, hardware_flops, model_flops, training_state

GIB = 2**30
_BLOCKS, _MICROBATCHES = 2, 2  # more of them add what the last one added
AXES = (*GridSizes._fields, "world")


class _Walked(NamedTuple):
    """What a walk found, or what several of them together tell: seconds and bytes, all of them as one row of numbers."""

    peak: float
    numbers: tuple[float, ...]  # step and computation in s, then of each axis: bytes, s, exposed s

    def beyond(self, before: "_Walked", times: int) -> "_Walked":
        """With ``times`` more of what this one has and ``before`` has not."""
        peak = self.peak + times * (self.peak - before.peak)
        return _Walked(peak, tuple(a + times * (a - b) for a, b in zip(self.numbers, before.numbers, strict=True)))


@dataclass
class Plan:
    """A grid, and what a step on it takes of each device."""

    sizes: GridSizes
    micro_batch: int
    step_time_s: float
    compute_s: float
    comm: dict[str, dict[str, float]]  # by axis: bytes, time_s, exposed_s
    memory: dict[str, float]  # in GiB: weights, gradients, optimizer, activations and the rest, reserved
    mfu: float | None  # share of the peak that the model's FLOPs are, without recomputation
    hfu: float | None  # and with it
    overrides: list[str]

    @property
    def memory_gib(self) -> float:
        return sum(self.memory.values())

    @property
    def exposed_s(self) -> float:
        return sum(axis["exposed_s"] for axis in self.comm.values())


class Estimate:
    """Of one configuration on one grid, for any microbatch."""

    def __init__(self, config: Config, sizes: GridSizes):
        self.config, self.sizes = config, sizes
        self.links = Links(config.cluster, sizes)
        self.bucket_bytes = bucket_bytes(config, sizes)
        self.state = training_state(config.model, sizes, config.optim.shard_states)
        self.share = config.train.batch_size // sizes.batch_shards

    def least_gib(self) -> float:
        """What the training state and the machine take before the first activation."""
        return self.config.cluster.reserved_gib + (self.state["weights"] + self.state["optimizer"]) / GIB

    def memory_gib(self, micro_batch: int) -> float:
        """The peak of a step; an upper bound, quickly, where there are several microbatches."""
        several = self.share > micro_batch
        return self.least_gib() + (self._blocks(micro_batch, 1).peak + several * self.state["gradients"]) / GIB

    def plan(self, micro_batch: int) -> Plan:
        config, cluster, state = self.config, self.config.cluster, self.state
        microbatches = self.share // micro_batch
        walked = self._blocks(micro_batch, min(microbatches, _MICROBATCHES))
        peak = walked.peak
        if microbatches > _MICROBATCHES:
            walked = walked.beyond(self._blocks(micro_batch, _MICROBATCHES - 1), microbatches - _MICROBATCHES)
        seconds, compute_s, *rest = walked.numbers
        comm = {
            axis: dict(zip(("bytes", "time_s", "exposed_s"), rest[3 * n : 3 * n + 3], strict=True))
            for n, axis in enumerate(AXES)
            if self.links.sizes[axis] > 1
        }
        held = {kind: nbytes / GIB for kind, nbytes in state.items()}
        held["activations"] = max(0.0, peak / GIB - held["gradients"])
        held["reserved"] = cluster.reserved_gib
        train, devices = config.train, self.sizes.devices
        flops = model_flops(config.model, train.batch_size, train.seq_len)
        hardware = hardware_flops(config.model, train.batch_size, train.seq_len)
        possible = cluster.peak_tflops and cluster.peak_tflops * 1e12 * devices * seconds
        overrides = [f"parallel.g{axis}={size}" for axis, size in self.sizes._asdict().items()]
        if config.train.micro_batch_size is None and microbatches > 1:
            overrides.append(f"train.micro_batch_size={micro_batch}")
        return Plan(
            sizes=self.sizes,
            micro_batch=micro_batch,
            step_time_s=seconds,
            compute_s=compute_s,
            comm=comm,
            memory=held,
            mfu=possible and flops / possible,
            hfu=possible and (hardware if train.activation_checkpointing == "full" else flops) / possible,
            overrides=overrides,
        )

    def _blocks(self, micro_batch: int, microbatches: int) -> _Walked:
        """All blocks, those whose weights are cached and the others, drawn out from a few of each."""
        layers, cached = self.config.model.layers, self.config.parallel.cache_layers
        cached = layers if cached == "all" else cached
        counts = layers - cached, cached
        few = tuple(min(count, _BLOCKS) for count in counts)
        base = walked = self._walk(micro_batch, microbatches, *few)
        for kind, count in enumerate(counts):
            if count > few[kind]:
                fewer = [few[0], few[1]]
                fewer[kind] -= 1
                longer = base.beyond(self._walk(micro_batch, microbatches, *fewer), count - few[kind])
                added = tuple(a + b - c for a, b, c in zip(walked.numbers, longer.numbers, base.numbers, strict=True))
                walked = _Walked(walked.peak + longer.peak - base.peak, added)
        return walked

    def _walk(self, micro_batch: int, microbatches: int, plain: int, cached: int) -> _Walked:
        kinds = (False,) * plain + (True,) * cached  # the last blocks are the cached ones
        cluster = self.config.cluster
        device = Step(
            self.config, cluster, self.sizes, self.links, micro_batch, kinds, self.bucket_bytes
        ).run(microbatches)
        numbers = [device.now, device.compute_s]
        for axis in AXES:
            numbers += device.bytes[axis], device.time_s[axis], device.exposed_s[axis]
        return _Walked(device.peak, tuple(numbers))
