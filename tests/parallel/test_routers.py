"""Routers during training: every grid has the loads and biases of the global batch; metrics; 20 losses."""

import pytest
import torch

from gpt4d.config import ConfigError
from gpt4d.parallel import routers
from gpt4d.parallel.layers.routing import Scoring, routing_statistics
from gpt4d.step import TrainStep
from gpt4d.validation import validate
from tests.support.grids import full, metric_lines, train_in_rank
from tests.support.stages import RandomTokens, own_stage

MOE = (
    "model=moe_tiny", "model.key_value_heads=2", "model.head_size=6", "model.inner=24", "model.experts=12",
    "model.experts_per_token=3", "model.router_z_loss=0.01", "model.shared_inner=24",
)  # fmt: skip
GRIDS = [
    (4, ("parallel.gz=2", "parallel.gx=2", "parallel.sequence_parallel=true", "parallel.chunks=2")),
    (4, ("parallel.gz=4", "train.activation_checkpointing=full", "train.micro_batch_size=1")),
    full(4, ("parallel.pipeline.stages=2", "parallel.gz=2", "parallel.pipeline.microbatches=4")),
    full(4, ("parallel.gz=2", "parallel.expert_data=true", "train.activation_checkpointing=full")),
    full(3, ("parallel.gz=3", "train.batch_size=18", "optim.shard_states=true")),
    full(4, ("parallel.gz=2", "parallel.gy=2", "train.activation_checkpointing=selective")),
]


@pytest.mark.parametrize(("devices", "words"), GRIDS, ids=str)
def test_20_losses_and_the_statistics_of_routers_equal_those_of_one_rank(ranks, tiny, tmp_path, devices, words):
    shared = [word for word in words if word.startswith("train.batch_size")]
    lines = {}
    for count, given in ((1, shared), (devices, words)):
        config = tiny(*MOE, *given, f"run.dir={tmp_path / str(count)}")
        ranks.run(count, train_in_rank, config)
        lines[count] = metric_lines(config.run.dir)
    assert len(lines[1]) == 20
    for one, other in zip(lines[1], lines[devices], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        for key in ("imbalance", "entropy", "balance_loss", "z_loss"):
            assert other["moe"][key] == pytest.approx(one["moe"][key], rel=2e-2)  # a router's close call may differ
    tokens = config.train.batch_size * config.train.seq_len
    assert all(sum(line["moe"]["most_imbalanced"]["tokens"]) == 3 * tokens for line in lines[devices])
    assert all(line["moe"]["dropped"] == 0 for line in lines[devices])


def states_after_steps(config, world_size, skip):
    """On a rank: the states of its routers after each of two steps in float64; ``skip`` makes the second one fail."""
    plan, stage = own_stage(config, world_size)
    tokens = RandomTokens(config, plan, stage)
    train_step = TrainStep(stage, tokens.compute, config.optim)
    found = []
    for step in range(2):
        units = config.train.batch_size * config.train.seq_len
        result = train_step(tokens.batches(step), plan.microbatches, units, float("nan") if skip and step else 0.01)
        if step == 0 and skip:
            with torch.no_grad():
                stage.module.get_parameter("blocks.0.attention_norm.weight").fill_(torch.nan)
        found.append(({name: p.clone() for name, p in stage.module.named_parameters() if p.spec.state}, result.routing))
    return found


@pytest.mark.parametrize("balance", ["loss", "bias"])
def test_states_are_those_of_the_global_batch_on_every_grid(ranks, tiny, balance):
    words = *MOE, f"model.balance={balance}", "model.balance_rate=0.05"
    config = tiny(*words)
    (alone,) = ranks.run(1, states_after_steps, config, 1, False)
    split = tiny(*words, "parallel.gz=2", "parallel.gx=2", "train.micro_batch_size=2")
    for answer in ranks.run(4, states_after_steps, split, 4, False):
        for (ours, sums), (expected, expected_sums) in zip(answer, alone, strict=True):
            assert all(torch.equal(ours[name], expected[name]) for name in expected)
            assert torch.allclose(sums, expected_sums, rtol=1e-9)
    (first, sums), (second, _) = alone
    counts = sums[:, :12]
    for row, name in enumerate(first):
        if balance == "loss":
            assert torch.allclose(first[name], counts[row] / (16 * 16)) and first[name].sum().item() == pytest.approx(3)
        else:
            assert torch.equal(first[name], 0.05 * (16 * 16 * 3 / 12 - counts[row]).sign())
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_a_skipped_step_changes_no_state(ranks, tiny):
    ((first, _), (second, _)) = ranks.run(1, states_after_steps, tiny(*MOE), 1, True)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_summary_has_the_imbalance_of_experts_and_of_ranks():
    logits = torch.tensor([[5.0, 0, 0, 0], [5.0, 0, 0, 0], [0, 5.0, 0, 0], [0, 0, 0, 5.0]])
    scoring = Scoring(1)
    totals = routing_statistics(logits, logits.argmax(1, keepdim=True), scoring)[None]
    values = routers.summary(totals, 2)
    assert values["imbalance"] == 2 and values["rank_imbalance"] == 1.5
    assert values["most_imbalanced"] == {"router": 0, "tokens": [2, 1, 0, 1]}
    scores = logits.double().softmax(1)
    assert values["balance_loss"] == pytest.approx(4 * (torch.tensor([2, 1, 0, 1]) / 4 * scores.mean(0)).sum().item())
    assert values["entropy"] == pytest.approx(-(scores * scores.log()).sum(1).mean().item())
    assert values["z_loss"] == pytest.approx(logits.logsumexp(1).square().mean().item())


@pytest.mark.parametrize(
    ("words", "devices", "message"),
    [
        (
            ["model.experts=6", "parallel.gz=4"],
            4,
            "parallel.gz=4: does not divide model.experts=6; use one of 1, 2, 3, 6",
        ),
        (["model.experts_per_token=9"], 1, "model.experts_per_token=9: more than model.experts=8; lower it"),
        (["train.cuda_graphs=true", "cluster=perlmutter"], 1, "other numbers of tokens in each batch; leave it out"),
    ],
)
def test_impossible_mixtures_are_rejected_in_one_line(tiny, words, devices, message):
    with pytest.raises(ConfigError) as error:
        validate(tiny("model=moe_tiny", *words), devices)
    assert message in str(error.value) and "\n" not in str(error.value)
