"""A case on its ranks against the same configuration on one device: three steps of AdamW and an evaluation."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from gpt4d.checkpoint.storage import LocalShard
from gpt4d.config import Config, ConfigError
from gpt4d.data.loader import Batch
from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import Documents
from gpt4d.parallel.stage import Stage
from gpt4d.plan import ParallelPlan
from gpt4d.step import TrainStep, build_stage
from gpt4d.task.diffusion import Diffusion
from gpt4d.task.language import LanguageModeling
from gpt4d.validation import validate
from tests.exactness.cases import Case
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.stages import own_stage, own_tokens

TOLERANCE = 1e-10  # relative
_LARGEST = 1e-7  # largest limit of a configuration that rounding changes by more than the tolerance
_LEARNING_RATE = 0.01
_END_OF_TEXT = 0
_REJECTION = re.compile(r"[^\s=]+=\S.*: .+; .+")  # key=value: problem; remedy


class Outcome(NamedTuple):
    """The results of a rank."""

    values: dict[str, float]  # global losses and norms of the steps, and the evaluation's loss
    # For each parameter of this rank its shape in a checkpoint, the rank's slices, and the values.
    weights: dict[str, tuple[tuple[int, ...], tuple[slice, ...], torch.Tensor]]


@dataclass
class Result:
    """``differences``: the largest relative one of each kind. ``rejection``: the message of a ConfigError."""

    case: Case
    differences: dict[str, float]
    rejection: str = ""
    problem: str = ""


def _batch(config: Config, step: int) -> Batch:
    """Return the random global batch of a step; targets are float64 for images."""
    draw, train, model = torch.Generator().manual_seed(step), config.train, config.model
    samples = torch.arange(train.batch_size) + step * train.batch_size
    if registry.of(model).task == "diffusion":
        shape = (train.batch_size, model.image_size, model.image_size, model.image_channels)
        noisy, target = torch.randn(2, *shape, generator=draw, dtype=torch.float64)
        timesteps = torch.randint(0, model.timesteps, (train.batch_size,), generator=draw)
        return Batch({"noisy": noisy, "timesteps": timesteps}, target, samples)
    shape = (train.batch_size, train.seq_len + 1)
    ids = torch.randint(0, model.vocab_size, shape, generator=draw)
    ids[torch.rand(shape, generator=draw) < 0.15] = _END_OF_TEXT
    return Batch({"ids": ids[:, :-1]}, ids[:, 1:], samples)


def microbatches(plan: ParallelPlan, stage: Stage, step: int) -> Iterator[Batch]:
    """Yield this rank's parts of a step's batch, as gpt4d.data.loader.Loader cuts it."""
    config = plan.config
    inputs, targets, samples, *_ = _batch(config, step)
    size = plan.micro_batch_size(plan.stages[stage.index])
    for part in torch.arange(len(samples)).chunk(plan.microbatches):
        own = part.split(size)[stage.grid.sample_shard]
        batch = {name: tensor[own] for name, tensor in inputs.items()}
        if "ids" in inputs:
            resets = config.data.reset_attention
            documents = Documents.ending_with(_END_OF_TEXT, batch["ids"]) if resets else None
            batch = {"ids": own_tokens(batch["ids"], stage.grid), "documents": documents}
            yield Batch(batch, own_tokens(targets[own], stage.grid), samples[own])
        else:
            yield Batch(batch, targets[own], samples[own])


def train(plan: ParallelPlan, stage: Stage) -> Outcome:
    """Train two steps, evaluate, and train a third one on this rank's stage."""
    config = plan.config
    is_text = registry.of(config.model).task == "language_modeling"
    compute = partial((LanguageModeling if is_text else Diffusion).compute, None)  # they do not use their task
    train_step = TrainStep(stage, compute, config.optim, config.parallel.overlap.data)
    batches = partial(microbatches, plan, stage)
    units = config.train.batch_size * (config.train.seq_len if is_text else 1)
    values: dict[str, float] = {}
    for step in range(3):
        if step == 2:  # so that an evaluation follows an update, and a checkpoint follows another one
            values["evaluation"] = train_step.evaluate(batches(3), plan.microbatches).item() / units
        result = train_step(batches(step), plan.microbatches, units, _LEARNING_RATE)
        values |= {f"loss {step}": result.loss.item(), f"norm {step}": result.norm.item()}
        assert not result.skipped
    train_step.reducer.wait_params()
    if stage.exchange:
        stage.exchange.wait_for_held()
        stage.exchange.close()
    weights = {}
    for name, parameter in stage.module.named_parameters():
        shard = LocalShard(parameter.detach(), parameter.spec)
        weights[name] = parameter.spec.stored_shape, shard.slices(stage.grid), shard.stored(stage.grid)
    return Outcome(values, weights)


