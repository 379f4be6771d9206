"""The angles of rotary embeddings and their scaling for longer sequences. No torch here."""

import math

from gpt4d.model.llama.config import RotaryConfig


def frequencies(config: RotaryConfig) -> list[float]:
    """Return the angle per position, in radians, of each pair of a head's features."""
    size = config.head_size
    plain = [config.rope_theta ** (-2 * pair / size) for pair in range(size // 2)]
    if config.rope_scaling == "none":
        return plain
    shares = [_SHARES[config.rope_scaling](config, pair, frequency) for pair, frequency in enumerate(plain)]
    return [f * (kept + (1 - kept) / config.rope_factor) for f, kept in zip(plain, shares, strict=True)]


def scale(config: RotaryConfig) -> float:
    """Return the factor of rotated queries and keys: YaRN sharpens the attention of long sequences."""
    if config.rope_scaling != "yarn":
        return 1.0
    return config.rope_attention_factor or 0.1 * math.log(max(config.rope_factor, 1.0)) + 1


def _linear_share(config: RotaryConfig, pair: int, frequency: float) -> float:
    """Return no share of the unscaled frequency: all frequencies are divided by the factor (Chen et al., 2023)."""
    return 0.0


def _llama3_share(config: RotaryConfig, pair: int, frequency: float) -> float:
    """Return the share of the unscaled frequency, from 0 for slow pairs to 1 for fast pairs (Llama 3.1)."""
    rotations = config.rope_original_positions * frequency / (2 * math.pi)
    low, high = config.rope_low_frequency, config.rope_high_frequency
    return min(1.0, max(0.0, (rotations - low) / (high - low)))


def _yarn_share(config: RotaryConfig, pair: int, frequency: float) -> float:
    """Return the share of the unscaled frequency, a ramp over the pairs of features (YaRN, §3.2)."""

    def place(rotations: float) -> float:
        """Return the index of the feature pair that completes this many rotations in the original maximum length."""
        log = math.log(config.rope_original_positions / (rotations * 2 * math.pi))
        return config.head_size * log / (2 * math.log(config.rope_theta))

    first, last = place(config.rope_beta_fast), place(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_size - 1)
    if first == last:
        last += 0.001
    return 1 - min(1.0, max(0.0, (pair - first) / (last - first)))


_SHARES = {"linear": _linear_share, "llama3": _llama3_share, "yarn": _yarn_share}
