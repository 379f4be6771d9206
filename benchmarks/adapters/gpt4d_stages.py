"""gpt4d's training step over stages: contenders are ``schedule/strategy``, such as ``eager_1f1b/broadcast``.

``1f1b/broadcast/waiting`` waits for each transfer where it starts, on both ends, so nothing overlaps with it.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.laboratory.strategies import between_stages
from benchmarks.laboratory.virtual_device import VirtualDevice
from benchmarks.worker import Contender, share_process_groups
from benchmarks.workloads import END, LAST, OPTIM, StagesConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline import runtime
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import StageTransfer
from gpt4d.parallel.pipeline.stage_links import Arrival, Exchange
from gpt4d.runtime.consensus import all_gather_json
from gpt4d.step import TrainStep, build_stage, connect_stages


class LinkGroups:
    """Process groups of the links between stages. The n-th of some ranks serves the n-th link of every contender.

    Contenders alternate, so they can share groups; the links of one contender cannot.
    """

    def __init__(self):
        self._new_group, self._groups = dist.new_group, defaultdict(list)

    @contextmanager
    def of_contender(self) -> Iterator[None]:
        """Let ``torch.distributed.new_group`` return these groups."""
        used: defaultdict[tuple[int, ...], int] = defaultdict(int)

        def new_or_shared(ranks: list[int], **options) -> dist.ProcessGroup:
            key = tuple(ranks)
            if used[key] == len(self._groups[key]):
                self._groups[key].append(self._new_group(ranks, **options))
            used[key] += 1
            return self._groups[key][used[key] - 1]

        with patch.object(dist, "new_group", new_or_shared):
            yield


class ActionTimes:
    """When this rank's virtual device executes the actions of a step, without the waits for other stages."""

    def __init__(self, device: VirtualDevice):
        self.device = device
        self.spans: list[tuple[Action, float, float]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the actions that the runtime executes from now on."""
        self.spans.clear()
        step = runtime._Step
        with (
            patch.object(step, "_take", self._take(step._take)),
            patch.object(step, "_forward", self._timed(step._forward)),
            patch.object(step, "_backward", self._timed(step._backward)),
            patch.object(step, "_weight_gradients", self._timed(step._weight_gradients)),
        ):
            yield

    def _take(self, original: Callable) -> Callable:
        def take(step, transfer: StageTransfer):
            tensors = original(step, transfer)
            self._begun = self.device.stream.clock
            return tensors

        return take

    def _timed(self, original: Callable) -> Callable:
        def execute(step, action: Action) -> None:
            self._begun = self.device.stream.clock
            original(step, action)
            self.spans.append((action, self._begun, self.device.stream.clock))

        return execute

    def results(self, stopped: float) -> dict[str, float]:
        """Return the seconds of each kind of action on each virtual stage, and the seconds of the rest of the step.

        They are medians over the microbatches but the last, which counts alone, and maxima over the ranks. Every rank
        calls it. ``stopped`` is when the step was complete on this rank.
        """
        by_kind = defaultdict(list)
        last = max(action.microbatch for action, *_ in self.spans)
        for action, start, stop in self.spans:
            key = f"{action.kind}{action.virtual_stage}"
            by_kind[key + LAST if action.microbatch == last else key].append(stop - start)
        own = {kind: statistics.median(seconds) for kind, seconds in by_kind.items()}
        times: dict[str, float] = {}
        # All processes are on one machine, so they have one clock.
        measured = own, max(stop for *_, stop in self.spans), stopped
        gathered = all_gather_json(measured, "collecting the times of the stages")
        for of_rank, *_ in gathered:
            times |= {kind: max(seconds, times.get(kind, 0.0)) for kind, seconds in of_rank.items()}
        _, action_stops, step_stops = zip(*gathered, strict=True)
        return dict(sorted(times.items())) | {END: max(step_stops) - max(action_stops)}


class StagedTraining:
    """The trainer's optimizer step over stages, as this rank's stage."""

    def __init__(self, name: str, config: StagesConfig, links: LinkGroups, device: VirtualDevice | None):
        schedule, strategy, *waiting = name.split("/")
        plan = config.plan(schedule)
        own = plan.stage_of(dist.get_rank())
        self.device, self.grid = device, Grid(own.sizes, ranks=own.ranks)
        self.stage = build_stage(plan, self.grid, torch.device("cpu"))
        with links.of_contender(), between_stages(strategy):
            connect_stages(plan, self.stage, config.ranks)
        assert self.stage.exchange is not None
        if waiting:
            self.stage.exchange.start = partial(_start_and_wait, self.stage.exchange)  # type: ignore[method-assign]
        self.train_step = TrainStep(self.stage, _compute, OPTIM)
        self.microbatches = config.share(self.grid.batch_shard, own.sizes.batch_shards)
        self.units = config.batch * config.seq_len

    def step(self) -> Callable[[], dict]:
        times = ActionTimes(self.device) if self.device else None
        with times.recording() if times else nullcontext():
            self.loss = self.train_step(self.microbatches, len(self.microbatches), self.units, OPTIM.lr).loss
        stopped = self.device.stream.clock if self.device else 0.0
        return partial(self._collect_results, times, stopped)

    def _collect_results(self, times: ActionTimes | None, stopped: float) -> dict:
        exposed = {axis: seen.traffic.read()["exposed_s"] for axis, seen in self.stage.axes.items()}
        results = {"loss": self.loss.item(), "exposed_s": exposed}
        return results | ({"actions_s": times.results(stopped)} if times else {})


def _compute(module, part, batch, received):
    if len(batch) == 3:
        return module.spec.compute(module, part, received, *batch)
    *inputs, targets = batch
    produced = module.spec.compute(module, part, received, *inputs)
    return {"loss": (produced["prediction"] - targets).square().mean((1, 2, 3)).sum()} if part.ends else produced


def _start_and_wait(exchange: Exchange, transfer: StageTransfer, sent: runtime.Tensors | None) -> Arrival:
    arrival = Exchange.start(exchange, transfer, sent)
    arrival.wait()
    return arrival


def stages(settings: StagesConfig, device: VirtualDevice | None) -> dict[str, Contender]:
    links = LinkGroups()
    share_process_groups()
    names = settings.contenders.split(",")
    return {name: Contender(StagedTraining(name, settings, links, device).step) for name in names}