def _train_case(case: Case) -> tuple[Outcome, Outcome | None]:
    """On a rank: train a case and, on the first rank, the same configuration on one device."""
    return train(*own_stage(case.config, case.world_size)), None if dist.get_rank() else _train_alone(case)


def _train_alone(case: Case, rounded: bool = False) -> Outcome:
    """Train a case on one device. ``rounded`` changes two thirds of the weights in their last bit, up or down."""
    plan = validate(case.on_one_device, 1)
    stage = build_stage(plan, Grid.single_device(), torch.device("cpu"), torch.float64)
    draw = torch.Generator().manual_seed(0)
    if rounded:
        with torch.no_grad():
            for parameter in stage.module.parameters():
                bits = torch.randint(-1, 2, parameter.shape, generator=draw).double()
                parameter.mul_(1 + torch.finfo(torch.float64).eps * bits)
    return train(plan, stage)


def _differences(outcomes: Sequence[Outcome], alone: Outcome) -> dict[str, float]:
    """Return the largest relative difference of each kind of value; infinity where a rank lacks a value."""
    largest: dict[str, float] = {}
    covered = {name: torch.zeros(shape, dtype=torch.bool) for name, (shape, _, _) in alone.weights.items()}

    def note(kind: str, difference: float) -> None:
        largest[kind] = max(largest.get(kind, 0.0), difference if difference == difference else torch.inf)

    for outcome in outcomes:
        for name, value in alone.values.items():
            note(name.split()[0], abs(outcome.values[name] - value) / abs(value))
        for name, (shape, place, part) in outcome.weights.items():
            expected, _, whole = alone.weights[name]
            assert shape == expected
            # A weight that begins at 0 and has no gradient, as a norm of queries that attend to one key, stays at 0.
            update = _LEARNING_RATE * whole.numel() ** 0.5
            note("weights", ((part - whole[place]).norm() / max(whole.norm().item(), update)).item())
            covered[name][place] = True
    note("weights", 0.0 if all(mask.all() for mask in covered.values()) else torch.inf)
    return largest


def check(pool: RankPool, case: Case) -> Result:
    """Return the result of a case.

    Each case has a call of the pool: ranks of unequal stages have unequal numbers of process groups, after which torch
    names new ones, so the ranks of the next grid do not find each other.
    """
    try:
        validate(case.config, case.world_size)
        validate(case.on_one_device, 1)
    except ConfigError as error:
        message = str(error)
        clear = "\n" not in message and _REJECTION.fullmatch(message)
        return Result(case, {}, message, "" if clear else f"unclear rejection: {message}")
    try:
        answers = pool.run(case.world_size, _train_case, case)
    except RankFailure as failure:
        return Result(case, {}, problem=str(failure))
    (alone,) = [alone for _, alone in answers if alone]
    differences = _differences([outcome for outcome, _ in answers], alone)
    if all(difference <= TOLERANCE for difference in differences.values()):
        return Result(case, differences)
    # Some configurations magnify rounding errors. Allow ten times the effect of one rounding of the weights.
    (rounded,) = pool.run(1, _train_alone, case, True)
    rounding = _differences([rounded], alone)
    limits = {kind: max(TOLERANCE, min(10 * rounding[kind], _LARGEST)) for kind in differences}
    exact = all(difference <= limits[kind] for kind, difference in differences.items())
    problem = f"differs: {differences}, {rounding} after rounding of the weights"
    return Result(case, differences, problem="" if exact else problem)
