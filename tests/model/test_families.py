"""Invariant 1 at one step: logits and gradients on every grid equal the values of transformers' models."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gpt4d.config import Config, ConfigError, GridSizes, TrainConfig
from gpt4d.model.gemma3 import Gemma3Config
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.model.llama import LlamaConfig
from gpt4d.model.moe import MoeConfig
from gpt4d.model.olmo2 import Olmo2Config
from gpt4d.model.unet.config import UNetConfig
from gpt4d.parallel.gradient_reducer import GradientReducer
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import Documents
from gpt4d.plan import one_stage
from gpt4d.step import build_stage
from gpt4d.task.generation import GREEDY, continuations
from gpt4d.validation import validate
from tests.support.grids import BINARY_GRIDS, TINY_MODEL, batch_part, build_model, fill_from_hf, full, global_tensor
from tests.support.model_oracles import LENGTH, MODELS, check_on_grid, global_logits, library_model, relative
from tests.support.settings import configured

# Grids with an axis of three or four, which have parts of heads or of experts.
_OF_KEYS = [GridSizes(4, 1, 2), GridSizes(1, 4), GridSizes(3, 2), GridSizes(1, 3, 1, 2), GridSizes(3, 1, 2)]
MORE_GRIDS = {
    GPT2Config: [],
    LlamaConfig: _OF_KEYS[:2],
    Olmo2Config: _OF_KEYS,
    Gemma3Config: _OF_KEYS,
    MoeConfig: [GridSizes(1, 1, 3), GridSizes(1, 2, 4), GridSizes(2, 1, 3)],
}
# Digits are x, y, z and data of a grid for each of MODELS. Each pair of sizes of two axes occurs.
_CHOSEN = "222", "2112", "14", "1212", "1122", "22", "14", "1", "32", "212", "113", "12"
SAMPLED_GRIDS = {(name, GridSizes(*map(int, sizes))) for name, sizes in zip(MODELS, _CHOSEN, strict=True)}


def sampled(cases, chosen):
    """Return cases as parameters of a test. ``make test`` runs only the ``chosen`` cases."""
    cases = list(cases)
    assert chosen <= set(cases)
    return [(pytest.param if case in chosen else full)(*case, id="-".join(map(str, case))) for case in cases]


GRIDS = ((name, sizes) for name, model in MODELS.items() for sizes in [*BINARY_GRIDS, *MORE_GRIDS[type(model)]])


@pytest.mark.parametrize(("name", "sizes"), sampled(GRIDS, SAMPLED_GRIDS))
def test_logits_and_gradients_equal_transformers(ranks, name, sizes):
    check_on_grid(ranks, name, sizes)


def logits_of_packed(config, sizes, state, ids, checkpointing):
    """On a rank: its shard, its index on x and its logits of sequences in which a 0 ends a document."""
    model = build_model(config, sizes, checkpointing=checkpointing)
    fill_from_hf(model, state)
    grid, ids = model.context.grid, batch_part(ids, model.context.grid)
    return grid.batch_shard, grid.x.index, model(ids, torch.arange(len(ids)), Documents.ending_with(0, ids)).detach()


@pytest.mark.parametrize(
    ("name", "sizes", "checkpointing"),
    [
        ("gpt2", GridSizes(), "none"),
        ("gpt2", GridSizes(2, 2, 2), "full"),
        ("llama3 positions", GridSizes(4, 1, 2), "none"),
        full("gpt2", GridSizes(), "full"),
        full("gpt2", GridSizes(2, 2, 2), "none"),
    ],
    ids=str,
)
def test_documents_of_a_sequence_do_not_see_each_other(ranks, name, sizes, checkpointing):
    config, ids = MODELS[name], torch.randint(1, 300, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    ids[0, [3, 4, 9]] = ids[1, 11] = ids[2, 0] = 0
    theirs, expected = library_model(config), torch.empty(4, LENGTH, config.vocab_size, dtype=torch.float64)
    for row, sequence in enumerate(ids.tolist()):
        stops = [i + 1 for i, token in enumerate(sequence) if token == 0 and i + 1 < LENGTH] + [LENGTH]
        for start, stop in zip([0, *stops], stops, strict=False):
            with torch.no_grad():
                expected[row, start:stop] = theirs(ids[row : row + 1, start:stop]).logits
    answers = ranks.run(sizes.devices, logits_of_packed, config, sizes, theirs.state_dict(), ids, checkpointing)
    torch.testing.assert_close(global_logits(answers, sizes, config), expected, rtol=1e-12, atol=1e-12)


def test_a_text_that_is_continued_with_cached_keys_is_that_of_transformers_without():
    config, theirs = MODELS["olmo2"], library_model(MODELS["olmo2"])
    plan = one_stage(Config(model=config, train=TrainConfig(seq_len=12)))
    stage = build_stage(plan, Grid(), torch.device("cpu"), torch.float64)
    fill_from_hf(stage.module, theirs.state_dict())
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(300)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    prompts, texts = ["w5 w7 w9", "w3", " ".join(f"w{i}" for i in range(1, 12))], []
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        for _ in range(8):
            ids.append(int(theirs(torch.tensor([ids[-config.max_positions :]])).logits[0, -1].argmax()))
        texts.append(tokenizer.decode(ids))
    assert continuations(stage, tokenizer, 0, prompts, 8, lambda *ids: None, sampling=GREEDY) == texts
    assert len(set(" ".join(texts).split())) > 20, "the model repeats a few words"


def gradients(sizes, compute_dtype):
    """On a rank: the global gradients of fp32 master weights."""
    model = build_model(TINY_MODEL, sizes, torch.float32, compute_dtype=compute_dtype)
    grid, generator = model.context.grid, torch.Generator().manual_seed(0)
    reducer = GradientReducer(model.weights, dict(model.named_parameters()))
    tokens = torch.randint(0, TINY_MODEL.vocab_size, (2, 16, LENGTH), generator=generator)
    ids, targets, samples = (batch_part(t, grid) for t in (*tokens, torch.arange(16)))
    assert model(ids, samples).dtype == compute_dtype
    (model.loss_sum(ids, targets, samples) / targets.numel()).backward()
    reducer.finish()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return {n: global_tensor(p.grad, p.spec, grid) for n, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", [BINARY_GRIDS[0], GridSizes(2, 1, 2)], ids=str)
def test_bf16_compute_gives_fp32_gradients_near_those_of_fp32(ranks, sizes):
    exact, near = (ranks.run(sizes.devices, gradients, sizes, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    for name, grad in exact.items():
        assert relative(near[name], grad) < 0.05, name


@pytest.mark.parametrize(
    "config", [replace(TINY_MODEL, dropout=0.2), replace(TINY_MODEL, attention_dropout=0.3), UNetConfig(dropout=0.2)]
)
def test_dropout_changes_the_output_in_training_only(config):
    """tests/exactness and tests/parallel/test_exact_plans.py compare its masks on grids and in recomputations."""
    model, samples = build_model(config, GridSizes()), torch.arange(2)
    images = torch.ones(2, 32, 32, 3, dtype=torch.float64), samples, samples
    inputs = (torch.ones(2, LENGTH, dtype=torch.int64), samples) if config.name == "gpt_tiny" else images
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # a block of a new U-Net has no effect
        first, second = model(*inputs), model(*inputs)
    training = model(*inputs).detach()
    assert torch.equal(first, second) and relative(training, first) > 1e-3


@pytest.mark.parametrize(
    ("model", "gx"),
    [
        (("model.heads=7", "model.key_value_heads=7", "model.head_size=10", "model.inner=77"), 7),
        (("model=llama3_8b",), 32),
        (("model=qwen2_0b5",), 2),
    ],
    ids=str,
)
def test_gx_is_any_divisor_of_the_heads_and_of_the_columns_of_keys(model, gx):
    config = configured(["model=llama_tiny", *model, f"parallel.gx={gx}", "cluster.memory_gib=1000"])
    assert validate(config, gx).sizes.x == gx


def test_gx_that_does_not_divide_the_columns_of_keys_is_rejected():
    with pytest.raises(ConfigError, match=r"gx=7: does not divide model.key_value_heads·head_size=128; use one of"):
        validate(configured(["model=qwen2_0b5", "parallel.gx=7"]), 7)
