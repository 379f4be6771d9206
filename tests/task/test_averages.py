"""Averaged weights where a stage has a copy of another stage's weight, and where ranks update rows of a weight."""

from dataclasses import replace

import torch

from gpt4d.config import Config, DataConfig, GridSizes, OptimConfig, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.pipeline.runtime import whole_model
from gpt4d.step import TrainStep
from gpt4d.task.averages import WeightAverages
from tests.support.grids import TINY_MODEL, build_tiny_stage, tiny_batch, token_loss
from tests.support.stages import own_stage


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


def averages_of_own_rows(sizes: GridSizes) -> tuple[list[int], bool, bool]:
    """On a rank: the numbers of buckets in flight before and after an update of the averages, and two comparisons.

    The averages equal averages of unsharded weights, and a sample leaves the weights unchanged.
    """
    stage = build_tiny_stage(Grid(sizes), dtype=torch.float32)
    averages = WeightAverages(stage, 0.9, shard=True)
    parameters = [parameter.detach() for parameter in stage.module.parameters()]
    initial = [parameter.clone() for parameter in parameters]
    step = TrainStep(stage, whole_model(token_loss), OptimConfig(lr=0.1, shard_states=True))
    step([tiny_batch(stage.grid)], 1, 1, lr=0.1)
    sums = step.reducer.sums
    in_flight = [len(sums.arriving)]
    averages.update(1)
    in_flight.append(len(sums.arriving))
    step.reducer.wait_params()
    trained = [parameter.clone() for parameter in parameters]
    with averages.applied():
        expected = [torch.lerp(before, after, 0.9) for before, after in zip(initial, trained, strict=True)]
        are_averages = all(map(torch.equal, parameters, expected))
    return in_flight, are_averages, all(map(torch.equal, parameters, trained))


def test_averages_of_sharded_states_do_not_wait_for_rows_of_other_ranks(ranks):
    sizes = GridSizes(1, 1, 2, 2)
    for (before, after), are_averages, are_restored in ranks.run(sizes.devices, averages_of_own_rows, sizes):
        assert before == after > 0
        assert are_averages and are_restored
