"""The diffusion process: noise schedules, noised images, training targets and DDIM sampling.

The notation follows Song et al. (DDIM) and Nichol & Dhariwal: an image x_0 with values in [-1, 1], noise ε, and
timesteps 0 to ``steps`` - 1, at which x_t = √ᾱ_t·x_0 + √(1 - ᾱ_t)·ε. Every image of a batch [n, height, width,
channels] has its own timestep, int64 [n].

Timesteps and noise are functions of the seed and a sample's id (gpt4d.parallel.random), not of a generator's state, so
that they are equal on every grid.
"""

import math
from collections.abc import Callable

import torch

from gpt4d.parallel import random

_MAX_BETA = 0.999
_COSINE_OFFSET = 0.008


def linear_betas(steps: int) -> torch.Tensor:
    """Return β of each timestep, float64 [steps]: from 1e-4 to 0.02 at 1000 steps (Ho et al., DDPM, §4).

    For another number of steps they are scaled by 1000 / steps, so that the last timestep has the same noise level.
    """
    scale = 1000 / steps
    return torch.linspace(scale * 1e-4, scale * 0.02, steps, dtype=torch.float64).clamp(max=_MAX_BETA)


def cosine_betas(steps: int) -> torch.Tensor:
    """Return β of each timestep, float64 [steps], for ᾱ that falls as a squared cosine (Nichol & Dhariwal, eq. 17)."""
    shares = torch.arange(steps + 1, dtype=torch.float64) / steps
    alpha_bars = ((shares + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * math.pi / 2).cos() ** 2
    return (1 - alpha_bars[1:] / alpha_bars[:-1]).clamp(max=_MAX_BETA)


SCHEDULES = {"linear": linear_betas, "cosine": cosine_betas}
PREDICTIONS = ("epsilon", "v")


class DiffusionProcess:
    """A noise schedule of ``steps`` timesteps, and the model's prediction: ``epsilon`` (ε), or ``v``.

    v = √ᾱ_t·ε - √(1 - ᾱ_t)·x_0 (Salimans & Ho, §4). ``schedule`` is linear or cosine. The tables are on ``device``.
    ``spacing``: ``trailing`` or ``leading`` timesteps of the samples (Lin et al., table 2).
    """

    def __init__(
        self,
        schedule: str,
        steps: int,
        prediction: str,
        device: torch.device | None = None,
        spacing: str = "trailing",
    ):
        assert prediction in PREDICTIONS
        self.steps, self.prediction, self.spacing = steps, prediction, spacing
        self.alpha_bars = (1 - SCHEDULES[schedule](steps)).cumprod(0)
        self._signal, self._noise = (share.sqrt().to(device) for share in (self.alpha_bars, 1 - self.alpha_bars))

    def add_noise(self, x_0: torch.Tensor, epsilon: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return x_t."""
        signal, noise = self._at(timesteps, x_0)
        return signal * x_0 + noise * epsilon

    def target(self, x_0: torch.Tensor, epsilon: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the training target of the model's prediction from x_t: ε or v, in the shape of ``x_0``."""
        if self.prediction == "epsilon":
            return epsilon
        signal, noise = self._at(timesteps, x_0)
        return signal * epsilon - noise * x_0

    def x_0_and_epsilon(
        self, predicted: torch.Tensor, x_t: torch.Tensor, timesteps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the image x_0 and the noise ε that a prediction from x_t implies."""
        signal, noise = self._at(timesteps, x_t)
        if self.prediction == "epsilon":
            return (x_t - noise * predicted) / signal, predicted
        return signal * x_t - noise * predicted, signal * predicted + noise * x_t

    def training_noise(
        self, seed: int, sample_ids: torch.Tensor, shape: tuple[int, ...], held_out: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return timestep [n] and noise ε [n, *shape] of training samples, or of held-out ones, on their device.

        The timestep and the noise of a sample are functions of ``seed`` and the sample's id. Held-out samples and
        training samples with equal ids have different noise.
        """
        split = "held-out" if held_out else "training"
        keys = random.fold(random.key(seed, split, "timestep"), sample_ids)
        return random.integers(keys, self.steps), _noise(random.key(seed, split, "noise"), sample_ids, shape)

    def sampling_noise(self, seed: int, numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the noise [n, *shape] that sampling starts from, a function of ``seed`` and an image's number."""
        return _noise(random.key(seed, "sampling", "noise"), numbers, shape)

    def sampling_timesteps(self, count: int) -> list[int]:
        """Return ``count`` evenly spaced timesteps in descending order.

        Trailing timesteps begin with the last timestep, the noisiest one, and leading ones end with timestep 0.
        """
        assert 1 <= count <= self.steps
        if self.spacing == "leading":
            return [self.steps // count * number for number in reversed(range(count))]
        return [-(-self.steps * number // count) - 1 for number in range(count, 0, -1)]

    def ddim(
        self,
        predict: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        count: int,
        clip_range: float = 1.0,
    ) -> torch.Tensor:
        """Return the images that ``count`` steps of DDIM with η = 0 make of noise ``x`` (Song et al., eq. 12).

        ``predict`` maps x_t and its timesteps [n] to the model's prediction. Each predicted x_0 is clipped to
        [-clip_range, clip_range], and ε is recomputed from x_t and the clipped x_0; 0: neither.
        """
        timesteps = self.sampling_timesteps(count)
        for timestep, following in zip(timesteps, [*timesteps[1:], None], strict=True):
            batch = torch.full((len(x),), timestep, dtype=torch.int64, device=x.device)
            x_0, epsilon = self.x_0_and_epsilon(predict(x, batch), x, batch)
            if clip_range:
                signal, noise = self._at(batch, x)
                x_0 = x_0.clamp(-clip_range, clip_range)
                epsilon = (x - signal * x_0) / noise
            x = x_0 if following is None else self.add_noise(x_0, epsilon, torch.full_like(batch, following))
        return x

    def _at(self, timesteps: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return √ᾱ_t and √(1 - ᾱ_t) of each timestep, in the dtype of the images ``like``."""
        shape = (-1, *[1] * (like.dim() - 1))
        signal, noise = (table[timesteps].to(like.dtype).view(shape) for table in (self._signal, self._noise))
        return signal, noise


def _noise(state: int, numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return standard normal numbers [n, *shape], float32. Row i depends on ``state`` and ``numbers[i]`` only."""
    return random.normal_rows(random.fold(state, numbers), math.prod(shape)).view(len(numbers), *shape)
