"""Routers during training: states from the loads of the batch, and metrics that do not depend on the grid."""

import pytest
import torch

from gpt4d.parallel.layers.routing import Scoring, routing_statistics, routing_summary
from gpt4d.parallel.layout import STATE
from gpt4d.step import TrainStep
from gpt4d.validation import validate
from tests.support.commands import wrong_messages
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.stages import RandomTokens, own_stage

MOE = (
    "model=moe_tiny", "model.key_value_heads=2", "model.head_size=6", "model.inner=24", "model.experts=12",
    "model.experts_per_token=3", "model.router_z_loss=0.01", "model.shared_inner=24",
)  # fmt: skip
SHARDED = ["parallel.gz=2 parallel.gx=2 train.activation_checkpointing=full train.micro_batch_size=2"]
SPLIT_TOKENS = ["parallel.gy=2 parallel.gx=2 parallel.sequence_parallel=true parallel.chunks=2"]
STAGES = ["parallel.pipeline.stages=2 parallel.gz=2 parallel.pipeline.microbatches=4"]
EXPERT_DATA = ["parallel.gz=2 parallel.expert_data=true train.activation_checkpointing=full"]
UNEVEN = ["parallel.gz=3 optim.shard_states=true"]


@pytest.mark.parametrize(
    ("devices", "batch_size", "plans"),
    [
        (2, 16, ["parallel.gz=2 train.activation_checkpointing=full"]),
        full(4, 16, SHARDED + SPLIT_TOKENS + STAGES + EXPERT_DATA),
        full(3, 18, UNEVEN),
    ],
)
def test_losses_and_the_statistics_of_routers_equal_those_of_one_rank(
    ranks, tiny, tmp_path, devices, batch_size, plans
):
    """tests/parallel/test_exact_plans.py compares weights and states of routers."""
    shared, lines = (*MOE, "train.steps=4", f"train.batch_size={batch_size}"), []
    for number, plan in enumerate(("", *plans)):
        config = tiny(*shared, *plan.split(), f"run.dir={tmp_path / str(number)}")
        ranks.run(devices if plan else 1, train_in_rank, config)
        lines.append(metric_lines(config.run.dir))
    for one, *others in zip(*lines, strict=True):
        for other in others:
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
            for key in ("imbalance", "entropy", "balance_loss", "z_loss"):
                assert other["moe"][key] == pytest.approx(one["moe"][key], rel=2e-2)  # a router's close call may differ
            assert sum(other["moe"]["most_imbalanced"]["tokens"]) == 3 * batch_size * config.train.seq_len
            assert other["moe"]["dropped"] == 0
    assert len(lines[0]) == 4


def states_after_steps(config, skip):
    """On a rank: the states of its routers after each of two steps in float64; ``skip`` makes the second one fail."""
    plan, stage = own_stage(config, 1)
    tokens = RandomTokens(config, plan, stage)
    train_step = TrainStep(stage, tokens.compute, config.optim)
    found = []
    for step in range(2):
        units = config.train.batch_size * config.train.seq_len
        result = train_step(tokens.batches(step), plan.microbatches, units, float("nan") if skip and step else 0.01)
        if step == 0 and skip:
            with torch.no_grad():
                stage.module.get_parameter("blocks.0.attention_norm.weight").fill_(torch.nan)
        named = stage.module.named_parameters()
        found.append(({name: p.clone() for name, p in named if p.spec.group == STATE}, result.routing))
    return found


@pytest.mark.parametrize("adapters", ["", "lora.rank=2 lora.targets=[qkv]"])
@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_states_follow_from_the_loads_of_the_batch_and_adapters_change_no_bias(ranks, tiny, balance, adapters):
    config = tiny(*MOE, f"model.balance={balance}", "model.balance_rate=0.05", *adapters.split())
    (((first, sums), (second, _)),) = ranks.run(1, states_after_steps, config, False)
    counts = sums[:, :12]
    for row, name in enumerate(first):
        if balance == "loss":
            assert torch.allclose(first[name], counts[row] / (16 * 16)) and first[name].sum().item() == pytest.approx(3)
        else:
            change = 0.0 if config.lora.rank else 0.05
            assert torch.equal(first[name], change * (16 * 16 * 3 / 12 - counts[row]).sign())
    frozen = balance == "bias" and config.lora.rank
    assert any(not torch.equal(first[name], second[name]) for name in first) != bool(frozen)


def test_a_skipped_step_changes_no_state(ranks, tiny):
    ((first, _), (second, _)) = ranks.run(1, states_after_steps, tiny(*MOE), True)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_summary_has_the_imbalance_of_experts_and_of_ranks():
    logits = torch.tensor([[5.0, 0, 0, 0], [5.0, 0, 0, 0], [0, 5.0, 0, 0], [0, 0, 0, 5.0]])
    scoring = Scoring(1)
    totals = routing_statistics(logits, logits.argmax(1, keepdim=True), None, scoring)[None]
    values = routing_summary(totals, 2)
    assert values["imbalance"] == 2 and values["rank_imbalance"] == 1.5
    assert values["most_imbalanced"] == {"router": 0, "tokens": [2, 1, 0, 1]}
    scores = logits.double().softmax(1)
    assert values["balance_loss"] == pytest.approx(4 * (torch.tensor([2, 1, 0, 1]) / 4 * scores.mean(0)).sum().item())
    assert values["entropy"] == pytest.approx(-(scores * scores.log()).sum(1).mean().item())
    assert values["z_loss"] == pytest.approx(logits.logsumexp(1).square().mean().item())


MISTAKES = [
    (4, "model.experts=6 parallel.gz=4", "parallel.gz=4: does not divide model.experts=6; use one of 1, 2, 3, 6"),
    (1, "model.experts_per_token=9", "model.experts_per_token=9: more than model.experts=8; lower it"),
    (1, "train.cuda_graphs=true cluster=perlmutter", "other numbers of tokens in each batch; leave it out"),
]


def test_impossible_mixtures_are_rejected_in_one_line(tiny):
    assert not wrong_messages(MISTAKES, lambda n, words: validate(tiny("model=moe_tiny", *words.split()), n))
