"""What the planner says a step takes of a device's memory is what tensors take."""

import pytest
import torch

from gpt4d import optim
from gpt4d.config import Config, GridSizes, compose
from gpt4d.model.gpt2.model import GPT
from gpt4d.model.init import initialize
from gpt4d.parallel import collectives, gradients
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.weights import WeightStream, compute_dtype
from gpt4d.planner.estimate import GIB, Estimate
from gpt4d.planner.workload import parameters, training_state
from tests.grids import grid_name

MODEL = ("model.layers=6", "model.hidden=64", "model.heads=4", "model.vocab_size=256", "model.max_positions=32")


class Training:
    """What the trainer does in a step, without its reports."""

    def __init__(self, config: Config, sizes: GridSizes):
        self.config, self.grid, train = config, Grid(sizes), config.train
        dtype = compute_dtype(train.precision, torch.device("cpu"))
        weights = WeightStream(self.grid, dtype, overlap=config.parallel.overlap)
        recompute, cached = train.activation_checkpointing == "full", config.parallel.cache_layers
        self.model = GPT(config.model, weights, recompute, cached)
        initialize(self.model, 0, self.grid)
        names, found = zip(*self.model.named_parameters(), strict=True)
        self.total = gradients.GradientReducer(weights, found, shard=config.optim.shard_states)
        self.optimizer = optim.build_optimizer(zip(names, self.total.owned, strict=True), config.optim)
        self.share = train.batch_size // sizes.batch_shards
        self.ids = torch.randint(config.model.vocab_size, (self.share, train.seq_len))

    def backward(self) -> None:
        size = self.config.train.micro_batch_size or self.share
        for ids in self.ids.split(size):
            self.model.loss_sum(ids, ids, torch.arange(len(ids))).backward()

    def step(self) -> None:
        self.backward()
        self.total.finish()
        norm = gradients.squared_norm(self.total.owned, self.grid, torch.device("cpu"))
        norm = collectives.all_reduce(norm.view(1), self.grid.world)[0].sqrt()
        optim.clip(self.total.owned, norm, 1.0)
        optim.update(self.optimizer, ~norm.isfinite())
        self.total.spread()
        self.total.arrive()
        self.optimizer.zero_grad(set_to_none=True)


def state_taken(config: Config, sizes: GridSizes) -> dict[str, int]:
    training = Training(config, sizes)
    training.backward()
    training.model.weights.finish()
    found, states = list(training.model.parameters()), training.optimizer.state.values()
    return {
        "weights": sum(p.untyped_storage().nbytes() for p in found),
        "gradients": sum(p.grad.nbytes for p in found),
        "optimizer": sum(s[k].untyped_storage().nbytes() for s in states for k in ("exp_avg", "exp_avg_sq")),
    }


def peak_taken(config: Config, sizes: GridSizes) -> int:
    """The most that torch's allocator has given out in a step, by its profiler, over what was there before."""
    from torch.profiler import ProfilerActivity, profile

    training = Training(config, sizes)
    for _ in range(2):
        training.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.step()
    events = profiler.profiler.kineto_results.events()
    now = peak = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += nbytes
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("sizes", [GridSizes(2, 1, 2, 1), GridSizes(1, 2, 1, 4)], ids=grid_name)
@pytest.mark.parametrize("shard", [False, True])
def test_weights_gradients_and_states_take_what_the_layouts_say(ranks, sizes, shard):
    # The whole gradients, before they are summed over data: without buckets that set off meanwhile.
    config = compose([*MODEL, f"optim.shard_states={shard}", "train.batch_size=8", "parallel.overlap.data=false"])
    for taken in ranks.run(sizes.devices, state_taken, config, sizes):
        assert taken == training_state(config.model, sizes, shard)


@pytest.mark.parametrize(
    ("sizes", "overrides"),
    [
        (GridSizes(), []),
        (GridSizes(1, 2, 1, 1), []),
        (GridSizes(2, 1, 2, 1), []),
        (GridSizes(1, 1, 2, 2), ["train.micro_batch_size=2"]),
        (GridSizes(1, 1, 1, 4), ["optim.shard_states=true", "train.activation_checkpointing=full"]),
        (GridSizes(2, 2, 1, 1), ["train.activation_checkpointing=full"]),
        (GridSizes(1, 1, 4, 1), ["train.activation_checkpointing=full", "parallel.cache_layers=2"]),
        (GridSizes(2, 1, 2, 1), ["train.precision=bf16", "train.activation_checkpointing=full"]),
        (GridSizes(2, 2, 1, 1), ["train.precision=bf16", "train.micro_batch_size=2"]),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_foretold_within_10_percent(ranks, sizes, overrides):
    config = compose([*MODEL, "train.batch_size=8", "cluster.reserved_gib=0", *overrides])
    state = training_state(config.model, sizes, config.optim.shard_states)
    taken = max(ranks.run(sizes.devices, peak_taken, config, sizes)) + state["weights"] + state["optimizer"]
    estimate = Estimate(config, sizes)
    assert estimate.memory_gib(config.train.micro_batch_size or estimate.share) * GIB == pytest.approx(taken, rel=0.1)


def test_the_planners_parameters_are_the_models():
    config = compose([*MODEL])
    model = GPT(config.model, WeightStream(Grid.single_device()))
    ours = {name: (tensor.shape, tensor.layout) for name, tensor in parameters(config.model).items()}
    theirs = {name: (p.spec.shape, p.spec.layout) for name, p in model.named_parameters()}
    assert list(ours.items()) == list(theirs.items())
