"""The execution of a stage's program: forwards, backwards, and the transfers of tensors between stages."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gpt4d.parallel.comm.stats import now
from gpt4d.parallel.cuda_graphs import EAGER, Eager, Recording
from gpt4d.parallel.engine.prefetch import WeightPlan, weight_order
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import BATCH_AXES
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import Program, StageTransfer
from gpt4d.parallel.pipeline.stage_links import Arrival, Exchange
from gpt4d.parallel.pipeline.trace import StageTrace
from gpt4d.parallel.resharding.transfer import ReshardingInFlight
from gpt4d.parallel.stage import Stage

LOSS = "loss"
Tensors = Mapping[str, torch.Tensor]
# Computes a model chunk on a microbatch. Returns the tensors for later chunks by name, or the loss, summed over this
# rank's samples. Arguments: module, boundaries of the chunk, batch, and the tensors that earlier chunks have produced.
Compute = Callable[[nn.Module, Any, Any, Tensors], Tensors]


def whole_model(loss_sum: Callable[[nn.Module, Any], torch.Tensor]) -> Compute:
    """Return the computation of an unsplit model from a function of its loss, summed over this rank's samples."""
    return lambda module, part, batch, received: {LOSS: loss_sum(module, batch)}


class _InFlight(NamedTuple):
    """The tensors that a forward retains for its backward."""

    received: dict[int, dict[str, torch.Tensor]]  # by the virtual stage that produced the tensors
    produced: Tensors


class _StepPlan(NamedTuple):
    """The plan that all steps with the same number of microbatches share."""

    program: Program
    weights: WeightPlan
    weight_contributions: Mapping[str, int]  # number of contributions to the gradient of a gathered weight
    contributions: Mapping[str, int]  # number of contributions to the gradient of each parameter
    last_transfer: int  # number of items of the program up to its last transfer


class StageRuntime:
    """Executes the programs of a stage.

    Args:
        stage: this rank's stage.
        reducer: reduces the stage's gradients.
        compute: computes a model chunk on a microbatch.

    If ``recording`` is set, the times of actions and transfers are appended to it.
    """

    def __init__(self, stage: Stage, reducer: GradientReducer, compute: Compute):
        self.stage, self.reducer, self.compute = stage, reducer, compute
        self.recording: StageTrace | None = None
        self._steps: dict[int, _StepPlan] = {}  # by number of microbatches
        self._evaluations: dict[int, tuple[Program, WeightPlan]] = {}

    def forward_backward(
        self, batches: Iterable[Any], microbatches: int, divisor: float, mode: Eager | Recording = EAGER
    ) -> torch.Tensor:
        """Compute the forwards and backwards of a step; gradients are complete when it returns.

        Args:
            batches: this rank's microbatches.
            microbatches: number of microbatches.
            divisor: global number of units (tokens, images) of the step, so that the result does not depend on the
                split of the batch into ranks and microbatches.
            mode: how the step launches kernels (gpt4d.parallel.cuda_graphs).

        Returns:
            The sum of this rank's losses, divided by ``divisor``, float64, on the device.
        """
        stage = self.stage
        if microbatches not in self._steps:
            self._steps[microbatches] = self._plan_step(microbatches)
        plan = self._steps[microbatches]
        stage.weights.schedule.begin(plan.weights, plan.weight_contributions)
        # The first stage finishes last. Reductions on other stages delay the gradient that it waits for.
        self.reducer.begin(plan.contributions, overlaps_backward=stage.index == 0)
        step = _Step(self, batches, divisor, stage.exchange, mode)
        step.run(plan.program[: plan.last_transfer])
        copies = _GradientsOfCopies(self.stage, mode) if stage.exchange else None
        step.run(plan.program[plan.last_transfer :])
        total = step.finish()
        if copies:
            copies.add()
        mode.resume()
        self.reducer.finish()
        return total

    def _plan_step(self, microbatches: int) -> _StepPlan:
        stage = self.stage
        program = stage.program(microbatches)
        actions = [step for step in program if isinstance(step, Action)]
        contributions = {name: count * microbatches for name, count in stage.contributions.items()}
        added = {name: contributions[name] * stage.chunk_contributions.get(name, 1) for name in stage.cached_for_step}
        order = weight_order(actions, stage.layer_weights, stage.chunk_contributions)
        weights = stage.weights.schedule.plan(order, stage.cached, stage.cached_for_step)
        contributions |= dict.fromkeys(stage.cached_for_step, 1)
        for name in stage.exchange.owned if stage.exchange else ():
            contributions[name] += 1
        last = 1 + max((place for place, item in enumerate(program) if isinstance(item, StageTransfer)), default=-1)
        return _StepPlan(program, weights, {**stage.chunk_contributions, **added}, contributions, last)

    def evaluate(self, batches: Iterable[Any], microbatches: int) -> torch.Tensor:
        """Return the sum of this rank's losses over all microbatches, float64, without gradients."""
        stage, schedule = self.stage, self.stage.weights.schedule
        if microbatches not in self._evaluations:
            program = stage.evaluation(microbatches)
            actions = [step for step in program if isinstance(step, Action)]
            self._evaluations[microbatches] = program, schedule.plan(weight_order(actions, stage.layer_weights))
        program, plan = self._evaluations[microbatches]
        schedule.begin(plan)
        with torch.no_grad():
            step = _Step(self, batches, 1.0, stage.evaluation_exchange, EAGER)
            step.run(program)
            total = step.finish()
        schedule.finish()
        return total


