"""Muon: updates equal torch's, and have the same bits on every plan."""

import collections
import functools

import pytest
import torch

from gpt4d.config import Config, GridSizes, MuonConfig, OptimConfig
from gpt4d.model import registry
from gpt4d.optim.matrices import exchanges, matrices_of, views
from gpt4d.optim.muon import orthogonalized
from gpt4d.optim.optimizer import Optimizer
from gpt4d.parallel import random
from gpt4d.parallel.gradient_reducer import own_rows
from gpt4d.parallel.grid import Grid
from gpt4d.plan import one_stage
from gpt4d.planner.device import Device, Links
from gpt4d.planner.update import update
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.support.grids import full
from tests.support.settings import configured

MODELS = {
    "gpt": ["model=gpt_tiny", "model.layers=2", "model.hidden=48", "model.heads=12", "model.vocab_size=300"],
    "llama": [
        "model=llama_tiny", "model.layers=2", "model.hidden=48", "model.heads=12", "model.key_value_heads=6",
        "model.head_size=4", "model.inner=60", "model.vocab_size=300", "model.qkv_bias=true", "model.tied=false",
    ],
    "unet": ["model=unet_tiny"],
    "moe": [
        "model=moe", "model.layers=1", "model.hidden=48", "model.heads=12", "model.key_value_heads=6",
        "model.head_size=4", "model.inner=36", "model.experts=12", "model.shared_inner=24", "model.vocab_size=300",
    ],
}  # fmt: skip
STEPS = 3


def muon_config(model: str, *overrides: str) -> Config:
    return configured([*MODELS[model], "optim=muon", "optim.lr=0.01", "train.precision=fp32", *overrides])


def gradient(parameter, name, step, grid):
    """Return this rank's shard of a global random gradient."""
    spec = parameter.spec
    slices = tuple(slice(*ends) for ends in spec.stored_region(grid.sizes._asdict(), grid.indices))
    values = random.normal(random.key(step, name), spec.stored_shape, slices, parameter.device)
    shard = torch.zeros_like(parameter)
    shard[tuple(slice(extent) for extent in values.shape)] = values
    return shard


def optimizer_shards(config: Config, grid: Grid):
    """Return this rank's shards of the trained parameters of a stage on ``grid``, by name."""
    named = build_stage(one_stage(config, grid.sizes), grid, torch.device("cpu")).module.named_parameters()
    trained = {name: parameter for name, parameter in named if not parameter.spec.frozen}
    return {name: own_rows(p, grid) if config.optim.shard_states else p for name, p in trained.items()}


def optimized(config: Config, sizes: GridSizes, steps: int = STEPS, skipped: int = -1):
    """Return, on a rank, its shards after some steps with their regions, and the bytes of a step along each axis."""
    plan = validate(config, sizes.devices) if config.parallel.rank_order else None
    grid = Grid(sizes, ranks=plan.stages[0].ranks if plan else None)
    optimizer = Optimizer(optimizer_shards(config, grid).items(), config.optim, grid)
    before = {name: axis.traffic.bytes for name, axis in grid.active_axes.items()}
    for step in range(steps):
        for name, shard in optimizer.shards():
            shard.grad = gradient(shard, name, step, grid) * (torch.nan if step == skipped else 1)
        optimizer.step(torch.tensor(step == skipped), torch.tensor(3.0, dtype=torch.float64), limit=2.0)
    sent = {name: (axis.traffic.bytes - before[name]) / steps for name, axis in grid.active_axes.items()}
    found = {name: (p.detach(), p.spec) for name, p in optimizer.shards()} | optimizer.states()
    regions = {name: spec.stored_region(sizes._asdict(), grid.indices) for name, (_, spec) in found.items()}
    return {name: (regions[name], local.clone()) for name, (local, _) in found.items()}, sent


@pytest.fixture(scope="module")
def serial(ranks):
    """Return a function from the name of a model to its weights and states after updates on one device."""

    @functools.cache
    def run(model):
        ((result, _),) = ranks.run(1, optimized, muon_config(model), GridSizes())
        return {name: tensor for name, (_, tensor) in result.items()}

    return run


