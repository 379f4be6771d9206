"""CUDA graphs of a stage's steps: the GPU repeats a recorded step, and Python launches a few graphs, not each kernel.

A step of a stage computes the same operations on the same shapes every time. Its third execution is recorded. A graph
contains all work between two communications with other stages: forwards, backwards, collectives of the grid's axes,
reductions of gradients. So a single stage has one graph per step, and a stage of a pipeline has about one per action.

Graphs are replayed in the order of their recording and share one memory pool. So a tensor can reuse the memory of an
earlier tensor, as in a step without graphs, and microbatches need no memory of their own. Only tensors that other work
reads or writes have fixed memory: the batches of a step, one buffer per tensor that crosses to another stage, the loss
and the gradients.

Collectives in flight end with the graph that starts them. So an action of a pipeline that prefetches a weight for the
next action waits for this weight at its end.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpt4d.parallel.comm.stats import CommStats
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.stage import Stage

Tensors = Mapping[str, torch.Tensor]
# Communicates with other stages: sends the given tensors, if any, and returns received tensors, by name.
Communication = Callable[[Tensors | None], Tensors]

_WARM_UP_STEPS = 2  # they compile functions, fill caches, and connect the ranks of each communicator


class Eager:
    """Executes a step without graphs."""

    def communicate(self, action: Communication, sent: Tensors | None = None) -> Tensors:
        """Communicate with other stages and return the received tensors."""
        return action(sent)

    def resume(self) -> None:
        """Announce computation. Call it before the first operation after ``communicate``."""


EAGER = Eager()


class Recording:
    """Executes a step once, and records it as graphs and communications in their order (``Eager``).

    Args:
        stage: this rank's stage.
        reducer: reduces the stage's gradients.
        stream: captures the graphs.
    """

    def __init__(self, stage: Stage, reducer: GradientReducer, stream: torch.cuda.Stream):
        self.stage, self.reducer, self._stream = stage, reducer, stream
        self.items: list[Callable[[], object]] = []
        self._traffic = {axis.name: axis.traffic for axis in stage.grid}
        self._buffers: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._capture = ExitStack()

    def communicate(self, action: Communication, sent: Tensors | None = None) -> Tensors:
        """Communicate between two graphs, and record the communication.

        A message may be in flight while later graphs reuse the memory of its tensor. So a copy is sent, which passes
        through a buffer that lives as long as the graphs. Received tensors pass through such a buffer too, because a
        graph reads from fixed memory.
        """
        outgoing = None if sent is None else self._buffers_of(sent)
        if outgoing and sent:
            self.resume()
            torch._foreach_copy_([*outgoing.values()], [sent[name] for name in outgoing])
        self.end()
        received: dict[str, torch.Tensor] = {}

        def repeat() -> None:
            copies = None if outgoing is None else {name: buffer.clone() for name, buffer in outgoing.items()}
            arrived = action(copies)
            received.update({} if received else self._buffers_of(arrived))
            for name, tensor in arrived.items():
                received[name].copy_(tensor)

        repeat()
        self.items.append(repeat)
        if not received:
            return {}
        self.resume()
        return {name: buffer.clone() for name, buffer in received.items()}

    def _buffers_of(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return a buffer for each tensor. All communications share them, because each buffer is used immediately."""
        found = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            key = number, tensor.shape, tensor.dtype
            if key not in self._buffers:
                self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            found[name] = self._buffers[key]
        return found

    def resume(self) -> None:
        """Start to capture a graph, unless a capture is in progress."""
        if self._graph is not None:
            return
        self._graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._capture.enter_context(torch.cuda.stream(self._stream))
        # Other threads, which read data or save a checkpoint, may allocate memory during the capture.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._before = {name: (traffic.num_started, traffic.bytes) for name, traffic in self._traffic.items()}
        for traffic in self._traffic.values():
            traffic.capturing = True

    def end(self) -> None:
        """End the capture in progress, if any, and launch its graph: a capture does not execute anything."""
        if (graph := self._graph) is None:
            return
        self.stage.weights.schedule.wait_for_collectives()
        self.reducer.sums.wait_for_collectives()
        with warnings.catch_warnings():  # between two communications, a stage may compute nothing
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self._capture.close()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graph = None
        collectives = list[tuple[CommStats, str, int, float]]()
        for name, traffic in self._traffic.items():
            traffic.capturing = False
            started, nbytes = self._before[name]
            if count := traffic.num_started - started:
                title = f"graph with {count} collectives on {name}"
                collectives.append((traffic, title, count, traffic.bytes - nbytes))
            traffic.num_started, traffic.bytes = started, nbytes  # each launch counts them

        def launch() -> None:
            graph.replay()
            if not collectives:
                return
            end = torch.cuda.Event()
            end.record()
            for traffic, name, count, nbytes in collectives:
                traffic.count_graph(name, count, nbytes, end)

        launch()
        self.items.append(launch)


class StepGraphs:
    """Executes the steps of a stage, first without graphs, later with the graphs of a recorded step.

    Args:
        stage: this rank's stage.
        reducer: reduces the stage's gradients.
        forward_backward: executes a step (gpt4d.parallel.pipeline.runtime.StageRuntime).
    """

    def __init__(self, stage: Stage, reducer: GradientReducer, forward_backward: Callable[..., torch.Tensor]):
        self.stage, self.reducer, self.forward_backward = stage, reducer, forward_backward
        self._warm_up_steps = _WARM_UP_STEPS
        self._step: tuple[int, float] | None = None
        self._stream = torch.cuda.Stream(stage.weights.device)  # one, because libraries allocate memory for each
        self._recording: Recording | None = None
        self._batches: list[Any] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, batches: Iterable[Any], microbatches: int, divisor: float) -> torch.Tensor:
        """Execute a step, as ``forward_backward`` does."""
        if self._step != (microbatches, divisor):
            self.release()
            self._step, self._warm_up_steps = (microbatches, divisor), _WARM_UP_STEPS
        if self._warm_up_steps:
            self._warm_up_steps -= 1
            return self.forward_backward(batches, microbatches, divisor)
        # A graph cannot wait for transfers that start outside.
        self.reducer.wait_params()
        if self.stage.exchange:
            self.stage.exchange.wait_for_held()
        if self._recording is None:
            self._record(list(batches), microbatches, divisor)
        else:
            self._replay(list(batches))
        return self._loss.clone()

    def _record(self, batches: list[Any], microbatches: int, divisor: float) -> None:
        torch.cuda.empty_cache()  # the pool of the graphs takes the memory of the steps without graphs
        self._batches = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batches)
        recording = Recording(self.stage, self.reducer, self._stream)
        self._loss = self.forward_backward(iter(self._batches), microbatches, divisor, recording)
        recording.end()
        self._recording = recording  # only now: after an error, there is nothing to release
        trained: dict[Any, None] = dict.fromkeys([*self.stage.module.parameters(), *self.reducer.optimizer_shards])
        self._gradients = [(parameter, parameter.grad) for parameter in trained if parameter.grad is not None]

    def _replay(self, batches: list[Any]) -> None:
        assert self._recording is not None
        recorded, given = (
            [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
            for values in (self._batches, batches)
        )
        assert [tensor.shape for tensor in recorded] == [tensor.shape for tensor in given], "the batch has other shapes"
        torch._foreach_copy_(recorded, given)
        for item in self._recording.items:
            item()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def release(self) -> None:
        """Free the graphs, whose memory torch's allocator can use for other work. The next step is recorded again."""
        if self._recording is None:
            return
        self._recording.items.clear()  # they refer to the recording
        self._recording = None
        self._batches, self._gradients = [], []
        del self._loss
