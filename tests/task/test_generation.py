"""Generated text is that of a model that reads the text alone, without padding."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gpt4d.data.tokenizers import END_OF_TEXT
from gpt4d.parallel.grid import Grid
from gpt4d.task.generation import continuation
from tests.grids import TINY_MODEL, build_tiny_stage

END = 0
WORDS = [END_OF_TEXT, *(f"w{i}" for i in range(1, TINY_MODEL.vocab_size))]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


@pytest.fixture(scope="module")
def stage():
    """A stage in float64 with weights so large that each token depends on all before it."""
    stage = build_tiny_stage(Grid())
    with torch.no_grad():
        for name, parameter in stage.module.named_parameters():
            if "norm" not in name:
                parameter.mul_(20)
        stage.module.norm.bias.copy_(-stage.module.tokens.weight[END])  # the text does not end early
    return stage


def document_indices(ids):
    ends = (ids == END).long()
    return ends.cumsum(1) - ends


def most_likely_text(model, tokenizer, prompt, tokens, documents):
    ids = tokenizer.encode(prompt).ids or [END]
    for _ in range(tokens):
        window = torch.tensor([ids[-TINY_MODEL.max_positions :]])
        with torch.no_grad():
            logits = model(window, torch.zeros(1, dtype=torch.int64), documents(window))[0, -1]
        ids.append(int(logits[: TINY_MODEL.vocab_size].argmax()))
    assert END not in ids[-tokens:]
    return tokenizer.decode(ids)


@pytest.mark.parametrize(
    "documents", [lambda ids: None, document_indices], ids=["across documents", "inside documents"]
)
@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("w5 w7 w9", 6),
        ("w5 w7 w9", 40),
        (" ".join(WORDS[1:31]), 5),
        (f"w5 {END_OF_TEXT} w7 w9", 5),
        (f"w5 {END_OF_TEXT} w7 w9", 30),
        ("", 12),
    ],
)
def test_generated_text_equals_that_of_a_model_without_padding(stage, tokenizer, prompt, tokens, documents):
    text = continuation(stage, tokenizer, prompt, tokens, documents, temperature=0)
    assert text == most_likely_text(stage.module, tokenizer, prompt, tokens, documents)
    assert len(set(text.split())) > 3


@pytest.mark.parametrize(("prompt_length", "tokens", "length"), [(3, 6, 9), (3, 40, 16), (30, 5, 16)])
def test_the_model_sees_one_input_shape(stage, tokenizer, prompt_length, tokens, length):
    shapes = []
    hook = stage.module.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    continuation(stage, tokenizer, " ".join(WORDS[1 : 1 + prompt_length]), tokens)
    hook.remove()
    assert shapes == [(1, length)] * tokens
