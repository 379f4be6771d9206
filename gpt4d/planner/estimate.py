"""What a whole step takes of a device on one grid: a few short steps walked through, and drawn out to their length."""

from dataclasses import dataclass

from gpt4d.config import Config, GridSizes
from gpt4d.planner.device import AXES, Links
from gpt4d.planner.step import Step
from gpt4d.planner.workload import hardware_flops, model_flops, training_state

GIB = 2**30
_WALKED = 64  # blocks in all microbatches of a step: more are drawn out from fewer
_BLOCKS = 3  # of a kind: more of them add what the last one added


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
    published_s: float | None = None  # of communication, by the paper's model that the ranking is by

    @property
    def memory_gib(self) -> float:
        return sum(self.memory.values())

    @property
    def exposed_s(self) -> float:
        return sum(axis["exposed_s"] for axis in self.comm.values())

    @property
    def hidden_s(self) -> float:
        """Of the collectives' time; a wait may be longer than its collective, for a rank that is late."""
        return sum(max(0.0, axis["time_s"] - axis["exposed_s"]) for axis in self.comm.values())


class Estimate:
    """Of one configuration on one grid, for any microbatch."""

    def __init__(self, config: Config, sizes: GridSizes):
        self.config, self.sizes = config, sizes
        self.links = Links(config.cluster, sizes)
        self.state = training_state(config.model, sizes, config.optim.shard_states)
        self.share = config.train.batch_size // sizes.batch_shards
        self._known: dict[int, tuple[float, float]] = {}

    def least_gib(self) -> float:
        """What the training state and the machine take before the first activation."""
        return self.config.cluster.reserved_gib + (self.state["weights"] + self.state["optimizer"]) / GIB

    def memory_gib(self, micro_batch: int) -> float:
        """The peak of a step with microbatches of so many sequences."""
        return self._quick(micro_batch)[1]

    def quick_s(self, micro_batch: int) -> float:
        """About the seconds of a step, to tell which grids are worth a ``plan``."""
        return self._quick(micro_batch)[0]

    def _quick(self, micro_batch: int) -> tuple[float, float]:
        """Seconds and GiB, from the last microbatch of a few blocks."""
        if micro_batch not in self._known:
            microbatches = self.share // micro_batch
            kinds = self._kinds(_BLOCKS)
            layers = self.config.model.layers
            everything = self._kinds(layers)
            between = tuple(everything.count(cached) - kinds.count(cached) for cached in (False, True))
            step = self._step(micro_batch, kinds, between)
            device = step.run(1, accumulated=microbatches > 1)
            seconds = device.now * layers / len(kinds) * microbatches
            self._known[micro_batch] = seconds, self.least_gib() + device.peak / GIB
        return self._known[micro_batch]

    def plan(self, micro_batch: int) -> Plan:
        config, cluster, state = self.config, self.config.cluster, self.state
        microbatches = self.share // micro_batch
        everything = self._kinds(config.model.layers)
        if len(everything) * microbatches <= _WALKED:
            walked = self._walk(micro_batch, microbatches, everything)
        else:
            walked = self._walk(micro_batch, 1, everything)
            walked = _sum(walked, self._microbatch(micro_batch), microbatches - 1)
        seconds, compute_s, *rest = walked
        comm = {
            axis: dict(zip(("bytes", "time_s", "exposed_s"), rest[3 * n : 3 * n + 3], strict=True))
            for n, axis in enumerate(AXES)
            if self.links.sizes[axis] > 1
        }
        held = {kind: nbytes / GIB for kind, nbytes in state.items()}
        held["reserved"] = cluster.reserved_gib
        held["activations"] = self.memory_gib(micro_batch) - sum(held.values())
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

    def _kinds(self, most: int) -> tuple[bool, ...]:
        """For some of the blocks, at the most ``most`` of a kind, whether their weights are cached: the last ones."""
        layers, cached = self.config.model.layers, self.config.parallel.cache_layers
        cached = layers if cached == "all" else cached
        return (False,) * min(layers - cached, most) + (True,) * min(cached, most)

    def _microbatch(self, micro_batch: int) -> tuple[float, ...]:
        """What one microbatch more takes, drawn out from that of a few blocks."""

        def one(kinds: tuple[bool, ...]) -> tuple[float, ...]:
            step = self._step(micro_batch, kinds)
            step.run(3, accumulated=True)  # in the last of them gradients set off; the first begins with idle links
            first, second, _ = step.after_microbatch
            return _sum(second, first, -1)

        all_of_them, few = self._kinds(self.config.model.layers), self._kinds(_BLOCKS)
        base = whole = one(few)
        for kind in False, True:
            more = all_of_them.count(kind) - few.count(kind)
            if more:
                fewer = list(few)
                fewer.remove(kind)
                whole = _sum(whole, _sum(base, one(tuple(fewer)), -1), more)
        return whole

    def _walk(self, micro_batch: int, microbatches: int, kinds: tuple[bool, ...]) -> tuple[float, ...]:
        return self._step(micro_batch, kinds).run(microbatches).numbers()

    def _step(self, micro_batch: int, kinds: tuple[bool, ...], between: tuple[int, int] = (0, 0)) -> Step:
        return Step(self.config, self.sizes, self.links, micro_batch, kinds, between)


def _sum(one: tuple[float, ...], other: tuple[float, ...], times: int) -> tuple[float, ...]:
    return tuple(a + times * b for a, b in zip(one, other, strict=True))
