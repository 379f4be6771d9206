"""``profile.steps``: torch profiler traces of chosen steps on every rank, and plots of the last chosen step."""

import inspect
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gpt4d.config import Config, profiled_steps
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel.comm.collectives import Axis
from gpt4d.parallel.comm.stats import CommStats, now, seconds_between
from gpt4d.parallel.engine.interleave import YieldPoint
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.pipeline import trace
from gpt4d.runs.logger import RunFiles
from gpt4d.runtime.consensus import all_gather_json
from gpt4d.runtime.files import optional_file, replace_when_complete
from gpt4d.step import TrainStep

_COLORS = {"forward": "#78a9d8", "recomputation": "#ecd04f", "backward": "#eda263", "update": "#a892d0"}
_OTHER, _IN_FLIGHT, _WAITING = "#e8e8e8", "#b5bfc7", "#b3202c"
_WIDTH_IN, _FONT = 15.0, 8


class LayerSpan(NamedTuple):
    """Interval in which a layer computes one phase of a step. ``draw_timeline`` takes seconds since the step began."""

    name: str  # dotted: blocks.0.mlp.up is inside blocks.0
    phase: str  # forward, recomputation, backward or update
    start: float
    stop: float


class Profile:
    """Context of a training loop that starts after step ``done``; each step runs inside ``step(number)``.

    The profiled steps produce ``run.dir/traces/steps_…/rank_00000.json.gz`` for each rank, for chrome://tracing or
    Perfetto. For the last step, rank 0 writes ``timeline.png`` and, with several stages, ``pipeline.png``. Results do
    not change. On all other steps nothing is recorded, and the model has no hooks.
    """

    def __init__(self, config: Config, train_step: TrainStep, log: RunFiles, done: int):
        self.config, self.train_step, self.log = config, train_step, log
        self.stage, self.runtime = train_step.stage, train_step.runtime
        self.grid, self.device = self.stage.grid, self.stage.weights.device
        self.recording = ExitStack()
        first, last = profiled_steps(config) or (0, 0)
        self.first, self.last = max(first, done + 1), min(last, config.train.steps)
        if 0 < last <= done:
            log.event("profile", f"profile.steps={config.profile.steps}: already past, resumed at step {done}")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error) -> None:
        self.recording.close()

    def includes(self, number: int) -> bool:
        return self.first <= number <= self.last

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the enclosed step ``number`` if it was chosen, and write the files after the last one."""
        if not self.includes(number):
            yield
            return
        if number == self.first:
            self._start()
        self.recorder.spans.clear()
        self.runtime.recording = trace.StageTrace()
        start = now(self.device)
        with record_function(f"step {number}"):
            yield
        if number == self.last:
            stop, recorded = now(self.device), self.runtime.recording
            self.recording.close()
            self._write(start, stop, recorded)
            del self.trace, self.recorder  # They are large, and the run may continue for long.

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type != "cpu":
            activities.append(ProfilerActivity.CUDA)
        self.trace = self.recording.enter_context(profile(activities=activities))
        self.recording.enter_context(_name_collectives(self.stage.axes.values()))
        self.recording.callback(setattr, self.runtime, "recording", None)
        chunked = self.config.parallel.chunks > 1
        recorder = _LayerRecorder(self.stage.module, self.train_step.optimizer, self.device, chunked)
        self.recorder = self.recording.enter_context(recorder)

    def _write(self, start, stop, recorded: trace.StageTrace) -> None:
        directory = Path(self.config.run.dir) / "traces" / f"steps_{self.first:08d}-{self.last:08d}"
        with optional_file(directory):
            directory.mkdir(parents=True, exist_ok=True)
        if self.stage.exchange:
            self._draw_pipeline(directory, recorded.since(start))
        with replace_when_complete(directory / f"rank_{self.grid.world.index:05d}.json.gz") as path:
            self.trace.export_chrome_trace(str(path))
        if self.grid.world.index:
            return
        spans = [
            span._replace(start=seconds_between(start, span.start), stop=seconds_between(start, span.stop))
            for span in self.recorder.spans
        ]
        axes = {name: axis.traffic.since(start) for name, axis in self.stage.axes.items()}
        title = f"{self.config.run.name}: step {self.last} on grid {self.grid.sizes} (x, y, z, data), rank 0"
        with replace_when_complete(directory / "timeline.png") as path:
            draw_timeline(path, title, seconds_between(start, stop), spans, axes)
        self.log.event("profile", f"traces and timeline: {directory}", step=self.last, path=str(directory))

    def _draw_pipeline(self, directory: Path, recorded: trace.StageTrace) -> None:
        """Write ``pipeline.png`` on rank 0: the last step on the first rank of each stage. All ranks call this."""
        own = [self.stage.index, recorded.to_json()] if self.grid.index == 0 else None
        gathered = all_gather_json(own, "collecting the profiles of the stages")
        if self.grid.world.index:
            return
        of_stages = {index: trace.StageTrace.from_json(values) for index, values in filter(None, gathered)}
        timeline_of_all = trace.timeline([of_stages[index] for index in range(len(of_stages))])
        title = f"{self.config.run.name}: step {self.last}, {self.config.parallel.pipeline.schedule}"
        with replace_when_complete(directory / "pipeline.png") as path:
            trace.draw(timeline_of_all, title, path)


class _LayerRecorder:
    """Context that names each layer's computation in the profiler's trace and records it in ``spans``.

    Layers are the outermost modules (``blocks.0``) and the innermost (``blocks.0.mlp.up``). Hooks on nodes of
    autograd's graph observe backwards and are freed with the graph. Backward hooks of modules add nodes to the graph
    and are not used. If chunks interleave, an innermost layer has a span for each segment of a chunk and for each node.
    An outermost layer lasts from the first chunk to the last chunk. The trace does not name it, since such ranges
    overlap.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device, chunked: bool):
        self.model, self.optimizer, self.device, self.chunked = model, optimizer, device, chunked
        self.spans: list[LayerSpan] = []  # start and stop are results of ``now``
        self.open: dict[tuple[str, str], tuple] = {}  # (name, phase) → (profiler range, start) of unfinished spans
        self.depth: Counter[tuple[str, str]] = Counter()  # number of chunks inside each layer
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> "_LayerRecorder":
        for name, layer in _layers(self.model):
            forward = layer.spec.forward if isinstance(layer, Layer) else layer.forward
            if inspect.iscoroutinefunction(forward) or hasattr(layer, "product"):  # of ``multiply``, a coroutine
                in_turns = self.chunked and not any(layer.children())
                self.handles.append(layer.register_forward_hook(partial(self._observe, name, in_turns)))
                continue
            self.handles += [
                layer.register_forward_pre_hook(partial(self._before_forward, name)),
                # always_call: activation checkpointing ends a recomputation early with an exception.
                layer.register_forward_hook(partial(self._after_forward, name), always_call=True),
            ]
        self.optimizer.around_step = self._update
        return self

    def __exit__(self, *error) -> None:
        for handle in self.handles:
            handle.remove()
        self.optimizer.around_step = nullcontext
        self.depth.clear()
        for key in reversed(list(self.open)):  # spans that an error interrupted
            self._end(*key)

    def _begin(self, name: str, phase: str, traced: bool = True) -> None:
        self.depth[name, phase] += 1
        if self.depth[name, phase] > 1:
            return
        profiler_range = record_function(f"{name} {phase}") if traced else nullcontext()
        profiler_range.__enter__()
        self.open[name, phase] = (profiler_range, now(self.device))

    def _end(self, name: str, phase: str) -> None:
        self.depth[name, phase] -= 1
        if self.depth[name, phase] > 0:
            return
        profiler_range, start = self.open.pop((name, phase))
        self.spans.append(LayerSpan(name, phase, start, now(self.device)))
        profiler_range.__exit__(None, None, None)

    @contextmanager
    def _update(self) -> Iterator[None]:
        """Record an update of the optimizer."""
        self._begin("optimizer", "update")
        yield
        self._end("optimizer", "update")

    def _phase(self) -> str:
        """Return the phase of a running forward: inside a backward it is a recomputation."""
        return "recomputation" if any(phase == "backward" for _, phase in self.open) else "forward"

    def _before_forward(self, name: str, layer: nn.Module, inputs: tuple) -> None:
        self._begin(name, self._phase())

    def _after_forward(self, name: str, layer: nn.Module, inputs: tuple, output: Any) -> None:
        phase = self._phase()
        self._end(name, phase)
        if phase == "forward" and output is not None:
            self._observe_backward(name, inputs, output)

    async def _observe(self, name: str, in_turns: bool, layer: nn.Module, inputs: tuple, forward: Coroutine):
        """Record a layer's coroutine and return its result; ``in_turns``: record each segment separately."""
        turns, phase, result = forward.__await__(), self._phase(), None
        traced = in_turns or not self.chunked
        self._begin(name, phase, traced)
        inside = True
        try:
            while True:
                try:
                    next(turns)
                except StopIteration as finished:
                    result = finished.value
                    break
                if in_turns:
                    self._end(name, phase)
                    inside = False
                await YieldPoint()
                if in_turns:
                    self._begin(name, phase)
                    inside = True
        finally:
            turns.close()
            if inside:
                self._end(name, phase)
        if phase == "forward":
            self._observe_backward(name, inputs, result, in_turns, traced)
        return result

    def _observe_backward(
        self, name: str, inputs: tuple, output: Any, in_turns: bool = False, traced: bool = True
    ) -> None:
        if nodes := _nodes(output, inputs):
            # The backward runs the node created last first, and the node created first last.
            for first, last in [(node, node) for node in nodes] if in_turns else [(nodes[0], nodes[-1])]:
                first.register_prehook(lambda *_: self._begin(name, "backward", traced))
                last.register_hook(lambda *_: self._end(name, "backward"))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and modules: the outermost and the innermost called modules, without the model itself."""
    outermost: list[str] = []
    for name, module in model.named_modules():
        if not name or isinstance(module, (nn.ModuleDict, nn.ModuleList)):
            continue
        contained = any(name.startswith(f"{other}.") for other in outermost)
        if not contained:
            outermost.append(name)
        if not contained or not any(module.children()):
            yield name, module


def _nodes(outputs: Any, inputs: tuple) -> list[Node]:
    """Return the nodes of autograd's graph between a layer's inputs and its outputs, newest first."""
    unvisited, input_nodes = (
        [tensor.grad_fn for tensor in tree_leaves(tensors) if isinstance(tensor, torch.Tensor)]
        for tensors in (outputs, inputs)
    )
    nodes: set[Node] = set()
    while unvisited:
        node = unvisited.pop()
        # A parameter's node has no next functions.
        if node is not None and node not in input_nodes and node not in nodes and node.next_functions:
            nodes.add(node)
            unvisited += [next_node for next_node, _ in node.next_functions]
    return sorted(nodes, key=lambda node: node._sequence_nr(), reverse=True)


@contextmanager
def _name_collectives(axes: Iterable[Axis]) -> Iterator[None]:
    """Name collectives by kind and axis in the profiler's trace while entered."""
    for axis in axes:
        axis.traffic.named_range = record_function
    try:
        yield
    finally:
        for axis in axes:
            axis.traffic.named_range = nullcontext