class _GradientsOfCopies:
    """The gradients of weights that other stages have copies of, in one step. It starts to receive them."""

    def __init__(self, stage: Stage, mode: Eager | Recording):
        assert stage.exchange is not None
        self.stage, self.exchange, self.mode = stage, stage.exchange, mode
        self._received: dict[str, ReshardingInFlight] = {}
        self._sent: list[ReshardingInFlight] = []
        if self.exchange.owned:
            mode.communicate(self._start)

    def add(self) -> None:
        """Send the gradients of this stage's copies, and add received gradients to the gradients of owned weights.

        Only rank 0 of the batch axes adds a received gradient, because the reducer later all-reduces over these axes.
        """
        weights, grid, mode = self.stage.weights, self.stage.grid, self.mode
        mode.resume()
        weights.schedule.finish()
        parameters = dict(self.stage.module.named_parameters())
        for copy in self.exchange.copies:
            parameter: Any = parameters[copy.name]
            summed = [grid[axis] for axis in BATCH_AXES if axis not in copy.layout.axes]
            mode.resume()
            if copy.name in self.exchange.held:
                gradient = parameter.grad
                for axis in summed:
                    gradient = axis.all_reduce(gradient)
                mode.communicate(self._send, {copy.name: gradient})
                parameter.grad = None
                continue
            (gradient,) = mode.communicate(partial(self._receive, copy.name)).values()
            if all(axis.index == 0 for axis in summed):
                parameter.grad.add_(gradient)
            weights.on_gradient(parameter)
        mode.communicate(self._wait)

    def _start(self, _: Tensors | None) -> Tensors:
        self._received = self.exchange.receive_gradients()
        return {}

    def _receive(self, name: str, _: Tensors | None) -> Tensors:
        gradient = self._received[name].wait()
        assert gradient is not None
        return {name: gradient}

    def _send(self, gradients: Tensors | None) -> Tensors:
        assert gradients
        self._sent += [self.exchange.send_gradient(name, gradient) for name, gradient in gradients.items()]
        return {}

    def _wait(self, _: Tensors | None) -> Tensors:
        while self._sent:
            self._sent.pop(0).wait()
        self.exchange.wait_for_owned()  # the update changes weights that the previous step has sent
        return {}


def forward_over_stages(
    stage: Stage, exchange: Exchange | None, compute: Callable[[Any, Tensors], Tensors]
) -> Tensors | None:
    """Compute the model chunks of one forward sequentially and return the outputs of the last chunk, by name.

    Return None on stages without the last chunk.

    Args:
        stage: this rank's stage.
        exchange: the links to other stages; None for a single stage.
        compute: returns the outputs of a chunk, by name. Arguments: boundaries of the chunk, and its inputs by name.
    """
    sending: list[Arrival] = []
    local: dict[tuple[int, int], Tensors] = {}
    produced: Tensors = {}
    if exchange:
        exchange.wait_for_held()
    for place, part in stage.parts.items():
        received: dict[str, torch.Tensor] = {}
        for source in stage.sources(place):
            if source in stage.parts:
                received |= local.pop((source, place))
                continue
            assert exchange is not None
            received |= exchange.start(StageTransfer(Action("F", 0, source), place), None).wait()
        produced = compute(part, received)
        for target in stage.targets(place):
            crossing = {name: produced[name] for name in stage.crossing[place, target]}
            if target in stage.parts:
                local[place, target] = crossing
                continue
            assert exchange is not None
            sending.append(exchange.start(StageTransfer(Action("F", 0, place), target), crossing))
    for arrival in sending:
        arrival.wait()
    return None if stage.targets(place) else produced


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a received tensor, zero if the loss does not depend on the tensor."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


