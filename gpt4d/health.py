"""What the numbers of a step say: ones that are none, and ones that jump."""

import math
import statistics
from dataclasses import asdict, dataclass
from typing import NamedTuple, NoReturn

import torch

from gpt4d.config import ConfigError, TrainConfig

_WINDOW = 100  # values that a bound remembers, about
_FEWEST = 20  # before that many there is no bound
_DEVIATIONS = 6.0
_LATE = 1.5  # times the median seconds of a step
_LATE_TIMES = 5  # lines of metrics.jsonl in a row


class StepMetrics(NamedTuple):
    """Of one step, the same on every rank."""

    step: int
    loss: float
    norm: float
    lr: float
    skipped: bool  # the weights are what they were
    stopping: bool  # a rank has been asked to stop


class PendingMetrics:
    """``StepMetrics`` on their way from the device. A GPU may be a step ahead of who reads them."""

    def __init__(self, step: int, lr: float, values: torch.Tensor):
        """``values``: loss, norm, whether skipped, whether stopping: [4], float64."""
        self.step, self.lr, self.values, self.arrived = step, lr, values, None
        if values.is_cuda:
            self.values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self.arrived = torch.cuda.current_stream().record_event()

    def read(self) -> StepMetrics:
        if self.arrived:
            self.arrived.synchronize()
        loss, norm, skipped, stopping = self.values.tolist()
        return StepMetrics(self.step, loss, norm, self.lr, skipped > 0, stopping > 0)


@dataclass
class Bound:
    """What is beyond so many deviations above the mean of the last values: a spike."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    @property
    def limit(self) -> float:
        return self.mean + _DEVIATIONS * math.sqrt(self.variance) if self.count >= _FEWEST else math.inf

    def add(self, value: float) -> None:
        """A spike counts as what the limit is: it does not hide the next one, and a new level is learnt in time."""
        value = min(value, self.limit)
        self.count += 1
        weight = max(1 / self.count, 1 / _WINDOW)
        deviation = value - self.mean
        self.mean += weight * deviation
        self.variance = (1 - weight) * (self.variance + weight * deviation**2)


class LossMonitor:
    """Counts the steps without an update, and tells spikes of the loss and of the gradient's norm.

    All ranks see the same numbers and come to the same conclusions.
    """

    def __init__(self, config: TrainConfig, lr: float):
        self.config, self.lr = config, lr
        self.bounds = {"loss": Bound(), "grad_norm": Bound()}
        self.skipped_in_a_row = 0
        self.last: StepMetrics | None = None

    @property
    def sound(self) -> bool:
        """Whether the last step's loss and norm were finite: if not, the update before may have spoilt the weights."""
        return self.last is None or (math.isfinite(self.last.loss) and math.isfinite(self.last.norm))

    def spikes(self, loss: float, norm: float) -> dict[str, float]:
        """Of loss and norm those beyond their bound, with that bound."""
        values = {"loss": loss, "grad_norm": norm}
        return {what: bound.limit for what, bound in self.bounds.items() if values[what] > bound.limit}

    def note(self, numbers: StepMetrics) -> tuple[str, dict] | None:
        """Takes in a step. What is to be told of it, if anything: words, and values for metrics.jsonl.

        ConfigError once ``train.max_skipped`` steps in a row had no update.
        """
        step, loss, norm = numbers.step, numbers.loss, numbers.norm
        self.last = numbers
        found = self.spikes(loss, norm) if self.sound else {}
        if self.sound:
            self.bounds["loss"].add(loss)
            self.bounds["grad_norm"].add(norm)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if numbers.skipped else 0
        if self.skipped_in_a_row >= self.config.max_skipped:
            self.give_up()
        if self.sound and not found:
            return None
        what = "; ".join(f"{name} above {limit:.4g}" for name, limit in found.items()) or "not finite"
        words = f"step {step}: loss {loss:.4f}, gradient norm {norm:.4g}: {what}"
        values = {"step": step, "loss": loss, "grad_norm": norm, "bounds": found, "skipped": numbers.skipped}
        return words + (", the step is skipped" if numbers.skipped else ""), values

    def give_up(self) -> NoReturn:
        raise ConfigError(
            f"optim.lr={self.lr}: {self.skipped_in_a_row} step(s) in a row were skipped; at step {self.last.step} loss "
            f"and gradient norm are {self.last.loss}, {self.last.norm}. A lower rate, a longer optim.warmup_steps or "
            "another train.max_skipped may do. Nothing of it was saved"
        )

    def state(self) -> dict[str, dict]:
        """For a checkpoint: a run that goes on from it skips what it would have skipped."""
        return {name: asdict(bound) for name, bound in self.bounds.items()}

    def restore(self, state: dict[str, dict]) -> None:
        self.bounds |= {name: Bound(**bound) for name, bound in state.items()}


class Stragglers:
    """Finds the rank that the others wait for, if it is the same again and again."""

    def __init__(self, hosts: list[str]):
        self.hosts = hosts
        self.slowest, self.times = -1, 0

    def note(self, busy: list[float]) -> tuple[dict, str]:
        """Takes in each rank's seconds of a step without waiting. Their spread, and a word on who is late, or none."""
        usual, most = statistics.median(busy), max(busy)
        rank = busy.index(most)
        late = most > _LATE * usual
        self.times = self.times + 1 if late and rank == self.slowest else int(late)
        self.slowest = rank
        words = ""
        if self.times and self.times % _LATE_TIMES == 0:
            words = f"rank {rank} on {self.hosts[rank]} takes {most:.3f} s a step, the others about {usual:.3f}"
        return {"min": min(busy), "median": usual, "max": most, "slowest": rank}, words


def all_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether every element of every tensor is a number."""
    largest = torch._foreach_norm([tensor.detach().float() for tensor in tensors], math.inf)
    return bool(torch.stack(largest).isfinite().all())
