"""Configurations that contain each pair of two options of training at least once."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.exactness.cases import Case, Settings

_TEXT = ("gpt", "llama", "qwen", "olmo2", "gemma3")
_GROUPED_HEADS: Settings = {"model.hidden": 24, "model.head_size": 8, "model.inner": 32}


class Option(NamedTuple):
    """A value of a factor."""

    settings: Settings  # the keys that it sets
    families: Sequence[str] = ()  # the families that have these keys; none for all
    world_size: int = 1  # number of ranks of a plan
    layers: int = 1  # number of blocks of a text model with this plan


def _stages(schedule: str, grids: str, world_size: int, chunks: int = 1) -> Option:
    count, microbatches = grids.count(",") + 1, 2 if chunks > 1 else 3
    pipeline = {"stages": count, "stage_grids": grids, "schedule": schedule}
    pipeline |= {"chunks_per_stage": chunks, "microbatches": microbatches}
    settings = {f"parallel.pipeline.{key}": value for key, value in pipeline.items()}
    return Option(settings | {"train.batch_size": 8 * microbatches}, world_size=world_size, layers=count * chunks)


def _grid(x: int, y: int, z: int, data: int) -> Option:
    sizes = {"parallel.gx": x, "parallel.gy": y, "parallel.gz": z, "train.micro_batch_size": 8 // (z * data)}
    return Option(sizes, world_size=x * y * z * data)


def _atp(d1: int, d2: int) -> Option:
    mesh = {"parallel.mode": "atp", "parallel.d1": d1, "parallel.d2": d2, "train.micro_batch_size": 8}
    return Option(mesh, world_size=d1 * d2)


FACTORS: dict[str, dict[str, Option]] = {
    "plan": {
        "one device": _grid(1, 1, 1, 1),
        "4d": _grid(2, 2, 2, 2),
        "y and data": _grid(1, 2, 1, 4),
        "z": _grid(1, 1, 4, 1),
        "atp 2x2": _atp(2, 2),
        "atp 4x1": _atp(4, 1),
        "gpipe": _stages("gpipe", "[2x1x2x1,1x2x1x1]", 6),
        "1f1b": _stages("1f1b", "[1x1x1x2,2x1x1x1]", 4),
        "eager": _stages("eager_1f1b", "[2x1x1x1,1x1x2x1,1x2x1x1]", 6),
        "eager w": _stages("eager_1f1b_w", "[2x2x1x1,1x1x1x2]", 6),
        "zb": _stages("zb_h1", "[1x2x1x1,2x1x1x1]", 4),
        "interleaved": _stages("interleaved_1f1b", "[2x1x1x1,2x1x1x1]", 4, chunks=2),
    },
    "family": {
        "gpt": Option({"model.hidden": 24}),
        "llama": Option({**_GROUPED_HEADS, "model.tied": False}),
        "qwen": Option(
            {**_GROUPED_HEADS, "model.heads": 12, "model.key_value_heads": 3}
            | {"model.tied": True, "model.qkv_bias": True, "model.qk_norm": True}
        ),
        "olmo2": Option(_GROUPED_HEADS),
        "gemma3": Option({**_GROUPED_HEADS, "model.window": 4, "model.global_every": 2}),
        "unet": Option(
            {"model.channels": 16, "model.multipliers": "[1]", "model.blocks_per_level": 1, "model.image_size": 8}
            | {"model.attention_at": "[8]", "model.head_size": 4, "model.groups": 2}
        ),
    },
    "checkpointing": {kind: Option({"train.activation_checkpointing": kind}) for kind in ("none", "selective", "full")},
    "cache": {
        "none": Option({"parallel.cache_layers": 0}),
        "microbatch": Option({"parallel.cache_layers": "all", "parallel.cache_scope": "microbatch"}),
        "step": Option({"parallel.cache_layers": "all", "parallel.cache_scope": "step"}),
    },
    "precision": {precision: Option({"train.precision": precision}) for precision in ("bf16", "fp32")},
    "chunks": {str(count): Option({"parallel.chunks": count}) for count in (1, 2)},
    "tokens": {"unsplit": Option({}), "split": Option({"parallel.sequence_parallel": True}, _TEXT)},
    "states": {"replicated": Option({}), "sharded": Option({"optim.shard_states": True})},
    "optimizer": {"adamw": Option({"optim.algorithm": "adamw"}), "muon": Option({"optim.algorithm": "muon"})},
    "documents": {"joined": Option({}), "separate": Option({"data.reset_attention": True}, _TEXT)},
    "averages": {"none": Option({}), "averages": Option({"optim.ema_decay": 0.9})},
    "loss": {"at once": Option({}), "in chunks": Option({"train.loss_chunks": 2}, _TEXT)},
    "dropout": {
        "none": Option({}),
        "dropout": Option({"model.dropout": 0.1}, ("gpt", "unet")),
        "attention dropout": Option({"model.attention_dropout": 0.1}, ("gpt",)),
    },
    "overlap": {
        "overlap": Option({}),
        "no overlap": Option(
            {f"parallel.overlap.{name}": False for name in ("all_reduce", "reduce_scatter", "all_gather", "data")}
        ),
    },
}

Row = dict[str, str]  # a value of each factor
Pair = frozenset[tuple[str, str]]


def _fits(row: Row) -> bool:
    family = row.get("family")
    options = (FACTORS[factor][value] for factor, value in row.items())
    return family is None or all(family in option.families for option in options if option.families)


def pairs_of(row: Row) -> Iterator[Pair]:
    """Return the pairs of options of a row."""
    return map(frozenset, itertools.combinations(row.items(), 2))


def all_pairs() -> set[Pair]:
    """Return all pairs of options that fit."""
    values = [(factor, value) for factor, options in FACTORS.items() for value in options]
    pairs = itertools.combinations(values, 2)
    return {frozenset(pair) for pair in pairs if pair[0][0] != pair[1][0] and _extends(dict(pair))}


def _extends(row: Row) -> bool:
    """Return whether the row's family, or some family, fits to it."""
    return any(_fits({"family": family} | row) for family in FACTORS["family"])


def rows() -> list[Row]:
    """Return rows that contain all pairs. Early rows have more new pairs than later rows."""
    missing, found = dict.fromkeys(sorted(all_pairs(), key=sorted)), list[Row]()
    used = Counter[tuple[str, str]]()

    def gain(row: Row, factor: str) -> tuple[int, int]:
        """Prefer rows with more missing pairs, then values that fewer rows have."""
        return sum(pair in missing for pair in pairs_of(row)), -used[factor, row[factor]]

    while missing:
        row = dict(sorted(next(iter(missing))))
        for factor in [factor for factor in FACTORS if factor not in row]:
            longer = ({**row, factor: value} for value in FACTORS[factor])
            row = max(filter(_extends, longer), key=lambda row, factor=factor: gain(row, factor))
        for pair in pairs_of(row):
            missing.pop(pair, None)
        used.update(row.items())
        found.append(row)
    return found


def case(row: Row) -> Case:
    """Return the configuration of a row."""
    options = {factor: FACTORS[factor][value] for factor, value in row.items()}
    family, plan = row["family"], options["plan"]
    settings: Settings = {"train.batch_size": 16, "data.workers": 1}
    if family in _TEXT:
        settings |= {"model.vocab_size": 300, "model.vocab_multiple": 16, "model.layers": plan.layers}
        settings |= {"train.seq_len": 12, "model.max_positions": 16}
    for option in options.values():
        settings |= option.settings
    return Case(0, {"qwen": "llama"}.get(family, family), row["plan"], plan.world_size, settings, {})
