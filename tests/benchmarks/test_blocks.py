import pytest

from benchmarks.adapters.gpt4d import OVERLAPS, Blocks
from benchmarks.workloads import Workload
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.parallel.grid import Grid


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_our_blocks_use_their_weights_in_the_described_order(overlap):
    work = Workload(GPT2Config("small", 4, 16, 4, vocab_size=8, max_positions=8), batch=2, steps=1)
    contender = Blocks(Grid(), work, *OVERLAPS[overlap])
    for _ in range(2):
        contender.step()  # asserts that every use of a weight is the next one of the order
    assert all(matrix.grad.any() for matrix in contender.blocks.parameters() if matrix.spec.group == "matrices")