SHARD = ("optim.shard_states=true",)
PLANS = [
    ("gpt", GridSizes(1, 1, 2, 2), ()),
    ("gpt", GridSizes(2, 2), ("parallel.rank_order=yx", "parallel.gx=2", "parallel.gy=2")),
    ("llama", GridSizes(3, 2, 1, 1), ()),
    ("llama", GridSizes(2, 1, 1, 2), SHARD),
    ("unet", GridSizes(2, 2, 1, 1), ()),
    ("moe", GridSizes(1, 2, 3, 1), ()),
    ("moe", GridSizes(1, 1, 2, 3), SHARD),  # data splits the experts of a rank
    full("moe", GridSizes(1, 1, 4, 2), SHARD),  # data does not split them
    full("gpt", GridSizes(2, 1, 2, 2), ()),
    full("gpt", GridSizes(2, 2, 2, 2), ()),
    full("gpt", GridSizes(1, 1, 1, 3), SHARD),
    full("llama", GridSizes(2, 3, 2, 1), ("parallel.replicated_layers=2",)),
    full("llama", GridSizes(1, 1, 3, 4), ()),
    full("unet", GridSizes(2, 2, 2, 2), ()),
    full("moe", GridSizes(2, 1, 2, 2), ()),
    full("moe", GridSizes(2, 2, 1, 2), ()),
    full("moe", GridSizes(1, 1, 4, 4), ()),
]


@pytest.mark.parametrize(("model", "sizes", "settings"), PLANS)
def test_equal_gradients_give_equal_bits_on_every_plan_and_send_the_planned_bytes(
    ranks, serial, model, sizes, settings
):
    config = muon_config(model, *settings)
    answers = ranks.run(sizes.devices, optimized, config, sizes)
    for result, _ in answers:
        for name, (region, local) in result.items():
            expected = serial(model)[name][tuple(slice(*ends) for ends in region)]
            stored = local[tuple(slice(extent) for extent in expected.shape)]
            assert torch.equal(stored, expected), name
    device = Device(config.cluster, Links(config.cluster, sizes))
    update(device, registry.describe_run(config, [sizes]).parameters, sizes, config.optim, element_bytes=4)
    for axis in ("stage", "data"):
        sent = sum(of_rank.get(axis, 0) for _, of_rank in answers) / sizes.devices
        assert sent == pytest.approx(device.bytes.get(axis, 0), rel=1e-9)
    assert not any(each.get(axis) for each in (device.bytes, *(sent for _, sent in answers)) for axis in "xz")


def test_a_skipped_step_changes_no_weight_and_no_momentum(ranks):
    ((result, _),) = ranks.run(1, optimized, muon_config("gpt"), GridSizes(), STEPS, STEPS - 1)
    ((before, _),) = ranks.run(1, optimized, muon_config("gpt"), GridSizes(), STEPS - 1)
    assert all(torch.equal(tensor, before[name][1]) for name, (_, tensor) in result.items())


class Reference:
    """torch.optim.Muon on copies of all matrices, and AdamW on all further parameters."""

    def __init__(self, model, config: OptimConfig):
        self.parameters = {name: p for name, p in model.named_parameters() if not p.spec.frozen}
        muon = config.muon
        parts = {name: self._parts(p) for name, p in self.parameters.items()}
        self.copies = {name: [torch.nn.Parameter(part.detach().clone()) for part in p] for name, p in parts.items()}
        groups = collections.defaultdict(list)
        for name, copies in self.copies.items():
            spec = self.parameters[name].spec
            groups["matrices" if spec.matrices else "vectors" if spec.group == "vectors" else "decayed"] += copies
        self.muon = torch.optim.Muon(
            groups["matrices"], config.lr, config.weight_decay, muon.momentum, muon.nesterov, tuple(muon.coefficients),
            ns_steps=muon.steps, adjust_lr_fn=muon.scale,
        )  # fmt: skip
        decays = {"decayed": config.weight_decay, "vectors": 0.0}
        of_adamw = [{"params": groups[group], "weight_decay": decay} for group, decay in decays.items()]
        self.adamw = torch.optim.AdamW(of_adamw, config.lr, (config.beta1, config.beta2), config.epsilon)

    @staticmethod
    def _parts(parameter, gradient=False):
        """Return the matrices of a parameter, or of its gradient; another parameter is one part."""
        spec, tensor = parameter.spec, parameter.grad if gradient else parameter.detach()
        if not spec.matrices:
            return [tensor]
        found = zip(views(tensor, spec), matrices_of(spec, GridSizes()), strict=True)
        return [view.permute(matrix.order).reshape(matrix.sides) for view, matrix in found]

    def step(self):
        for name, copies in self.copies.items():
            for copy, part in zip(copies, self._parts(self.parameters[name], gradient=True), strict=True):
                copy.grad = part.clone()
        self.muon.step()
        self.adamw.step()

    def difference(self):
        """Return the largest relative difference between a parameter, or a matrix of it, and its copy."""
        ours = (part for name in self.copies for part in self._parts(self.parameters[name]))
        theirs = (copy for copies in self.copies.values() for copy in copies)
        return max(((a - b).norm() / b.norm().clamp(min=1e-3)).item() for a, b in zip(ours, theirs, strict=True))