class _Step:
    """The state of one program in execution."""

    def __init__(
        self,
        runtime: StageRuntime,
        batches: Iterable[Any],
        divisor: float,
        exchange: Exchange | None,
        mode: Eager | Recording,
    ):
        self.stage, self.compute, self.exchange, self.mode = runtime.stage, runtime.compute, exchange, mode
        mode.resume()
        self.divisor, self.recording = divisor, runtime.recording
        self.total = torch.zeros((), dtype=torch.float64, device=self.stage.weights.device)
        self._remaining: Iterator[Any] = iter(batches)
        self._batches: list[Any] = []  # by microbatch; None after all model chunks of this stage have taken it
        self._taken: Counter[int] = Counter()  # number of model chunks that have taken each microbatch
        self._in_flight: dict[tuple[int, int], _InFlight] = {}  # by virtual stage and microbatch
        self._to_send: dict[StageTransfer, Tensors] = {}
        self._arrivals: dict[StageTransfer, Arrival] = {}
        self._sending: dict[StageTransfer, Arrival] = {}

    def run(self, program: Program) -> None:
        execute = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradients}
        for step in program:
            if isinstance(step, StageTransfer):
                self._start(step)
            else:
                execute[step.kind](step)

    def finish(self) -> torch.Tensor:
        """Wait until all tensors are sent, and return the sum of the losses."""
        if self._sending:
            self.mode.communicate(self._wait_for_sent)
        return self.total

    def _wait_for_sent(self, _: Tensors | None) -> Tensors:
        for transfer, arrival in self._sending.items():
            self._wait(transfer, arrival)
        return {}

    @contextmanager
    def _recorded(self, action: Action) -> Iterator[None]:
        if self.recording is None:
            yield
            return
        start = now(self.total.device)
        yield
        self.recording.actions.append((action, start, now(self.total.device)))

    def _wait(self, transfer: StageTransfer, arrival: Arrival) -> Tensors:
        received = arrival.wait()
        if self.recording is not None:
            self.recording.transfers.append((transfer, *arrival.interval))
        return received

    def _start(self, transfer: StageTransfer) -> None:
        sent = self._to_send.pop(transfer, None)
        started = self._arrivals if sent is None else self._sending
        self.mode.communicate(partial(self._start_transfer, transfer, started), sent)

    def _start_transfer(
        self, transfer: StageTransfer, started: dict[StageTransfer, Arrival], sent: Tensors | None
    ) -> Tensors:
        assert self.exchange is not None
        started[transfer] = self.exchange.start(transfer, sent)
        return {}

    def _take(self, transfer: StageTransfer) -> Tensors:
        """Wait for the tensors of a transfer, or return them if another model chunk of this stage produced them."""
        if (local := self._to_send.pop(transfer, None)) is not None:
            return local
        return self.mode.communicate(partial(self._receive, transfer))

    def _receive(self, transfer: StageTransfer, _: Tensors | None) -> Tensors:
        return self._wait(transfer, self._arrivals.pop(transfer))

    def _take_batch(self, microbatch: int) -> Any:
        """Return the batch of a microbatch. Each model chunk of this stage takes it once."""
        while len(self._batches) <= microbatch:
            self._batches.append(next(self._remaining))
        batch = self._batches[microbatch]
        self._taken[microbatch] += 1
        if self._taken[microbatch] == len(self.stage.parts):
            self._batches[microbatch] = None
        return batch

    def _forward(self, action: Action) -> None:
        stage, (_, microbatch, place) = self.stage, action
        received: dict[int, dict[str, torch.Tensor]] = {}
        for source in stage.sources(place):
            tensors = self._take(StageTransfer(action._replace(virtual_stage=source), place))
            received[source] = {name: tensor.detach() for name, tensor in tensors.items()}
            for tensor in received[source].values():
                tensor.requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())
        inputs = {name: tensor for tensors in received.values() for name, tensor in tensors.items()}
        batch = self._take_batch(microbatch)
        if self.exchange:
            self.exchange.wait_for_held()
        self.mode.resume()
        with self._recorded(action):
            produced = self.compute(stage.module, stage.parts[place], batch, inputs)
        if LOSS in produced:
            loss = produced[LOSS] / self.divisor
            self.total += loss.detach()
            produced = {LOSS: loss}
        for target in stage.targets(place):
            crossing = {name: produced[name].detach() for name in stage.crossing[place, target]}
            self._to_send[StageTransfer(action, target)] = crossing
        if torch.is_grad_enabled():
            self._in_flight[place, microbatch] = _InFlight(received, produced)

    def _backward(self, action: Action) -> None:
        stage, (_, microbatch, place) = self.stage, action
        received, produced = self._in_flight.pop((place, microbatch))
        gradients: dict[str, torch.Tensor] = {}
        for target in stage.targets(place):
            if not any(produced[name].is_floating_point() for name in stage.crossing[place, target]):
                continue
            for name, gradient in self._take_gradients(action, target, place).items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        self.mode.resume()
        roots = [name for name in (LOSS, *gradients) if name in produced and produced[name].requires_grad]
        with self._recorded(action):
            torch.autograd.backward([produced[name] for name in roots], [gradients.get(name) for name in roots])
        for source, tensors in received.items():
            inputs = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
            if inputs:
                self._to_send[StageTransfer(action, source)] = {
                    name: _gradient(tensor) for name, tensor in inputs.items()
                }

    def _take_gradients(self, action: Action, target: int, place: int) -> Tensors:
        """Return the gradients of the tensors that crossed to ``target``, whose backward may be split."""
        for kind in "BI":
            transfer = StageTransfer(Action(kind, action.microbatch, target), place)
            if transfer in self._arrivals or transfer in self._to_send:
                return self._take(transfer)
        raise AssertionError(f"{action}: the gradient from virtual stage {target} was not started")

    def _input_gradient(self, action: Action) -> None:
        with self.stage.weights.schedule.delaying_gradients():
            self._backward(action)

    def _weight_gradients(self, action: Action) -> None:
        self.mode.resume()
        with torch.no_grad(), self._recorded(action):
            self.stage.weights.schedule.compute_delayed_gradients()
