"""Random configurations of all families and plans. A seed draws the same configuration everywhere."""

import math
import random
from dataclasses import dataclass
from functools import cached_property, lru_cache

from gpt4d.config import Config, GridSizes, divisors
from gpt4d.config.composing import CONFIG_DIR, to_config
from gpt4d.config.schema import SCHEDULES

MAX_RANKS = 8
FAMILIES = {
    "gpt": "gpt_tiny",
    "llama": "llama_tiny",
    "unet": "unet_tiny",
    "utransformer": "utransformer_tiny",
    "olmo2": "olmo2_tiny",
    "gemma3": "gemma3_tiny",
    "moe": "moe_tiny",
}
_SPOILED = 0.1  # share of cases of which one number is changed, usually to an impossible one

Settings = dict[str, object]


@dataclass(frozen=True)
class Case:
    """A configuration on several ranks."""

    seed: int
    family: str  # a key of FAMILIES
    plan: str  # grid, atp or stages
    world_size: int
    shared: Settings  # settings that the run on one device has too: model, data, optimizer and batch
    own: Settings  # settings that must not change the result

    # Ranks receive the configurations with the case: composing takes longer than training.
    @cached_property
    def config(self) -> Config:
        return _config(FAMILIES[self.family], self.shared | self.own)

    @cached_property
    def on_one_device(self) -> Config:
        return _config(FAMILIES[self.family], self.shared)

    def __str__(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in (self.shared | self.own).items())
        return f"seed {self.seed} on {self.world_size} ranks: model={FAMILIES[self.family]} {settings}"


@lru_cache
def _composed(model: str):
    import hydra

    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return hydra.compose("train", overrides=[f"model={model}"])


def _config(model: str, settings: Settings) -> Config:
    import yaml
    from omegaconf import OmegaConf

    composed = _composed(model).copy()
    for key, value in settings.items():
        OmegaConf.update(composed, key, yaml.safe_load(value) if isinstance(value, str) else value)
    return to_config(composed)


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    family = draw.choice([name for name in FAMILIES if name != "moe"])
    plan = draw.choice(("grid", "grid", "atp", "stages", "stages"))
    grids = _grids(draw, plan)
    own = _plan(draw, plan, grids)
    parts = len(grids) * int(str(own.get("parallel.pipeline.chunks_per_stage", 1)))
    is_text = family in ("gpt", "llama", "olmo2", "gemma3")
    own |= _options(draw, is_text)
    chunks = own["parallel.chunks"] = draw.choice((1, 1, 2, 3))
    batch, of_batch = _batch(draw, plan, grids, own, chunks)
    own |= of_batch
    shared: Settings = {
        "train.batch_size": batch,
        "optim.algorithm": "adamw",
        "optim.clip_norm": draw.choice((0.0, 0.3, 100.0)),
        # Some gradients, such as the gradients of the keys' biases, are 0 but for rounding. AdamW divides them by this.
        "optim.epsilon": 1e-6,
    }
    if is_text:
        model = {"gpt": _gpt, "llama": _llama, "olmo2": _olmo2, "gemma3": _gemma3}[family](draw, grids)
        model["model.layers"] = blocks = draw.randint(parts, parts + 2)
        length, context = draw.randint(5, 20), 1
        more = random.Random(f"context {seed}")
        if len({grid.batch_shards for grid in grids}) == 1 and more.random() < 0.4:
            context = own["parallel.context"] = more.choice(divisors(grids[0].batch_shards))
        length = length if context == 1 else 2 * more.randint(2, 5)  # tokens of a rank
        if own.get("parallel.sequence_parallel"):
            length = math.lcm(length, *(grid.x for grid in grids))
        own["train.loss_chunks"] = draw.choice((1, 1, draw.choice(divisors(length))))
        length *= context
        shared |= {"train.seq_len": length, "model.max_positions": length + draw.randint(0, 3)}
        shared["data.reset_attention"] = draw.random() < 0.3
    else:
        model = _unet(draw, grids, attention_everywhere=family == "utransformer")
        blocks = 5 * len(str(model["model.multipliers"]).split(",")) - 1  # more are possible
    shared |= model
    own |= _kept_weights(draw, blocks)
    if plan == "stages" and parts <= blocks and draw.random() < 0.6:
        own["parallel.pipeline.cuts"] = str(sorted(draw.sample(range(1, blocks), parts - 1)))
    if draw.random() < _SPOILED:
        settings = draw.choice((shared, own))
        key = draw.choice([key for key, value in settings.items() if type(value) is int])
        settings[key] = int(str(settings[key])) + 1
    if is_text:
        shared["train.z_loss"] = draw.choice((0.0, 0.01))
        if draw.random() < 0.3:
            shared |= {"optim.width_transfer": True, "model.base_hidden": draw.choice((5, 64))}
    if draw.random() < 1 / 3:
        shared |= {"optim.algorithm": "muon", "optim.muon.epsilon": 1e-3}  # for the same reason as optim.epsilon
    if family == "llama" and (mixture := random.Random(f"moe {seed}")).random() < 0.5:
        family = "moe"
        _add_experts(mixture, shared, grids)
        own["parallel.expert_data"] = mixture.random() < 0.5
    return Case(seed, family, plan, sum(grid.devices for grid in grids), shared, own)


