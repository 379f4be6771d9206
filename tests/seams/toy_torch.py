"""The toy model and the toy task: what needs torch.

Shapes: B samples, S rows of a sample, T rows, F features, H hidden, O outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.config import Config
from gpt4d.data.batch import Batch
from gpt4d.model.description import Part
from gpt4d.parallel import random
from gpt4d.parallel.chunks import run_blocks
from gpt4d.parallel.collectives import Axis
from gpt4d.parallel.layers.module import Layer
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.stage import Stage
from gpt4d.parallel.turns import run_alone
from gpt4d.parallel.weights import WeightStream
from gpt4d.task.task import Artifact
from tests.seams.toy import ToyConfig, down, first_layer, gate_and_up, last_layer

SAMPLES, HELD_OUT = 64, 16
DECAY = 0.8  # of the averaged weight at each step


class GatedMLP(nn.Module):
    def __init__(self, weights: WeightStream, hidden: int, inner: int):
        super().__init__()
        self.up = Layer(gate_and_up(hidden, inner), weights)
        self.down = Layer(down(hidden, inner), weights)

    async def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate, up = (await self.up(x_TH)).unbind(-2)
        return x_TH + await self.down(F.silu(gate) * up)


class Toy(nn.Module):
    """From features that every rank has whole to outputs that x splits; or parts of it."""

    def __init__(self, config: ToyConfig, weights: WeightStream, parts: Sequence[Part]):
        super().__init__()
        self.config, self.weights, self.parts = config, weights, parts
        if any(part.begins for part in parts):
            self.input = Layer(first_layer(config), weights)
        self.blocks = nn.ModuleDict(
            {str(i): GatedMLP(weights, config.hidden, config.inner(i)) for part in parts for i in part.blocks}
        )
        if any(part.ends for part in parts):
            self.output = Layer(last_layer(config), weights)

    def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
        return self.compute(self.parts[0], x_BSF, {})

    def compute(self, part: Part, x_BSF: torch.Tensor, received: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the residual stream after a part, or the outputs of the last one."""
        if part.begins:
            x_TF = own_part(x_BSF, self.weights.grid.x).flatten(0, 1).to(self.weights.compute_dtype)
            x_TH = run_alone(self.input(x_TF))
        else:
            x_TH = received["stream"]
        x_TH = run_blocks(self.weights, [self.blocks[str(index)] for index in part.blocks], x_TH)
        return run_alone(self.output(x_TH)).unflatten(0, x_BSF.shape[:2]) if part.ends else x_TH


def own_part(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return this rank's part of a tensor whose last dim ``axis`` splits."""
    return tensor.chunk(axis.size, -1)[axis.index]


class SquaredErrorFunction(torch.autograd.Function):
    """``Σ (predicted - target)²`` over all features of ``axis``, each rank of which has its part of them.

    Every rank's loss is the whole sum, so its derivative by a rank's own features needs no collective.
    """

    @staticmethod
    def forward(ctx, predicted, targets, axis: Axis):
        wide = predicted if predicted.dtype == torch.float64 else predicted.float()
        errors = wide - targets
        ctx.save_for_backward(errors)
        ctx.dtype = predicted.dtype
        return axis.all_reduce(errors.square().sum().view(1)).view(())

    @staticmethod
    def backward(ctx, d_loss):
        (errors,) = ctx.saved_tensors
        return (2 * d_loss * errors).to(ctx.dtype), None, None


def samples(config: Config, sample_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [B, S, F] and targets [B, S, O] of samples, float32: functions of the seed and their ids."""
    model, length = config.model, config.train.seq_len
    key = random.key(config.train.seed, "samples")
    shape = (SAMPLES + HELD_OUT, length, model.features)
    whole = (slice(0, length), slice(0, model.features))
    inputs = torch.cat([random.normal(key, shape, (slice(i, i + 1), *whole)) for i in sample_ids])
    return inputs, inputs[..., : model.outputs] - inputs[..., -model.outputs :].sin()


class Regression:
    """Rows of numbers to be predicted from rows of numbers (gpt4d.task.task.Task). It averages one weight over time."""

    unit = "rows"
    samples = SAMPLES
    waited_s = 0.0

    def __init__(self, config: Config):
        self.config = config
        self.units_per_sample = config.train.seq_len

    def connect(self, stage: Stage, micro_batch_size: int) -> None:
        self._stage, self._micro_batch_size = stage, micro_batch_size
        self._averaged = stage.module.output.weight if hasattr(stage.module, "output") else None
        if self._averaged is not None:
            self._average = torch.zeros_like(self._averaged, requires_grad=False)

    def batches(self, first_sample: int) -> Iterator[Batch]:
        return self._microbatches(first_sample, 0, SAMPLES)

    validation_steps = 2

    def validation_batches(self, index: int) -> Iterator[Batch]:
        return self._microbatches(index * self.config.train.batch_size, SAMPLES, HELD_OUT)

    def _microbatches(self, first_sample: int, offset: int, count: int) -> Iterator[Batch]:
        grid, device, size = self._stage.grid, self._stage.weights.device, self._micro_batch_size
        for part in range(first_sample, first_sample + self.config.train.batch_size, size * grid.sizes.batch_shards):
            start = part + grid.batch_shard * size
            ids = torch.arange(start, start + size)
            inputs, targets = samples(self.config, (offset + ids % count).tolist())
            yield Batch({"rows": inputs.to(device)}, targets.to(device), ids.to(device))

    def compute(
        self, module: nn.Module, part: Part, batch: Batch, received: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        out, axis = module.compute(part, batch.inputs["rows"], received), self._stage.grid.x
        if not part.ends:
            return {"stream": out}
        return {"loss": SquaredErrorFunction.apply(out, own_part(batch.targets, axis), axis)}

    def after_update(self, step: int) -> None:
        if self._averaged is None:
            return
        self._stage.weights.pre_gather_hook(self._averaged)
        self._average.lerp_(self._averaged.detach(), 1 - DECAY)

    def after_init(self) -> None:
        if self._averaged is not None:
            self._average.zero_()

    def sample(self) -> Artifact:
        inputs, targets = samples(self.config, [SAMPLES])
        with torch.no_grad():
            batch = Batch({"rows": inputs}, targets, torch.tensor([SAMPLES]))
            error = self.compute(self._stage.module, self._stage.parts[0], batch, {})["loss"]
        return Artifact(f"squared error of a held-out sample: {error:.4g}", {"squared_error": error.item()})

    def summary(self) -> str:
        return f"{SAMPLES} samples to train on, {HELD_OUT} held out"

    def identity(self) -> dict[str, str]:
        return {"samples": f"{SAMPLES} of {self.config.train.seq_len} rows", "data": "random rows"}

    def verify(self, run_dir: Path) -> None: ...

    def documents(self) -> dict[str, bytes]:
        return {}

    def extra_state(self) -> dict[str, tuple[torch.Tensor, ParameterSpec]]:
        return {} if self._averaged is None else {"output_average": (self._average, self._averaged.spec)}

    def close(self) -> None: ...