def draw_timeline(path: Path, title: str, seconds: float, spans: list[LayerSpan], axes: dict[str, CommStats]) -> None:
    """Draw a step of ``seconds`` as a PNG: the ``spans`` of rank 0 in two lanes, and a row for each of ``axes``.

    All times are in seconds since the step began.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, 2.9 + 0.55 * len(axes)), layout="constrained")
    plot = figure.add_subplot()

    def bars(intervals, bottom: float, height: float, **style) -> None:
        plot.broken_barh([(a * 1e3, (b - a) * 1e3) for a, b in intervals], (bottom, height), **style)

    bars([(0, seconds)], 0, 1.8, color=_OTHER, linewidth=0, label="other computation (loss, norms, …)")
    outer, inner = lanes(spans)
    for phase, color in _COLORS.items():
        for lane, bottom, height in ((outer, 1.25, 0.55), (inner, 0, 1.2)):
            pieces = [(a, b) for span, a, b in lane if span.phase == phase]
            label = phase if pieces and lane is outer else None
            bars(pieces, bottom, height, facecolor=color, edgecolor="white", linewidth=0.4, label=label)
    for span, start, stop in outer:
        _write_name(plot, [span.name, span.name.rpartition(".")[2]], start, stop, 1.525, seconds)
    for span, start, stop in inner:
        _write_name(plot, [span.name.rpartition(".")[2]], start, stop, 0.6, seconds, upright=True)

    waited = sum(traffic.seconds()["exposed_s"] for traffic in axes.values())
    ticks = {0.9: f"compute\n{_ms(seconds - waited)} ms"}
    for row, (name, traffic) in enumerate(axes.items(), start=1):
        bottom = -0.8 * row
        labels = ("collective in flight", "computation waits for it (pale above)") if row == 1 else (None, None)
        bars(traffic.run_intervals, bottom, 0.6, color=_IN_FLIGHT, linewidth=0, label=labels[0])
        bars(traffic.wait_intervals, bottom, 0.6, color=_WAITING, linewidth=0, label=labels[1])
        bars(traffic.wait_intervals, 0, 1.8, color="white", alpha=0.7, linewidth=0, zorder=2)
        times = traffic.seconds()
        ticks[bottom + 0.3] = f"{name}\nexposed {_ms(times['exposed_s'])}, hidden {_ms(times['hidden_s'])} ms"
    plot.set_yticks(list(ticks), list(ticks.values()))
    plot.tick_params(axis="y", length=0)
    plot.set_xlim(0, seconds * 1e3)
    plot.set_xlabel("ms")
    plot.set_title(title)
    plot.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=8, frameon=False)
    figure.savefig(path, dpi=120)


def lanes(spans: list[LayerSpan]) -> tuple[list, list]:
    """Return the visible intervals of two lanes: the outermost layers and the innermost layers."""
    names = {span.name for span in spans}
    parents = {name: [parent for parent in _ancestors(name) if parent in names] for name in names}
    containers = {parent for ancestors in parents.values() for parent in ancestors}
    return _visible([s for s in spans if not parents[s.name]]), _visible([s for s in spans if s.name not in containers])


def _ancestors(name: str) -> list[str]:
    """Return the dotted prefixes of a name: a and a.b for ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _visible(spans: list[LayerSpan]) -> list[tuple[LayerSpan, float, float]]:
    """Return the visible intervals (span, start, stop) of a lane. An inner span covers the span that contains it."""
    active: list[LayerSpan] = []  # spans that have started and not ended, the outermost first
    pieces, reached = [], 0.0
    for next_span in [*sorted(spans, key=lambda span: span.start), None]:
        until = next_span.start if next_span else float("inf")
        while active and reached < until:
            stop = min(active[-1].stop, until)
            if stop > reached:
                pieces.append((active[-1], reached, stop))
                reached = stop
            if active[-1].stop <= until:
                active.pop()
        if next_span:
            active.append(next_span)
        reached = until
    return pieces


def _write_name(plot, names: list[str], start, stop, height: float, seconds: float, upright: bool = False) -> None:
    """Write the first name that fits the bar. If no name fits and ``upright`` is set, write the last one vertically."""
    room = (stop - start) / seconds * 0.8 * _WIDTH_IN * 72 / _FONT  # in letter heights
    fitting = next((name for name in names if room > 0.6 * len(name)), None)
    if fitting or (upright and room > 1):
        center, rotation = (start + stop) / 2 * 1e3, 0 if fitting else 90
        plot.text(center, height, fitting or names[-1], ha="center", va="center", fontsize=_FONT, rotation=rotation)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
