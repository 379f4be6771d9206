"""Invariant 1 at one step: logits and gradients on every grid equal transformers' OLMo 2. Costs, texts."""

import functools
from dataclasses import replace

import pytest
import torch

from gpt4d.config import Config, ConfigError, GridSizes, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.model import registry
from gpt4d.model.olmo2 import hugging_face as hf
from gpt4d.model.olmo2.config import Olmo2Config
from gpt4d.parallel.grid import Grid
from gpt4d.step import build_stage
from gpt4d.task.generation import continuations
from gpt4d.task.sampling import GREEDY
from tests.model.test_costs import BATCH, FULL, collectives_of_a_step, compare
from tests.model.test_llama import check_on_grid, check_step, library_model, results_of
from tests.support.grids import BINARY_GRIDS, sampled
from tests.support.settings import configured
from tests.task.test_generation import END, PROMPTS, most_likely_text, tokenizer  # noqa: F401 – a fixture

OLMO2 = Olmo2Config(
    layers=2,
    hidden=24,
    heads=12,
    key_value_heads=3,  # four ranks have three of its twelve columns each: parts of heads
    head_size=4,
    inner=48,
    vocab_size=300,
    vocab_multiple=48,
    max_positions=16,
)
EQUAL_HEADS = replace(OLMO2, key_value_heads=12)


@functools.cache
def oracle(key_value_heads):
    """Return the library's state dict, logits and gradients."""
    config = replace(OLMO2, key_value_heads=key_value_heads)
    return results_of(library_model(config.llama, hf.hf_config(config)))


WITH_THREE = [GridSizes(3, 2), GridSizes(1, 3, 1, 2), GridSizes(3, 1, 2)]
SAMPLED = [GridSizes(), GridSizes(2, 2, 2), WITH_THREE[0]]


@pytest.mark.parametrize("sizes", sampled([*BINARY_GRIDS, *WITH_THREE], SAMPLED))
@pytest.mark.parametrize("config", [OLMO2, pytest.param(EQUAL_HEADS, marks=pytest.mark.full)], ids=["grouped", "equal"])
def test_logits_and_gradients_equal_transformers(ranks, config, sizes):
    check_on_grid(ranks, config, sizes, *oracle(config.key_value_heads))


PLANS = {
    "two stages": (2, ParallelConfig(pipeline=PipelineConfig(stages=2))),
    "stages with grids": (6, ParallelConfig(pipeline=PipelineConfig(stages=2, stage_grids=["2x1x1x2", "1x2x1x1"]))),
    "atp": (4, ParallelConfig(mode="atp", d1=2, d2=2, chunks=2)),
}


@pytest.mark.parametrize("checkpointing", ["none", pytest.param("full", marks=pytest.mark.full), "selective"])
@pytest.mark.parametrize("plan", ["two stages", pytest.param("stages with grids", marks=pytest.mark.full), "atp"])
def test_gradients_of_a_plan_equal_transformers(ranks, plan, checkpointing):
    check_step(ranks, EQUAL_HEADS, *PLANS[plan], checkpointing, *oracle(12))


def test_a_text_that_is_continued_with_cached_keys_is_that_of_the_model_without(tokenizer):  # noqa: F811
    config = Config(model=replace(OLMO2, vocab_size=50), train=TrainConfig(seq_len=12, seed=3))
    stage = build_stage(config, Grid(), torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for name, parameter in stage.module.named_parameters():
            if "norm" not in name:
                parameter.mul_(20)
        stage.module.head.weight[:, END] = 0  # the text does not end early
    prompts = [prompt for prompt in PROMPTS if "<|" not in prompt]
    texts = continuations(stage, tokenizer, END, prompts, 8, lambda *ids: None, sampling=GREEDY)
    assert texts == [most_likely_text(stage.module, tokenizer, prompt, 8, lambda *ids: None) for prompt in prompts]
    assert len(set(" ".join(texts).split())) > 5


# ------------------------------------------------------------------------------------------------------- costs

LARGER = replace(OLMO2, hidden=512, heads=8, key_value_heads=4, head_size=64, inner=1024, max_positions=256)
COSTS = [
    (GridSizes(2, 2, 2), "bf16", "selective", {"chunks": 2}),
    (GridSizes(4, 2), "fp32", "full", {"sequence_parallel": True}),
    (GridSizes(), "fp32", "none", {}),
    (GridSizes(), "bf16", "selective", {}),
    (GridSizes(1, 4, 2), "bf16", "none", {"scatter_heads": False}),
]


@pytest.mark.parametrize("memory_gb_s", [1000, 0.3], ids="memory={}".format)
@pytest.mark.parametrize(
    ("sizes", "precision", "checkpointing", "options"),
    [*COSTS[:2], *(pytest.param(*case, marks=pytest.mark.full) for case in COSTS[2:])],
    ids=str,
)
def test_planned_computation_takes_as_long_as_a_steps_operations(
    rank_0, sizes, precision, checkpointing, options, memory_gb_s
):
    rank_0(sizes.devices)
    compare(sizes, memory_gb_s, precision, checkpointing, LARGER, **options)


STEPS = [
    ((2, 2, 2, 1), {"activation_checkpointing": "selective"}, {"chunks": 2}),
    ((4, 2, 1, 1), FULL, {"sequence_parallel": True, "chunks": 4}),
    ((3, 2, 1, 2), FULL, {"replicated_layers": 1}),
    ((1, 4, 2, 1), FULL | {"micro_batch_size": 2}, {"chunks": 2, "cache_layers": "all"}),
    ((1, 4, 1, 2), {}, {"scatter_heads": False}),
]


@pytest.mark.parametrize(
    ("sizes", "train", "parallel"),
    [*STEPS[:3], *(pytest.param(*case, marks=pytest.mark.full) for case in STEPS[3:])],
    ids=str,
)
def test_planned_collectives_are_those_of_a_step_in_the_same_order(rank_0, sizes, train, parallel):
    sizes = GridSizes(*sizes)
    rank_0(sizes.devices)
    train = TrainConfig(**{"seq_len": 16, "batch_size": BATCH, "precision": "fp32", **train})
    config = Config(model=replace(OLMO2, layers=3), train=train, parallel=ParallelConfig(**parallel))
    started, planned = collectives_of_a_step(config, sizes)
    assert started == planned


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(("size", "billions"), [("1b", 1.48), ("7b", 7.30), ("13b", 13.72), ("32b", 32.23)])
def test_shipped_sizes_have_the_published_numbers_of_parameters(size, billions):
    description = registry.describe(configured([f"model=olmo2_{size}"]).model)
    assert round(description.num_parameters / 1e9, 2) == billions
    assert {spec.std for spec in description.parameters.values()} == {0.0, 0.02}


def test_settings_that_a_file_omits_are_those_of_transformers():
    values = hf.hf_config(OLMO2).to_dict()
    for key in ("rms_norm_eps", "head_dim", "num_key_value_heads", "tie_word_embeddings"):
        del values[key]
    expected = replace(OLMO2, name="source", vocab_multiple=128, norm_epsilon=1e-5, head_size=2, key_value_heads=12)
    assert hf.config_from_hf("source", values) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True in config.json is not supported"),
        ({"attention_bias": True}, "attention_bias=True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic'.*rope_type=default, linear",
        ),
    ],
)
def test_what_would_be_computed_differently_is_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        hf.config_from_hf("source", hf.hf_config(OLMO2).to_dict() | changes)
