"""Generated text equals the text of a model that reads one text at a time, without padding."""

from functools import partial

import pytest
import torch
from tokenizers import Tokenizer

from gpt4d.config import Config, GridSizes, ParallelConfig, PipelineConfig, TrainConfig
from gpt4d.data.tokenizers import END_OF_TEXT
from gpt4d.model.gemma3 import Gemma3Config
from gpt4d.model.llama import LlamaConfig
from gpt4d.model.moe import MoeConfig
from gpt4d.model.olmo2 import Olmo2Config
from gpt4d.parallel.grid import Grid
from gpt4d.parallel.layers.sequence import Documents
from gpt4d.plan import one_stage
from gpt4d.planner.resolve import resolve
from gpt4d.step import build_stage
from gpt4d.task import language
from gpt4d.task.generation import GREEDY, continuations
from gpt4d.task.task import GenerateConfig, Sampling
from tests.support.grids import TINY_MODEL, build_tiny_stage, full
from tests.support.stages import connected_stage
from tests.support.task_texts import END, PROMPTS, WORDS, most_likely_text, word_tokenizer


def test_prompts_of_a_file_end_at_newlines_alone(tmp_path):
    content = "\ufeffthe quick\u2028brown fox\r\nhello\x0cworld\x85\rx\n\nlast"
    (tmp_path / "prompts").write_bytes(content.encode())
    expected = ["the quick\u2028brown fox", "hello\x0cworld\x85\rx", "", "last"]
    assert language._prompts(GenerateConfig("run", prompts=str(tmp_path / "prompts"))) == expected


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="module")
def stage():
    """Return a stage in float64 with weights so large that each token depends on all before it."""
    stage = build_tiny_stage(Grid())
    magnify(stage)
    with torch.no_grad():
        stage.module.norm.bias.copy_(-stage.module.tokens.weight[END])  # the text does not end early
    return stage


documents_of = partial(Documents.ending_with, END)
TWO = f"w5 {END_OF_TEXT} w7 w9"
KINDS = pytest.mark.parametrize("documents", [lambda *ids: None, documents_of], ids=["across documents", "inside"])


@KINDS
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("w5 w7 w9", 6), ("w5 w7 w9", 40), (" ".join(WORDS[1:31]), 5), (TWO, 5), (TWO, 30), ("", 12)],
)
def test_generated_text_equals_that_of_a_model_without_padding(stage, tokenizer, prompt, tokens, documents):
    (text,) = continuations(stage, tokenizer, END, [prompt], tokens, documents, sampling=GREEDY)
    assert text == most_likely_text(stage.module, tokenizer, prompt, tokens, documents)
    assert len(set(text.split())) > 3


@pytest.mark.parametrize(
    ("prompt_length", "tokens", "shapes"),
    [(3, 4, [(1, 3), *[(1, 1)] * 3]), (3, 15, [(1, 3), *[(1, 1)] * 13, (1, 16)]), (30, 3, [(1, 16)] * 3)],
)
def test_a_forward_computes_new_tokens_only_while_the_text_fits(stage, tokenizer, prompt_length, tokens, shapes):
    seen = []
    hook = stage.module.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    continuations(stage, tokenizer, END, [" ".join(WORDS[1 : 1 + prompt_length])], tokens)
    hook.remove()
    assert seen == shapes


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_texts_of_a_batch_are_those_of_each_prompt_alone(stage, tokenizer, temperature):
    texts = continuations(stage, tokenizer, END, PROMPTS, 4, documents_of, Sampling(temperature))
    alone = [
        continuations(stage, tokenizer, END, [prompt], 4, documents_of, Sampling(temperature, seed=index))
        for index, prompt in enumerate(PROMPTS)
    ]
    assert texts == [text for (text,) in alone]


def random_stage(model, sizes):
    """Return a model in float64 with random weights so large that each token depends on all before it."""
    config = Config(model=model, train=TrainConfig(seq_len=12, seed=3))
    stage = build_stage(one_stage(config, sizes), Grid(sizes), torch.device("cpu"), torch.float64)
    magnify(stage)
    return stage


def magnify(stage):
    """Make weights so large that each token depends on all before it."""
    with torch.no_grad():
        for name, parameter in stage.module.named_parameters():
            if "norm" not in name:
                parameter.mul_(20)


