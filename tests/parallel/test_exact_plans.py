"""Each option of a plan trains as one device in float64; replicas have equal bits. tests/exactness: random plans."""

from collections import defaultdict

import pytest
import torch

from tests.exactness.cases import Case
from tests.exactness.comparison import check, train
from tests.support.grids import full
from tests.support.settings import configured
from tests.support.stages import own_stage

TEXT = (
    "train.seq_len=24 train.batch_size=16 model.max_positions=24 model.layers=2 model.hidden=32 model.heads=8 "
    "model.vocab_size=290 model.vocab_multiple=16 optim.algorithm=adamw optim.epsilon=1e-6 "
)
LLAMA = "model.key_value_heads=2 model.head_size=4 model.inner=48 "
MODELS = {
    "gpt": "",
    "llama": LLAMA,
    "gemma3": LLAMA + "model.window=7 model.global_every=2 ",
    "moe": LLAMA + "model.experts=12 model.experts_per_token=3 model.router_z_loss=0.01 model.shared_inner=24 ",
}
DROPOUT, DOCUMENTS = "model.dropout=0.1 model.attention_dropout=0.1 ", "data.reset_attention=true "
RECOMPUTED, SPLIT_TOKENS = "train.activation_checkpointing=full ", "sequence_parallel=true "
PER_STEP = "cache_layers=all cache_scope=step "
ONE_PER_STEP = "cache_layers=1 cache_scope=step replicated_layers=1 "
UNET = "model.channels=16 model.image_size=16 model.multipliers=[1,2] model.head_size=4 model.attention_at=[8]"
STAGES = "pipeline.stages=2 pipeline.schedule=1f1b pipeline.microbatches=4 "
# A tied head over stages: the stream crosses on each stage's own grid, with split tokens split over x.
TIED = (
    "model.layers=4 model.hidden=24 model.heads=6 model.vocab_multiple=48 model.dropout=0.1 train.seq_len=12 "
    "train.batch_size=8 "
)
TWO, GRIDS = "pipeline.stages=2 ", "pipeline.stages=2 pipeline.stage_grids="
INTERLEAVED = "pipeline.schedule=interleaved_1f1b pipeline.chunks_per_stage=2"


