"""Averaged weights where a stage has a copy of another stage's weight."""

from dataclasses import replace

import torch

from gpt4d.config import Config, DataConfig, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.task.averages import WeightAverages
from tests.grids import TINY_MODEL
from tests.stages import own_stage


def embeddings_around_a_sample(config: Config) -> tuple[torch.Tensor, ...]:
    """On one of two stages: the token embedding at first, while averages are applied, and after that."""
    _, stage = own_stage(config, 2)
    averages, weight = WeightAverages(stage, 0.9), stage.module.tokens.weight.detach()
    seen = [weight.clone()]
    if not stage.copies:
        weight.add_(1.0)
    stage.send_copied_weights()  # the averages are applied while it is on its way
    with averages.applied():
        stage.wait_for_copies()
        seen.append(weight.clone())
    seen.append(weight.clone())
    stage.exchange.close()
    return tuple(seen)


def test_a_copied_weight_has_its_average_during_a_sample_and_its_value_afterwards(ranks):
    stages = ParallelConfig(pipeline=PipelineConfig(stages=2, microbatches=1))
    model, data = replace(TINY_MODEL, vocab_size=300), DataConfig(tokenizer_vocab=300)
    config = Config(model=model, data=data, parallel=stages, train=TrainConfig(seq_len=12, batch_size=2))
    for first, averaged, restored in ranks.run(2, embeddings_around_a_sample, config):
        assert torch.equal(averaged, first)
        assert torch.equal(restored, first + 1.0)