def compared(config):
    grid = Grid()
    model = build_stage(one_stage(config, grid.sizes), grid, torch.device("cpu")).module
    reference = Reference(model, config.optim)
    optimizer = Optimizer(reference.parameters.items(), config.optim, grid, torch.bfloat16)
    for step in range(20):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(parameter, name, step, grid)
        reference.step()
        optimizer.step(torch.tensor(False), torch.tensor(1.0), limit=0.0)
    return reference.difference()


@pytest.mark.parametrize(
    ("model", "scale"),
    [
        (pytest.param if (i + j) % 2 == 0 else full)(model, scale)
        for i, model in enumerate(MODELS)
        for j, scale in enumerate(("match_rms_adamw", "original"))
    ],
)
def test_twenty_updates_on_one_rank_equal_those_of_torch(ranks, model, scale):
    settings = [f"optim.muon.scale={scale}", f"optim.muon.nesterov={str(scale == 'original').lower()}"]
    (difference,) = ranks.run(1, compared, muon_config(model, *settings, "optim.weight_decay=0.3"))
    assert difference < 2e-6


def test_the_singular_values_of_an_update_are_about_one():
    config = MuonConfig()
    for shape in ((30, 70), (70, 30), (40, 40)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        found = orthogonalized(matrix, config)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        a, b, c = config.coefficients
        values = values / matrix.norm()
        for _ in range(config.steps):
            values = a * values + b * values**3 + c * values**5
        torch.testing.assert_close(found, left @ torch.diag(values) @ right, rtol=1e-9, atol=1e-9)
        assert values[:-3].min() > 0.6 and values.max() < 1.3


def planned_exchanges(sizes, *overrides, shard_states=False):
    """Return the matrices of a model, the exchanges of an update, and the cost of each home in each exchange."""
    specs = registry.describe_run(configured([*overrides]), [sizes]).parameters.values()
    specs = [spec.over_data(sizes) if shard_states else spec for spec in specs if spec.matrices and not spec.frozen]
    matrices = [matrix for spec in specs for matrix in matrices_of(spec, sizes)]
    planned = exchanges(matrices, [Grid.coordinates(place, sizes) for place in range(sizes.devices)], sizes)
    assert sorted(index for each in planned for index in each.homes) == list(range(len(matrices))), "one home each"
    costs = [[0] * sizes.devices for _ in planned]
    for by_home, exchange in zip(costs, planned, strict=True):
        for index, home in exchange.homes.items():
            by_home[home] += matrices[index].cost
    return matrices, planned, costs


def check_equal_costs(costs):
    by_home = [sum(each) for each in zip(*costs, strict=True)]
    assert max(by_home) < 1.05 * sum(by_home) / len(by_home)


def test_each_matrix_has_one_home_and_the_homes_have_about_equal_costs():
    found, planned, costs = planned_exchanges(GridSizes(2, 2, 2, 2), "model=llama_tiny", "model.layers=32")
    check_equal_costs(costs)
    for exchange in planned:
        for index, holders in exchange.holders.items():
            assert sum(len(ranks) for ranks in holders.values()) == 16
            assert len(holders) == 16 // (1 if "data" in found[index].layout.axes else 2)


@pytest.mark.parametrize("shard_states", [False, True])
def test_a_home_has_experts_that_its_own_rank_holds(shard_states):
    model = ["model=moe", "model.layers=6", "model.experts=24", "model.inner=512", "model.hidden=64", "model.heads=4"]
    sizes = GridSizes(2, 1, 4, 3)
    found, planned, costs = planned_exchanges(sizes, *model, "model.head_size=16", shard_states=shard_states)
    assert len(found) == 6 * (24 * 3 + 4)
    check_equal_costs(costs)
    for exchange in planned:
        for index, home in exchange.homes.items():
            holders = [rank for ranks in exchange.holders[index].values() for rank in ranks]
            assert home in holders and len(holders) in ((2, 24) if shard_states else (6, 24))


def test_the_first_and_the_last_exchange_have_the_cheapest_matrices_of_each_home():
    model = "model=gpt_tiny", "model.layers=4", "model.hidden=64", "model.heads=4"
    _, _, costs = planned_exchanges(GridSizes(2, 2, 2), *model)
    square, wide = 64**3, 4 * 64**3  # each home has two square matrices and a wide one
    assert costs == [[cost] * 8 for cost in (square, wide, square)]
