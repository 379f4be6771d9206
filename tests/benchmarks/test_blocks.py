import pytest

from benchmarks.workers import blocks
from benchmarks.workers.blocks_ours import SETTINGS, Gpt4dBlocks
from gpt4d.config import GridSizes
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.grid import Grid


@pytest.mark.parametrize("setting", SETTINGS)
def test_our_blocks_use_their_weights_in_the_described_order(setting, monkeypatch):
    monkeypatch.setattr(blocks, "SIZES", GridSizes())
    monkeypatch.setattr(blocks, "HIDDEN", 16)
    monkeypatch.setattr(blocks, "MODEL", GPT2Config("small", 4, 16, 4, vocab_size=8, max_positions=blocks.LENGTH))
    contender = Gpt4dBlocks(Grid(), *SETTINGS[setting])
    for _ in range(2):
        contender.step()  # asserts that every use of a weight is the next one of the order
    assert all(matrix.grad.any() for matrix in contender.blocks.parameters() if matrix.spec.decay)