@pytest.mark.parametrize(
    ("devices", "model", "shared", "own"),
    [
        (4, "gpt", DOCUMENTS, RECOMPUTED + SPLIT_TOKENS + "gx=2 gy=2 chunks=4 train.micro_batch_size=8"),
        (4, "gpt", DROPOUT, RECOMPUTED + SPLIT_TOKENS + "gx=2 gz=2 cache_layers=1 replicated_layers=1"),
        (4, "gpt", DROPOUT, ONE_PER_STEP + "gy=2 gz=2 chunks=2 scatter_heads=false"),
        (4, "gpt", "", "gz=2 optim.shard_states=true train.micro_batch_size=2 cache_layers=all replicated_layers=2"),
        full(8, "gpt", DROPOUT, RECOMPUTED + PER_STEP + "gx=2 gy=2 gz=2 chunks=2"),
        full(8, "gpt", "", SPLIT_TOKENS + "gx=8 chunks=2"),
        (2, "gpt", DROPOUT, RECOMPUTED + "context=2 gz=2"),
        (4, "llama", "", "context=4 gz=2 train.activation_checkpointing=selective train.loss_chunks=2"),
        full(4, "llama", DOCUMENTS, RECOMPUTED + SPLIT_TOKENS + "context=2 gx=2"),
        (3, "gemma3", "", "context=3"),
        (4, "llama", "", STAGES + "context=2"),
        (2, "llama", "", "context=2 context_exchange=ring chunks=2"),
        (4, "llama", DOCUMENTS, RECOMPUTED + "context=4 gz=2 context_exchange=ring"),
        (4, "moe", "", SPLIT_TOKENS + "gz=2 gx=2 chunks=2"),
        (4, "moe", "model.balance=bias model.balance_rate=0.05 ", RECOMPUTED + "gz=4 train.micro_batch_size=1"),
        (6, "gpt", TIED, GRIDS + "[2x1x1x2,1x1x2x1] pipeline.schedule=eager_1f1b_w"),
        (4, "gpt", TIED, "pipeline.stages=4 pipeline.schedule=zb_h1 chunks=2 pipeline.microbatches=4"),
        (4, "gpt", TIED, PER_STEP + TWO + "gz=2 pipeline.schedule=1f1b"),
        (5, "gpt", TIED, GRIDS + "[3x1x1x1,2x1x1x1] chunks=2 sequence_parallel=true"),
        full(6, "gpt", TIED, SPLIT_TOKENS + RECOMPUTED + GRIDS + "[2x1x1x2,1x2x1x1] pipeline.schedule=zb_h1"),
        full(2, "gpt", TIED, TWO),
        full(8, "gpt", TIED, RECOMPUTED + TWO + "gx=2 gy=2"),
        full(6, "gpt", TIED, GRIDS + "[1x1x2x1,1x2x1x2] optim.shard_states=true"),
        full(4, "gpt", TIED, TWO + "gz=2 " + INTERLEAVED),
        full(4, "gpt", TIED, SPLIT_TOKENS + GRIDS + "[2x1x1x1,1x1x2x1]"),
        full(4, "gpt", TIED, RECOMPUTED + GRIDS + "[2x1x1x1,1x1x2x1]"),
        full(5, "gpt", TIED, GRIDS + "[2x1x2x1,1x1x1x1] chunks=2"),
        full(6, "gpt", TIED, SPLIT_TOKENS + RECOMPUTED + GRIDS + "[1x1x1x2,2x2x1x1] chunks=2"),
        full(6, "gpt", TIED, SPLIT_TOKENS + GRIDS + "[2x1x2x1,2x1x1x1] chunks=2 pipeline.schedule=eager_1f1b_w"),
        full(8, "gpt", "", SPLIT_TOKENS + "gx=2 gy=4 chunks=2"),
        full(2, "gpt", DOCUMENTS, "context=2 chunks=2"),
        full(4, "llama", DOCUMENTS, "context=2 mode=atp d1=2 d2=1 chunks=2"),
        full(4, "llama", DOCUMENTS, SPLIT_TOKENS + "context=2 gx=2 context_exchange=ring"),
        full(4, "gemma3", DOCUMENTS, RECOMPUTED + "context=4 gz=2 chunks=4 context_exchange=ring"),
    ],
)  # fmt: skip
def test_a_plan_trains_as_one_device(ranks, devices, model, shared, own):
    shared, own = (dict(word.split("=") for word in words.split()) for words in (TEXT + MODELS[model] + shared, own))
    own = {key if key.startswith(("train.", "optim.")) else f"parallel.{key}": value for key, value in own.items()}
    result = check(ranks, Case(0, model, "plan", devices, shared, own))
    assert not result.rejection + result.problem
    assert max(result.differences.values()) <= 1e-11


def trained(config, world_size):
    """On a rank: for each parameter, its slices in the global tensor and its values after three steps."""
    plan, stage = own_stage(config, world_size, torch.float32)
    return {name: (place, values) for name, (_, place, values) in train(plan, stage).weights.items()}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gpt_tiny", "train.seq_len=16 model.layers=2 parallel.scatter_heads=false"),
        ("unet_tiny", UNET),
        full("llama_tiny", "train.seq_len=16 model.layers=2 model.qk_norm=true"),
        full("gemma3_tiny", "train.seq_len=16 model.layers=2"),
        full("olmo2_tiny", "train.seq_len=16 model.layers=2"),
    ],
)
def test_replicas_of_a_parameter_have_the_same_bits_after_training(ranks, model, words):
    grid, replicas = ("parallel.gx=2", "parallel.gy=2", "train.batch_size=4"), defaultdict(list)
    for parameters in ranks.run(4, trained, configured([f"model={model}", *grid, *words.split()]), 4):
        for name, (place, values) in parameters.items():
            replicas[name, str(place)].append(values)
    assert max(map(len, replicas.values())) > 1
    for (name, _), (first, *others) in replicas.items():
        assert all(torch.equal(first, other) for other in others), name
