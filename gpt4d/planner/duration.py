"""The duration of a run: steps, tokens and hours at a planned step time."""

from dataclasses import dataclass

from gpt4d.config import Config, batch_sizes
from gpt4d.config.length import samples_of
from gpt4d.model import registry


@dataclass(frozen=True)
class Duration:
    """Number of steps, step time and devices of a run, and the resulting hours."""

    steps: int | None  # None: train.epochs, whose number of steps depends on the data
    devices: int
    total: int | None  # tokens or images of the run; None as for steps
    units: int  # tokens or images per step of train.batch_size
    unit: str
    step_time_s: float
    price: float | None = None  # price of a device-hour, in any currency

    @property
    def hours(self) -> float | None:
        """Hours of all steps, without validation, checkpoints and restarts; None if their number is unknown.

        The smaller batches of ``train.batch_ramp`` are assumed to have the same throughput.
        """
        return None if self.total is None else self.total / self.units * self.step_time_s / 3600

    @property
    def device_hours(self) -> float | None:
        """Hours of all steps times devices; None if the number of steps is unknown."""
        return None if self.hours is None else self.hours * self.devices

    @property
    def cost(self) -> float | None:
        """Price of all device-hours; None if it is unknown."""
        return None if self.device_hours is None or self.price is None else self.device_hours * self.price

    @property
    def units_per_s(self) -> float:
        """Tokens or images per second over all devices."""
        return self.units / self.step_time_s

    @property
    def speed(self) -> str:
        """Readable tokens or images per second."""
        return f"{_rounded(self.units_per_s)} {self.unit}/s"

    def __str__(self) -> str:
        if self.steps is None or self.total is None or self.hours is None or self.device_hours is None:
            return f"{self.speed}; the data decide how many steps train.epochs takes"
        cost = "" if self.cost is None else f", which cost {_rounded(self.cost)} at {self.price:g} each"
        return (
            f"{self.speed}; {self.steps:,} steps ({_short(self.total)} {self.unit}) take {_hours(self.hours)}, "
            f"{_rounded(self.device_hours)} device-hours{cost}"
        )


def duration(config: Config, devices: int, step_time_s: float, price: float | None = None) -> Duration:
    """Return the duration of a run with ``step_time_s`` seconds per step. ``price``: price of a device-hour."""
    train, family = config.train, registry.of(config.model)
    units = family.units_per_sample(config)
    steps = train.steps if train.epochs is None else None
    total = None if steps is None else samples_of(train, steps) * units
    return Duration(steps, devices, total, train.batch_size * units, family.unit, step_time_s, price)


def range_text(fast: Duration, slow: Duration) -> str:
    """Return the hours and cost of a run between two durations, or its speed if the number of steps is unknown."""
    if fast.hours is None or slow.hours is None:
        return f"{_rounded(slow.units_per_s)} to {fast.speed}"
    cost = "" if fast.cost is None or slow.cost is None else f" for {_rounded(fast.cost)} to {_rounded(slow.cost)}"
    return f"{_hours(fast.hours)} to {_hours(slow.hours)}{cost}"


def batch_text(config: Config) -> str:
    """Return a readable description of the batch, since the planner's answers depend on it."""
    train, unit = config.train, registry.of(config.model).unit
    size = " to ".join(f"{size:,}" for size in dict.fromkeys((batch_sizes(train)[0], train.batch_size)))
    if unit != "tokens":
        return f"{size} {unit} per step"
    return f"{size} sequences of {train.seq_len:,} tokens per step"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.3g} s"
    if hours < 1:
        return f"{hours * 60:.3g} min"
    return f"{hours:,.3g} h" if hours < 72 else f"{hours:,.0f} h ({hours / 24:,.1f} days)"


def _short(count: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
