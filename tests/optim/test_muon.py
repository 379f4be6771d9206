"""Muon: updates equal torch's, and have the same bits on every plan."""

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
        "model=moe", "model.layers=2", "model.hidden=48", "model.heads=12", "model.key_value_heads=6",
        "model.head_size=4", "model.inner=36", "model.experts=12", "model.shared_inner=24", "model.vocab_size=300",
    ],
}  # fmt: skip
STEPS = 4


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
    named = build_stage(config, grid, torch.device("cpu")).module.named_parameters()
    trained = {name: parameter for name, parameter in named if not parameter.spec.frozen}
    return {name: own_rows(p, grid) if config.optim.shard_states else p for name, p in trained.items()}


def optimized(config: Config, sizes: GridSizes, skipped: int = -1):
    """Return, on a rank, its stored shards of weights and states after some steps, with their regions."""
    plan = validate(config, sizes.devices) if config.parallel.rank_order else None
    grid = Grid(sizes, ranks=plan.stages[0].ranks if plan else None)
    optimizer = Optimizer(optimizer_shards(config, grid).items(), config.optim, grid)
    for step in range(STEPS):
        for name, shard in optimizer.shards():
            shard.grad = gradient(shard, name, step, grid) * (torch.nan if step == skipped else 1)
        optimizer.step(torch.tensor(step == skipped), torch.tensor(3.0, dtype=torch.float64), limit=2.0)
    found = {name: (p.detach(), p.spec) for name, p in optimizer.shards()} | optimizer.states()
    return {
        name: (spec.stored_region(sizes._asdict(), grid.indices), local.clone())
        for name, (local, spec) in found.items()
    }


@pytest.fixture(scope="module")
def serial(ranks):
    made = {}

    def run(model):
        if model not in made:
            (result,) = ranks.run(1, optimized, muon_config(model), GridSizes())
            made[model] = {name: tensor for name, (_, tensor) in result.items()}
        return made[model]

    return run


PLANS = [
    ("gpt", GridSizes(2, 1, 2, 2), ()),
    ("llama", GridSizes(3, 2, 1, 1), ()),
    ("gpt", GridSizes(2, 2), ("parallel.rank_order=yx", "parallel.gx=2", "parallel.gy=2")),
    full("gpt", GridSizes(2, 2, 2, 2), ()),
    full("gpt", GridSizes(1, 1, 1, 3), ("optim.shard_states=true",)),
    ("llama", GridSizes(2, 1, 1, 2), ("optim.shard_states=true",)),
    full("llama", GridSizes(2, 3, 2, 1), ("parallel.replicated_layers=2",)),
    full("llama", GridSizes(1, 1, 3, 4), ()),
    full("unet", GridSizes(2, 2, 2, 2), ()),
    ("unet", GridSizes(2, 2, 1, 1), ()),
    ("moe", GridSizes(2, 1, 2, 2), ()),
    ("moe", GridSizes(1, 2, 3, 1), ()),
    ("moe", GridSizes(1, 1, 2, 3), ("optim.shard_states=true",)),  # data splits the experts of a rank
    full("moe", GridSizes(1, 1, 4, 2), ("optim.shard_states=true",)),  # data does not split them
    full("moe", GridSizes(2, 2, 1, 2), ()),
    full("moe", GridSizes(1, 1, 4, 4), ()),
]


@pytest.mark.parametrize(("model", "sizes", "settings"), PLANS)
def test_equal_gradients_give_equal_bits_on_every_plan(ranks, serial, model, sizes, settings):
    for result in ranks.run(sizes.devices, optimized, muon_config(model, *settings), sizes):
        for name, (region, local) in result.items():
            expected = serial(model)[name][tuple(slice(*ends) for ends in region)]
            stored = local[tuple(slice(extent) for extent in expected.shape)]
            assert torch.equal(stored, expected), name


