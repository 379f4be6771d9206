"""Metrics of a step, and detection of non-finite steps and of spikes in loss and gradient norm."""

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple, NoReturn

import torch

from gpt4d.config import ConfigError, TrainConfig

_WINDOW = 100  # approximate number of values in a running average
_MIN_VALUES = 20  # below this count there is no limit
_DEVIATIONS = 6.0  # standard deviations above the mean at which a value is a spike


class StepMetrics(NamedTuple):
    """Metrics of one step, equal on every rank."""

    step: int
    loss: float
    norm: float
    lr: float
    skipped: bool  # the step left the weights unchanged
    stopping: bool  # a rank has been asked to stop
    routing: torch.Tensor  # as in gpt4d.step.StepResult, on the host


class PendingMetrics:
    """``StepMetrics`` in transfer from the device, so that a GPU can be a step ahead of the loop that reads them."""

    def __init__(self, step: int, lr: float, values: torch.Tensor, routing: torch.Tensor):
        """Start the transfer of ``values``: loss, gradient norm, skipped and stopping, float64 [4], and ``routing``."""
        self.step, self.lr, self.arrived, self.shape = step, lr, None, routing.shape
        self.values = values = torch.cat((values, routing.flatten()))
        if not values.is_cpu:
            self.values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self.arrived = torch.cuda.current_stream().record_event()

    def read(self) -> StepMetrics:
        if self.arrived:
            self.arrived.synchronize()
        (loss, norm, skipped, stopping), routing = self.values[:4].tolist(), self.values[4:].view(self.shape)
        return StepMetrics(self.step, loss, norm, self.lr, skipped > 0, stopping > 0, routing)


@dataclass
class RunningStats:
    """Mean and variance of the last values, and the limit above which a value is a spike."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def limit(self) -> float:
        return self.mean + _DEVIATIONS * math.sqrt(self.variance) if self.count >= _MIN_VALUES else math.inf

    def add(self, value: float) -> None:
        """Add a value, clamped to the limit: a spike does not hide the next one, and a new level is learned in time."""
        value = min(value, self.limit)
        self.count += 1
        weight = max(1 / self.count, 1 / _WINDOW)
        deviation = value - self.mean
        self.mean += weight * deviation
        self.variance = (1 - weight) * (self.variance + weight * deviation**2)


class LossMonitor:
    """Counter of skipped steps and detector of spikes in loss and gradient norm.

    All ranks see the same metrics and reach the same conclusions.
    """

    def __init__(self, config: TrainConfig, lr: float):
        self.config, self.lr = config, lr
        self.stats = {"loss": RunningStats(), "grad_norm": RunningStats()}
        self.skipped_in_a_row = 0
        self.last: StepMetrics | None = None

    @property
    def is_finite(self) -> bool:
        """True if the last step's loss and norm were finite. If not, the update before may have spoiled the weights."""
        return self.last is None or (math.isfinite(self.last.loss) and math.isfinite(self.last.norm))

    def spikes(self, loss: float, norm: float) -> dict[str, float]:
        """Return the limits that ``loss`` and ``norm`` exceed, by name."""
        values = {"loss": loss, "grad_norm": norm}
        return {name: stats.limit for name, stats in self.stats.items() if values[name] > stats.limit}

    def note(self, metrics: StepMetrics) -> tuple[str, dict] | None:
        """Record a step. Return a message and values for metrics.jsonl if the step is non-finite or a spike.

        Raises ConfigError after ``train.max_skipped`` consecutive skipped steps.
        """
        step, loss, norm = metrics.step, metrics.loss, metrics.norm
        self.last = metrics
        exceeded = self.spikes(loss, norm) if self.is_finite else {}
        if self.is_finite:
            self.stats["loss"].add(loss)
            self.stats["grad_norm"].add(norm)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics.skipped else 0
        if self.skipped_in_a_row >= self.config.max_skipped:
            self.give_up()
        if self.is_finite and not exceeded:
            return None
        problem = "; ".join(f"{name} above {limit:.4g}" for name, limit in exceeded.items()) or "not finite"
        message = f"step {step}: loss {loss:.4f}, gradient norm {norm:.4g}: {problem}"
        values = {"step": step, "loss": loss, "grad_norm": norm, "bounds": exceeded, "skipped": metrics.skipped}
        return message + ("; the step was skipped" if metrics.skipped else ""), values

    def give_up(self) -> NoReturn:
        assert self.last is not None
        raise ConfigError(
            f"optim.lr={self.lr}: {self.skipped_in_a_row} step(s) in a row were skipped; at step {self.last.step} loss "
            f"and gradient norm are {self.last.loss}, {self.last.norm}; lower optim.lr, or raise optim.warmup_steps or "
            "train.max_skipped. Non-finite steps are not checkpointed"
        )

    def state(self) -> dict[str, dict]:
        """Return the statistics for a checkpoint, so that a resumed run skips the same steps."""
        return {name: asdict(stats) for name, stats in self.stats.items()}

    def restore(self, state: dict[str, dict]) -> None:
        """Restore a result of ``state``. Raises ConfigError for a value of any other form."""
        try:
            restored = {name: RunningStats(**stats) for name, stats in state.items()}
        except TypeError as error:
            raise ConfigError(
                f"the checkpoint's monitor={state} is damaged ({error}); use another checkpoint"
            ) from None
        if unknown := restored.keys() - self.stats.keys():
            raise ConfigError(f"the checkpoint's monitor has the unknown metric {min(unknown)}; use another checkpoint")
        self.stats |= restored


def all_finite(tensors: list[torch.Tensor]) -> bool:
    """Return whether all elements of all tensors are finite. Synchronizes with the device."""
    largest = torch._foreach_norm([tensor.detach().float() for tensor in tensors], math.inf)
    return bool(torch.stack(largest).isfinite().all())
