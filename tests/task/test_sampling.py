"""Tokens are drawn as transformers' generation draws them."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt4d.task.generation import Sampler
from gpt4d.task.task import Sampling

SETTINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0, repetition_penalty=3.0),
    Sampling(temperature=0.7, top_k=5, seed=3),
    Sampling(temperature=1.3, top_k=0, top_p=0.7, seed=1),
    Sampling(temperature=1.3, top_k=20, min_p=0.2, repetition_penalty=1.5, seed=2),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_tokens_equal_those_of_transformers(model, sampling):
    def theirs():
        settings = {
            "do_sample": sampling.temperature > 0,
            "temperature": sampling.temperature or None,
            "top_k": sampling.top_k if sampling.temperature else None,
            "top_p": sampling.top_p if sampling.temperature else None,
            "min_p": sampling.min_p if sampling.temperature else None,
            "repetition_penalty": sampling.repetition_penalty,
        }
        torch.manual_seed(sampling.seed)
        prompt = torch.tensor([[5, 7, 9]])
        made = model.generate(
            prompt, max_new_tokens=20, pad_token_id=0, eos_token_id=None, bos_token_id=None, **settings
        )
        return made[0].tolist()

    ids, sampler = [5, 7, 9], Sampler(sampling, texts=1)
    for _ in range(20):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(sampler.draw(0, ids, logits))
    assert ids == theirs()
    assert len(set(ids)) > 4