def _grids(draw: random.Random, plan: str) -> list[GridSizes]:
    """Return the grid of each stage. They have at most MAX_RANKS devices in total, and small models fit on them."""
    while True:
        if plan == "stages":
            devices = [draw.choice((1, 1, 2, 2, 3, 4, 5, 6)) for _ in range(draw.choice((2, 2, 3, 4)))]
        else:
            devices = [draw.choice((2, 3, 4, 5, 6, 8))]
        grids = [_grid(draw, count, "xy" if plan == "atp" else "xyzd") for count in devices]
        if draw.random() < 0.3:
            grids = grids[:1] * len(grids)
        extents = [math.lcm(*(grid.x * grid.z for grid in grids)), math.lcm(*(grid.y * grid.z for grid in grids))]
        shards = math.lcm(*(grid.batch_shards for grid in grids))
        if sum(grid.devices for grid in grids) <= MAX_RANKS and math.lcm(*extents) <= 30 and shards <= 12:
            return grids


def _grid(draw: random.Random, devices: int, axes: str) -> GridSizes:
    """Return a grid of so many devices whose prime factors are on random axes."""
    sizes = dict.fromkeys("xyzd", 1)
    for factor in (2, 3, 5):
        while devices % factor == 0:
            sizes[draw.choice(axes)] *= factor
            devices //= factor
    return GridSizes(*sizes.values())


def _plan(draw: random.Random, plan: str, grids: list[GridSizes]) -> Settings:
    """Return the settings of the plan itself: grids, stages and their schedule."""
    first, settings = grids[0], Settings()
    if plan == "atp":
        settings |= {"parallel.mode": "atp", "parallel.d1": first.x, "parallel.d2": first.y}
    elif plan == "grid" or (all(grid == first for grid in grids) and draw.random() < 0.7):
        settings |= {"parallel.gx": first.x, "parallel.gy": first.y, "parallel.gz": first.z}
    else:
        settings["parallel.pipeline.stage_grids"] = f"[{','.join(map(str, grids))}]"
    settings["parallel.rank_order"] = draw.choice((None, "xy", "yx"))
    if plan == "stages":
        schedule = draw.choice(SCHEDULES)
        settings |= {
            "parallel.pipeline.stages": len(grids),
            "parallel.pipeline.schedule": schedule,
        }
        if schedule == "interleaved_1f1b":
            settings["parallel.pipeline.chunks_per_stage"] = draw.choice((1, 2))
    return settings


def _options(draw: random.Random, is_text: bool) -> Settings:
    """Return settings that fit any plan."""
    settings: Settings = {
        "parallel.scatter_heads": draw.random() < 0.7,
        "train.activation_checkpointing": draw.choice(("none", "none", "selective", "full")),
        "optim.shard_states": draw.random() < 0.5,
    }
    for name in ("all_reduce", "reduce_scatter", "all_gather", "data"):
        settings[f"parallel.overlap.{name}"] = draw.random() < 0.75
    if settings["parallel.overlap.all_gather"]:
        settings["parallel.overlap.prefetch"] = draw.randint(0, 3)
    if is_text:
        settings["parallel.sequence_parallel"] = draw.random() < 0.4
    return settings