def texts_on_grid(sizes, tokenizer_json):
    """On a rank: the likeliest continuations by a model of each family with random weights."""
    stages, tokenizer = (random_stage(model, sizes) for model in MODELS), Tokenizer.from_str(tokenizer_json)
    return [continuations(stage, tokenizer, END, PROMPTS, 8, documents_of, sampling=GREEDY) for stage in stages]


SIZES = {
    "layers": 2, "hidden": 32, "heads": 4, "key_value_heads": 2, "head_size": 8, "vocab_size": 50, "vocab_multiple": 16,
    "max_positions": 16,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, inner=48, qk_norm=True)
OLMO2 = Olmo2Config(**SIZES, inner=48)
GEMMA3 = Gemma3Config(**SIZES, inner=48, window=5, global_every=2)
MOE = MoeConfig(**SIZES, inner=24, experts=6, experts_per_token=2)
MODELS = [TINY_MODEL, LLAMA, OLMO2, GEMMA3, MOE]


@KINDS
@pytest.mark.parametrize("model", [GEMMA3, MOE], ids=["a window", "experts"])
def test_texts_equal_those_without_a_cache(tokenizer, model, documents):
    stage = random_stage(model, GridSizes())
    with torch.no_grad():
        stage.module.tokens.weight[END] = 0  # the text does not end early
        if model is MOE:
            stage.module.head.weight[:, END] = 0
    texts = continuations(stage, tokenizer, END, PROMPTS, 8, documents, sampling=GREEDY)
    assert texts == [most_likely_text(stage.module, tokenizer, prompt, 8, documents) for prompt in PROMPTS]
    assert len(set(" ".join(texts).split())) > 5


@pytest.fixture(scope="module")
def serial_texts(ranks, tokenizer):
    """Return the continuations on one device."""
    (texts,) = ranks.run(1, texts_on_grid, GridSizes(), tokenizer.to_str())
    assert all(len(set(" ".join(of_model).split())) > 5 for of_model in texts)
    return texts


def shared_text_on_grid(model, parallel, devices, tokenizer_json):
    """On a rank: the continuation of a prompt whose segments the ranks have, and the shapes of its forwards."""
    train = TrainConfig(seq_len=24, batch_size=4, seed=3)
    config = Config(model=model, train=train, parallel=ParallelConfig(**parallel))
    stage = connected_stage(resolve(config, devices))
    magnify(stage)
    seen: list[tuple[int, ...]] = []
    stage.module.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape)))
    tokenizer = Tokenizer.from_str(tokenizer_json)
    return continuations(stage, tokenizer, END, PROMPTS[2:3], 8, documents_of, sampling=GREEDY), seen


@pytest.mark.parametrize(
    ("model", "parallel", "devices", "shapes"),
    [
        (0, {"gz": 2, "context": 2}, 2, [(1, 6), *[(1, 1)] * 5, (1, 8), (1, 8)]),
        (1, {"gz": 2, "gdata": 2, "context": 4, "context_exchange": "ring"}, 4, [(1, 4)]),
        full(1, {"gz": 2, "gdata": 2, "context": 4, "gx": 2, "context_exchange": "ring"}, 8, [(1, 4)]),
        (3, {"gdata": 3, "context": 3}, 3, [(1, 4), *[(1, 1)] * 5, (1, 16), (1, 16)]),  # 6 does not divide 16
        full(2, {"gdata": 4, "context": 2}, 4, [(1, 6)]),
        full(0, {"gdata": 2, "context": 2, "pipeline": PipelineConfig(stages=2)}, 4, [(1, 6)]),
    ],
)
def test_ranks_that_share_sequences_split_a_prompt(ranks, tokenizer, serial_texts, model, parallel, devices, shapes):
    """Each rank computes equally many tokens of the prompt, and the text equals the text of one device."""
    for text, seen in ranks.run(devices, shared_text_on_grid, MODELS[model], parallel, devices, tokenizer.to_str()):
        assert text == serial_texts[model][2:3]
        assert seen[: len(shapes)] == shapes


@pytest.mark.parametrize("sizes", [(2, 1, 2, 1), *map(full, [(2, 2, 2, 1), (4, 1, 1, 1), (1, 4, 1, 1)])], ids=str)
def test_texts_are_equal_on_every_grid(ranks, tokenizer, serial_texts, sizes):
    sizes = GridSizes(*sizes)
    assert ranks.run(sizes.devices, texts_on_grid, sizes, tokenizer.to_str()) == [serial_texts] * sizes.devices