def test_a_skipped_step_changes_no_weight_and_no_momentum(ranks, serial):
    config = muon_config("gpt")
    (result,) = ranks.run(1, optimized, config, GridSizes(), STEPS - 1)
    (before,) = ranks.run(1, optimized_shortly, config)
    assert all(torch.equal(tensor, before[name][1]) for name, (_, tensor) in result.items())


def optimized_shortly(config):
    global STEPS
    STEPS -= 1
    try:
        return optimized(config, GridSizes())
    finally:
        STEPS += 1


def bytes_of_update(config, sizes):
    grid = Grid(sizes)
    optimizer = Optimizer(optimizer_shards(config, grid).items(), config.optim, grid)
    for name, shard in optimizer.shards():
        shard.grad = gradient(shard, name, 0, grid)
    before = {name: axis.traffic.bytes for name, axis in grid.active_axes.items()}
    optimizer.step(torch.tensor(False), torch.tensor(1.0), limit=0.0)
    return {name: axis.traffic.bytes - before[name] for name, axis in grid.active_axes.items()}


UPDATES = [
    ("gpt", GridSizes(2, 1, 2, 2), "false"),
    ("unet", GridSizes(2, 1, 2, 2), "false"),
    ("moe", GridSizes(2, 1, 2, 2), "false"),
    ("moe", GridSizes(1, 1, 2, 3), "true"),
    full("moe", GridSizes(1, 1, 4, 2), "true"),
    full("moe", GridSizes(1, 2, 3, 1), "false"),
]


@pytest.mark.parametrize(("model", "sizes", "shard_states"), UPDATES)
def test_an_update_sends_the_planned_bytes_on_average(ranks, model, sizes, shard_states):
    config = muon_config(model, f"optim.shard_states={shard_states}")
    found = ranks.run(sizes.devices, bytes_of_update, config, sizes)
    device = Device(config.cluster, Links(config.cluster, sizes))
    update(device, registry.describe_run(config, [sizes]).parameters, sizes, config.optim, element_bytes=4)
    for axis in ("stage", "data"):
        sent = sum(of_rank.get(axis, 0) for of_rank in found) / sizes.devices
        assert sent == pytest.approx(device.bytes.get(axis, 0), rel=1e-9)
    assert not any(each.get(axis) for each in (device.bytes, *found) for axis in "xz")


class Reference:
    """torch.optim.Muon on copies of all matrices, and AdamW on all further parameters."""

    def __init__(self, model, config: OptimConfig):
        self.config, self.parameters = config, dict(model.named_parameters())
        hidden = {n: p for n, p in self.parameters.items() if p.spec.matrices}
        self.matrices = {n: [torch.nn.Parameter(m) for m in self._split(p, p.spec)] for n, p in hidden.items()}
        others = {n: torch.nn.Parameter(p.detach().clone()) for n, p in self.parameters.items() if n not in hidden}
        self.others, muon = others, config.muon
        self.muon = torch.optim.Muon(
            [m for found in self.matrices.values() for m in found], config.lr, config.weight_decay, muon.momentum,
            muon.nesterov, tuple(muon.coefficients), ns_steps=muon.steps, adjust_lr_fn=muon.scale,
        )  # fmt: skip
        decayed = [p for n, p in others.items() if self.parameters[n].spec.group != "vectors"]
        vectors = [p for n, p in others.items() if self.parameters[n].spec.group == "vectors"]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, config.lr, (config.beta1, config.beta2), config.epsilon)

    @staticmethod
    def _split(tensor, spec):
        found = []
        for view, matrix in zip(views(tensor.detach(), spec), matrices_of(spec, GridSizes()), strict=True):
            found.append(view.permute(matrix.order).reshape(matrix.sides).clone())
        return found

    def step(self):
        for name, copies in self.matrices.items():
            parameter = self.parameters[name]
            for copy, part in zip(copies, self._split(parameter.grad, parameter.spec), strict=True):
                copy.grad = part
        for name, copy in self.others.items():
            copy.grad = self.parameters[name].grad.clone()
        self.muon.step()
        self.adamw.step()

    def difference(self):
        """Return the largest difference between both models, relative to the change of a weight by a step."""
        pairs = [
            (ours, theirs)
            for name, copies in self.matrices.items()
            for ours, theirs in zip(self._split(self.parameters[name], self.parameters[name].spec), copies, strict=True)
        ]
        pairs += [(self.parameters[name].detach(), copy) for name, copy in self.others.items()]
        return max(((ours - theirs).norm() / theirs.norm().clamp(min=1e-3)).item() for ours, theirs in pairs)