def _batch(draw: random.Random, plan: str, grids: list[GridSizes], own: Settings, chunks: int) -> tuple[int, Settings]:
    """Return the size of the batch, and the settings that cut it into microbatches."""
    shards = math.lcm(*(grid.batch_shards for grid in grids))
    samples = shards * chunks * draw.choice((1, 1, 2))  # samples of a microbatch
    if plan == "stages":
        count = draw.randint(1, 5)
        if own["parallel.pipeline.schedule"] == "interleaved_1f1b":
            count = len(grids) * draw.randint(1, 2)
        return count * samples, {"parallel.pipeline.microbatches": count}
    count = draw.choice((1, 1, 2, 3))
    return count * samples, {"train.micro_batch_size": samples // shards}


def _kept_weights(draw: random.Random, blocks: int) -> Settings:
    """Return which weights stay gathered, and which are not split."""
    cached = draw.choice((None, None, 0, "all", draw.randint(1, blocks)))
    settings: Settings = {"parallel.cache_layers": cached}
    if cached:
        settings["parallel.cache_scope"] = draw.choice((None, "microbatch", "step"))
    settings["parallel.replicated_layers"] = draw.choice((0, 0, draw.randint(1, blocks)))
    return settings


def _extents(grids: list[GridSizes]) -> tuple[int, int, int]:
    """Return the multiples that gx, gx·gz and gy·gz of all grids divide."""
    return (
        math.lcm(*(grid.x for grid in grids)),
        math.lcm(*(grid.x * grid.z for grid in grids)),
        math.lcm(*(grid.y * grid.z for grid in grids)),
    )


def _add_experts(draw: random.Random, shared: Settings, grids: list[GridSizes]) -> None:
    """Replace the MLPs of a Llama by experts."""
    experts = math.lcm(2, *(grid.batch_shards for grid in grids)) * draw.choice((1, 2))
    del shared["model.qkv_bias"]
    shared |= {
        "model.qk_norm": draw.choice(("none", "heads", "all")),
        "model.experts": experts,
        "model.experts_per_token": draw.randint(1, min(4, experts)),
        "model.shared_inner": draw.choice((0, shared["model.inner"])),
        "model.router": draw.choice(("softmax", "softmax", "sigmoid")),
        "model.normalized_weights": draw.random() < 0.5,
        "model.balance": draw.choice(("loss", "loss", "bias")),
        "model.balance_rate": 0.1,
        "model.router_z_loss": draw.choice((0.0, 0.1)),
    }


def _vocabulary(draw: random.Random) -> Settings:
    return {"model.vocab_size": draw.randint(258, 310), "model.vocab_multiple": draw.choice((1, 2, 7, 16))}


def _gpt(draw: random.Random, grids: list[GridSizes]) -> Settings:
    x, xz, yz = _extents(grids)
    heads = x * draw.choice((1, 2, 3))
    least = math.lcm(heads, xz, yz)
    return {
        "model.heads": heads,
        "model.hidden": least * draw.randint(1, max(1, 48 // least)),
        "model.dropout": draw.choice((0.0, 0.0, 0.1)),
        "model.attention_dropout": draw.choice((0.0, 0.0, 0.1)),
        **_vocabulary(draw),
    }


def _llama(draw: random.Random, grids: list[GridSizes]) -> Settings:
    x, xz, yz = _extents(grids)
    heads = x * draw.choice((1, 2, 3, 4, 6))
    uneven = [count for count in divisors(heads) if count % x and x % count]  # a rank has parts of heads
    key_value_heads = draw.choice((*divisors(heads), *uneven, *uneven))
    sizes = [n for n in range(2, 62, 2) if key_value_heads * n % x == 0 and heads * n % xz == 0]
    return {
        "model.heads": heads,
        "model.key_value_heads": key_value_heads,
        "model.head_size": draw.choice(sizes[:3]),
        "model.hidden": yz * draw.randint(1, max(1, 48 // yz)),
        "model.inner": xz * draw.randint(1, max(1, 60 // xz)),
        "model.tied": draw.random() < 0.5,
        "model.qkv_bias": draw.random() < 0.5,
        "model.qk_norm": draw.random() < 0.5,
        **_vocabulary(draw),
    }


def _olmo2(draw: random.Random, grids: list[GridSizes]) -> Settings:
    absent = ("model.tied", "model.qkv_bias", "model.qk_norm")
    return {key: value for key, value in _llama(draw, grids).items() if key not in absent}


def _gemma3(draw: random.Random, grids: list[GridSizes]) -> Settings:
    own = {"model.window": draw.choice((1, 4, 9, 30)), "model.global_every": draw.choice((1, 2, 3))}
    return _olmo2(draw, grids) | own


def _unet(draw: random.Random, grids: list[GridSizes], attention_everywhere: bool) -> Settings:
    _, xz, yz = _extents(grids)
    both = math.lcm(*(side for grid in grids for side in (grid.x, grid.y)))
    least = math.lcm(2, xz, yz)
    channels = least * draw.choice([n for n in (1, 2, 3, 4) if n == 1 or n * least <= 30])
    multipliers = draw.choice(([1], [1, 2], [1, 3], [2, 1], [2, 3], [1, 1, 2]))
    size = draw.choice((1, 2, 3)) * 2 ** len(multipliers)
    sizes = [size >> level for level in range(len(multipliers))]
    with_attention = sizes if attention_everywhere else draw.sample(sizes, draw.randint(0, 1))
    return {
        "model.channels": channels,
        "model.multipliers": str(multipliers),
        "model.blocks_per_level": 1,
        "model.image_size": size,
        "model.image_channels": draw.choice((1, 3)),
        "model.attention_at": str(with_attention),
        "model.head_size": draw.choice(divisors(channels // both)),
        "model.groups": draw.choice(divisors(channels)[:-1]),  # no gradient of a bias before one channel's norm is 0
        "model.dropout": draw.choice((0.0, 0.1)),
    }
