"""``profile.steps``: a torch profiler's trace of chosen steps, of every rank, and a picture of the last of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.profiler import ProfilerActivity, profile, record_function

from gpt4d import timeline
from gpt4d.config import Config, profiled_steps
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.traffic import now, seconds_between
from gpt4d.timeline import Span


class Profile:
    """Entered for the length of a run's loop that begins after step ``done``; ``step`` goes around each step.

    The steps asked for that the run comes to leave ``run.dir/traces/steps_…/rank_00000.json.gz`` of each rank, for
    chrome://tracing or Perfetto, and rank 0's ``timeline.png`` of the last step. No result changes. On other steps
    nothing is recorded, and the model has no hooks.
    """

    def __init__(self, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, report, done: int):
        self.config, self.model, self.optimizer, self.report = config, model, optimizer, report
        self.grid, self.device = model.weights.grid, model.weights.device
        self.recording = ExitStack()
        first, last = profiled_steps(config) or (0, 0)
        self.first, self.last = max(first, done + 1), min(last, config.train.steps)
        if 0 < last <= done:
            report.event("profile", f"profile.steps={config.profile.steps}: past, the run goes on from step {done}")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *error) -> None:
        self.recording.close()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step ``number``."""
        if not self.first <= number <= self.last:
            yield
            return
        if number == self.first:
            self._start()
        self.layers.spans.clear()
        began = now(self.device)
        with record_function(f"step {number}"):
            yield
        if number == self.last:
            ended = now(self.device)
            self.recording.close()
            self._write(began, ended)
            del self.trace, self.layers  # large, and the run may go on for long

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.trace = self.recording.enter_context(profile(activities=activities))
        self.recording.enter_context(_collectives_named(self.grid))
        self.layers = self.recording.enter_context(_Layers(self.model, self.optimizer, self.device))

    def _write(self, began, ended) -> None:
        directory = Path(self.config.run.dir) / "traces" / f"steps_{self.first:08d}-{self.last:08d}"
        directory.mkdir(parents=True, exist_ok=True)
        with _whole(directory / f"rank_{self.grid.world.index:05d}.json.gz") as path:
            self.trace.export_chrome_trace(str(path))
        if self.grid.world.index:
            return
        spans = [
            span._replace(start=seconds_between(began, span.start), stop=seconds_between(began, span.stop))
            for span in self.layers.spans
        ]
        axes = {axis.name: axis.traffic.since(began) for axis in self.grid if axis.size > 1}
        title = f"{self.config.run.name}: step {self.last} on grid {self.grid.sizes} (x, y, z, data), rank 0"
        with _whole(directory / "timeline.png") as path:
            timeline.draw(path, title, seconds_between(began, ended), spans, axes)
        self.report.event("profile", f"traces and a time line: {directory}", step=self.last, path=str(directory))


class _Layers:
    """While entered, names what each layer computes in the profiler's trace, and notes it in ``spans``.

    Layers are the outermost modules (``blocks.0``) and the innermost (``blocks.0.mlp.up``). Their backwards are seen
    from hooks on nodes of autograd's graph, which go with the graph: a module's own backward hooks would put nodes
    into it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.spans: list[Span] = []  # their times are points in time of ``now``
        self.open: dict[tuple[str, str], tuple] = {}  # (name, phase) of what is under way: its range, its start
        self.handles = []

    def __enter__(self) -> "_Layers":
        for name, layer in _layers(self.model):
            self.handles += [
                layer.register_forward_pre_hook(partial(self._before_forward, name)),
                # Always: activation checkpointing leaves a recomputation by an exception, once it has all it needs.
                layer.register_forward_hook(partial(self._after_forward, name), always_call=True),
            ]
        update = ("optimizer", "update")
        self.handles += [
            self.optimizer.register_step_pre_hook(lambda *_: self._begin(*update)),
            self.optimizer.register_step_post_hook(lambda *_: self._end(*update)),
        ]
        return self

    def __exit__(self, *error) -> None:
        for handle in self.handles:
            handle.remove()
        for key in reversed(list(self.open)):  # what an error cut off
            self._end(*key)

    def _begin(self, name: str, phase: str) -> None:
        named = record_function(f"{name} {phase}")
        named.__enter__()
        self.open[name, phase] = (named, now(self.device))

    def _end(self, name: str, phase: str) -> None:
        named, start = self.open.pop((name, phase))
        self.spans.append(Span(name, phase, start, now(self.device)))
        named.__exit__(None, None, None)

    def _phase(self) -> str:
        """Of a forward: one within a backward is a recomputation."""
        return "recomputation" if any(phase == "backward" for _, phase in self.open) else "forward"

    def _before_forward(self, name: str, layer: nn.Module, inputs: tuple) -> None:
        self._begin(name, self._phase())

    def _after_forward(self, name: str, layer: nn.Module, inputs: tuple, output: torch.Tensor | None) -> None:
        phase = self._phase()
        self._end(name, phase)
        nodes = _nodes(output, inputs) if phase == "forward" and output is not None else None
        if nodes:
            # Autograd begins with the node it made last and ends with the one it made first.
            nodes[0].register_prehook(lambda *_: self._begin(name, "backward"))
            nodes[-1].register_hook(lambda *_: self._end(name, "backward"))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are called, by name, but for the model and those between the outermost and the innermost."""
    outermost = []
    for name, module in model.named_modules():
        if not name or isinstance(module, nn.ModuleList):
            continue
        contained = any(name.startswith(f"{other}.") for other in outermost)
        if not contained:
            outermost.append(name)
        if not contained or not any(module.children()):
            yield name, module


def _nodes(output: torch.Tensor, inputs: tuple) -> list[Node]:
    """The nodes of autograd's graph between a layer's inputs and its output, the last made first."""
    before = {tensor.grad_fn for tensor in inputs if isinstance(tensor, torch.Tensor)} | {None}
    found, ahead = set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node not in before and node not in found and node.next_functions:  # a parameter's node has none
            found.add(node)
            ahead += [following for following, _ in node.next_functions]
    return sorted(found, key=lambda node: node._sequence_nr(), reverse=True)


@contextmanager
def _collectives_named(grid: Grid) -> Iterator[None]:
    """In the profiler's trace, by kind and axis."""
    for axis in grid:
        axis.traffic.named_range = record_function
    try:
        yield
    finally:
        for axis in grid:
            axis.traffic.named_range = nullcontext


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Where to write ``path``: the file takes its name once it is whole."""
    partial_path = path.with_name(f"partial_{path.name}")
    try:
        yield partial_path
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)