def compared(config):
    grid = Grid()
    model = build_stage(config, grid, torch.device("cpu")).module
    reference = Reference(model, config.optim)
    optimizer = Optimizer(model.named_parameters(), config.optim, grid, torch.bfloat16)
    for step in range(20):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(parameter, name, step, grid)
        reference.step()
        optimizer.step(torch.tensor(False), torch.tensor(1.0), limit=0.0)
    return reference.difference()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
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


def test_each_matrix_has_one_home_and_the_homes_have_about_equal_costs():
    config = configured(["model=llama_tiny", "model.layers=32"])
    sizes = GridSizes(2, 2, 2, 2)
    found = [
        matrix
        for spec in registry.describe_run(config, [sizes]).parameters.values()
        if spec.matrices
        for matrix in matrices_of(spec, sizes)
    ]
    coordinates = [Grid.coordinates(place, sizes) for place in range(sizes.devices)]
    planned = exchanges(found, coordinates, sizes)
    homes = {index: home for exchange in planned for index, home in exchange.homes.items()}
    assert sorted(homes) == list(range(len(found))) and sum(len(each.homes) for each in planned) == len(found)
    costs = [sum(found[index].cost for index, home in homes.items() if home == rank) for rank in range(16)]
    assert max(costs) < 1.05 * sum(costs) / 16
    for exchange in planned:
        for index, holders in exchange.holders.items():
            assert sum(len(ranks) for ranks in holders.values()) == 16
            assert len(holders) == 16 // (1 if "data" in found[index].layout.axes else 2)


@pytest.mark.parametrize("shard_states", [False, True])
def test_a_home_has_experts_that_its_own_rank_holds(shard_states):
    model = ["model=moe", "model.layers=6", "model.experts=24", "model.inner=512", "model.hidden=64", "model.heads=4"]
    config, sizes = configured([*model, "model.head_size=16"]), GridSizes(2, 1, 4, 3)
    specs = registry.describe_run(config, [sizes]).parameters.values()
    specs = [spec.over_data(sizes) if shard_states else spec for spec in specs if spec.matrices and not spec.frozen]
    found = [matrix for spec in specs for matrix in matrices_of(spec, sizes)]
    assert len(found) == 6 * (24 * 3 + 4)
    coordinates = [Grid.coordinates(place, sizes) for place in range(sizes.devices)]
    costs = [0] * sizes.devices
    for exchange in exchanges(found, coordinates, sizes):
        for index, home in exchange.homes.items():
            holders = [rank for ranks in exchange.holders[index].values() for rank in ranks]
            assert home in holders and len(holders) in ((2, 24) if shard_states else (6, 24))
            costs[home] += found[index].cost
    assert max(costs) < 1.05 * sum(costs) / sizes.devices


def test_the_first_and_the_last_exchange_have_the_cheapest_matrices_of_each_home():
    config = configured(["model=gpt_tiny", "model.layers=4", "model.hidden=64", "model.heads=4"])
    sizes = GridSizes(2, 2, 2)
    specs = registry.describe_run(config, [sizes]).parameters.values()
    found = [matrix for spec in specs if spec.matrices for matrix in matrices_of(spec, sizes)]
    planned = exchanges(found, [Grid.coordinates(place, sizes) for place in range(8)], sizes)
    costs = [
        {home: sum(found[index].cost for index, other in each.homes.items() if other == home) for home in range(8)}
        for each in planned
    ]
    square, wide = 64**3, 4 * 64**3  # each home has two square matrices and a wide one
    assert costs == [dict.fromkeys(range(8), cost) for cost in (square, wide, square)]
