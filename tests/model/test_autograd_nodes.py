"""The size of the autograd graph of a block, which determines much of the host's time per block."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpt4d.model import registry
from gpt4d.parallel.grid import Grid
from gpt4d.plan import one_stage
from gpt4d.step import build_stage
from gpt4d.validation import validate
from tests.support.settings import configured

_GPT2 = ["model=gpt_125m", "model.hidden=32", "model.heads=4", "model.vocab_size=300"]
_LLAMA = ["model=llama_160m", *_GPT2[1:3], "model.key_value_heads=2", "model.head_size=8", "model.inner=64"]


def _count(loss: torch.Tensor) -> int:
    """Return the number of nodes in the graph of a loss."""
    seen, stack = {None}, [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(inner for inner, _ in node.next_functions)
    return len(seen) - 1


def _nodes(words: list[str], layers: int) -> tuple[int, int]:
    """Return the numbers of nodes of our model and of transformers'."""
    words = [*words, f"model.layers={layers}", "train.precision=fp32", "train.compile=false", "train.seq_len=32"]
    config = validate(configured(words), 1).config
    stage = build_stage(one_stage(config), Grid.single_device(), torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_config(registry.of(config.model).hugging_face().hf_config(config.model))
    ids = torch.zeros(2, 32, dtype=torch.int64)
    return _count(stage.module.loss_sum(ids, ids, torch.arange(2))), _count(theirs(ids, labels=ids).loss)


@pytest.mark.parametrize(("words", "most"), [(_GPT2, 28), (_LLAMA, 42)], ids=["gpt2", "llama"])
def test_a_block_has_fewer_autograd_nodes_than_the_block_of_transformers(words, most):
    ours, theirs = (three - two for three, two in zip(_nodes(words, 3), _nodes(words, 2), strict=True))
    assert ours <= most < theirs
