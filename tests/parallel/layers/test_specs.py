"""The heads of an attention that each rank has, computed without ranks."""

from gpt4d.config import divisors
from gpt4d.parallel.layers import sharding

MOST_HEADS = 40
SPLIT_HEADS = [
    (heads, key_value_heads, ranks)
    for heads in range(1, MOST_HEADS + 1)
    for key_value_heads in divisors(heads)
    for ranks in divisors(heads)
]


def attended(served):
    """Return the head of keys and values for each query of a rank, selected and repeated as the attention does."""
    if not sharding.serves_equally(served):
        return served  # a head for each query
    needed = range(served[0], served[-1] + 1)
    repeats, rest = divmod(len(served), len(needed))
    assert not rest, "repeating whole heads does not give one for each query"
    return [head for head in needed for _ in range(repeats)]


def test_each_query_attends_to_its_own_head_for_any_number_of_heads_and_ranks():
    unequal = 0
    for heads, key_value_heads, ranks in SPLIT_HEADS:
        for rank in range(ranks):
            served = sharding.head_of_query(heads, key_value_heads, rank * (heads // ranks), heads // ranks)
            assert attended(served) == served, (heads, key_value_heads, ranks)
            unequal += not sharding.serves_equally(served)
    assert 0 < unequal < len(SPLIT_HEADS)


def test_6_queries_of_3_heads_over_2_ranks_are_served_unequally():
    assert [sharding.head_of_query(6, 3, first, 3) for first in (0, 3)] == [[0, 0, 1], [1, 2, 2]]
    assert not sharding.serves_equally([0, 0, 1]) and not sharding.serves_equally([1, 2, 2])
