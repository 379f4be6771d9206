"""Meanings and limits of settings: every key has a meaning, and one loop checks every limit."""

import math
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest

from gpt4d.config import ConfigError, OptimConfig, check_limits, from_arguments, redefined, schema, setting
from gpt4d.config.fields import Limits
from gpt4d.model import registry
from gpt4d.runs.__main__ import ListConfig
from tests.support.settings import configured

SCHEMAS = [kind for kind in vars(schema).values() if isinstance(kind, type) and is_dataclass(kind)]
SCHEMAS += [registry.get(name).config for name in ("gpt2", "llama", "olmo2", "gemma3", "moe", "unet")]
FIELDS = [(kind, field) for kind in SCHEMAS for field in fields(kind) if not field.metadata.get("derived")]
LIMITED = [row for row in FIELDS if row[1].metadata["limits"] != Limits()]
RESOLVED = {"DataConfig": {"tokenizer_vocab": None}, "TrainConfig": {"seq_len": 1}}  # their defaults are interpolated
RESOLVED |= {
    registry.get(name).config.__name__: {"vocab_size": 1} for name in ("gpt2", "llama", "olmo2", "gemma3", "moe")
}


def defaults(kind):
    return configured() if kind is schema.Config else kind(**RESOLVED.get(kind.__name__, {}))


def values_outside(limits):
    """Return a value next to each limit, on its wrong side, and a number that no comparison accepts."""
    if limits.choices:
        return ["other"]
    values = [math.nan]
    values += [] if limits.at_least is None else [limits.at_least - 1]
    values += [] if limits.at_most == math.inf else [limits.at_most * 2]
    return [*values, *(bound for bound in (limits.above, limits.below) if bound is not None)]


def test_there_are_many_settings():
    assert len(SCHEMAS) > 15 and len(FIELDS) > 150 and len(LIMITED) > 90


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_setting_has_a_meaning(kind):
    for _, field in filter(lambda row: row[0] is kind, FIELDS):
        assert field.metadata["meaning"], field.name


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_default_is_inside_its_limits(kind):
    check_limits(defaults(kind))


@pytest.mark.parametrize(("kind", "field"), LIMITED, ids=lambda value: getattr(value, "name", ""))
def test_a_value_outside_a_limit_is_reported_with_key_value_and_remedy(kind, field):
    is_list = isinstance(getattr(kind(), field.name), list)
    for value in values_outside(field.metadata["limits"]):
        with pytest.raises(ConfigError) as raised:
            check_limits(replace(defaults(kind), **{field.name: [value] if is_list else value}), "group.")
        assert str(raised.value).startswith(f"group.{field.name}{'[0]' if is_list else ''}={value}: use ")


def test_limits_hold_in_nested_settings_and_in_lists():
    cluster = schema.ClusterConfig(levels=[schema.LevelConfig(), schema.LevelConfig(latency_us=-1)])
    with pytest.raises(ConfigError, match=r"^cluster\.levels\[1\]\.latency_us=-1: use a value of at least 0$"):
        check_limits(replace(configured(), cluster=cluster))


def test_a_redefined_setting_has_the_meaning_and_the_limits_of_its_base():
    @dataclass
    class Other(OptimConfig):
        lr: float = redefined(OptimConfig, "lr", 0.5)

    assert Other().lr == 0.5
    with pytest.raises(ConfigError, match=r"lr=-1: use a value of at least 0"):
        check_limits(Other(lr=-1))


def test_lists_of_two_configurations_are_not_shared():
    @dataclass
    class Listing:
        numbers: list[int] = setting([1, 2], "numbers", at_least=1)

    Listing().numbers.append(3)
    assert Listing().numbers == [1, 2]


def test_the_limits_of_a_command_are_checked_too():
    with pytest.raises(ConfigError, match=r"^format=xml: use one of table, json$"):
        from_arguments(ListConfig, ["format=xml"])
