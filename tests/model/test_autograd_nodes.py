"""The size of the autograd graph of a block, which determines much of the host's time per block."""

import pytest
import torch
import transformers

from gpt4d.parallel.grid import Grid
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.support.settings import configured

_GPT2 = ["model=gpt_125m", "model.hidden=32", "model.heads=4", "model.vocab_size=300"]
_LLAMA = ["model=llama_160m", "model.hidden=32", "model.heads=4", "model.key_value_heads=2", "model.head_size=8"]


def _count(loss: torch.Tensor) -> int:
    """Return the number of nodes in the graph of a loss."""
    seen, stack = {None}, [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(inner for inner, _ in node.next_functions)
    return len(seen) - 1


def _ours(words: list[str], layers: int) -> int:
    words = [*words, f"model.layers={layers}", "train.precision=fp32", "train.compile=false", "train.seq_len=32"]
    config = validate(configured(words), 1).config
    stage = build_stage(config, Grid.single_device(), torch.device("cpu"))
    ids = torch.zeros(2, 32, dtype=torch.int64)
    return _count(stage.module.loss_sum(ids, ids, torch.arange(2)))


def _transformers(family: str, layers: int) -> int:
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=layers, vocab_size=300)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=layers,
            intermediate_size=64,
            vocab_size=300,
        )
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    return _count(model(ids, labels=ids).loss)


@pytest.mark.parametrize(("family", "words", "most"), [("gpt2", _GPT2, 28), ("llama", _LLAMA, 42)])
def test_a_block_has_fewer_autograd_nodes_than_the_block_of_transformers(family, words, most):
    ours = _ours(words, 3) - _ours(words, 2)
    theirs = _transformers(family, 3) - _transformers(family, 2)
    assert ours <= most < theirs
