"""Rates that GPUs sustain in long runs of large clusters.

They were fitted on half of the published runs of other trainers (``python -m benchmarks published``). The cluster files
have estimates for a single device, which are higher.
"""

from dataclasses import dataclass, replace

from gpt4d.config.schema import ClusterConfig, LevelConfig


@dataclass(frozen=True)
class SustainedRates:
    """Rates of a kind of GPU, as in ``ClusterConfig``."""

    matmul_tflops: float
    attention_tflops: float
    memory_gb_s: float
    fp8_tflops: float | None = None

    def with_power(self, share: float) -> "SustainedRates":
        """Return the rates with products at ``share`` of their rate, because the power is limited."""
        fp8_tflops = self.fp8_tflops and share * self.fp8_tflops
        return SustainedRates(share * self.matmul_tflops, share * self.attention_tflops, self.memory_gb_s, fp8_tflops)


# By a word of the GPU's name.
SUSTAINED = {
    "A100": SustainedRates(230, 186, 1800),
    "H100": SustainedRates(636, 484, 3000, 1450),
    "B200": SustainedRates(1500, 757, 7100, 3940),
    "GB200": SustainedRates(1650, 757, 7100, 4000),
    "GB300": SustainedRates(1650, 757, 7100, 4390),
}
PRODUCT_HIDDEN = 0.85
HIDDEN = 0.67  # products slow down while a collective occupies multiprocessors and memory
SPREAD = 0.0048
OPERATION_US = 4.6
INSIDE, BETWEEN = 0.484, 0.535  # shares of the vendor's link rates that collectives reach inside and between nodes
LATENCY_US = 24.0  # time of a message between nodes


def sustained(
    cluster: ClusterConfig, rates: SustainedRates, inside: float = INSIDE, between: float = BETWEEN
) -> ClusterConfig:
    """Return a machine with sustained rates.

    Args:
        cluster: the machine, whose links have the vendor's rates.
        rates: the rates of its GPUs.
        inside: share of the link rate that collectives reach on the innermost level of links.
        between: the same for all other levels.
    """
    *outer, innermost = cluster.levels
    levels = [replace(_slower(level, between), latency_us=LATENCY_US) for level in outer]
    return replace(
        cluster,
        matmul_tflops=rates.matmul_tflops,
        attention_tflops=rates.attention_tflops,
        memory_gb_s=rates.memory_gb_s,
        fp8_tflops=rates.fp8_tflops,
        product_hidden=PRODUCT_HIDDEN,
        hidden=HIDDEN,
        spread=SPREAD,
        operation_us=OPERATION_US,
        levels=[*levels, _slower(innermost, inside)],
    )


def _slower(level: LevelConfig, share: float) -> LevelConfig:
    return replace(level, group_gb_s=share * level.group_gb_s, pair_gb_s=level.pair_gb_s and share * level.pair_gb_s)
