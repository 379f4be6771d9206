"""Before they train, ranks find out who has other code, settings, files or links than the rest."""

from dataclasses import replace

import pytest

from gpt4d.runtime import preflight
from gpt4d.runtime.preflight import Node, difference, slow
from tests.grids import train_in_rank
from tests.rank_pool import RankFailure

NODE = Node("nid1", "c0de", "f00", "2.13.0", "3.11", "cpu", "mark")


def test_equal_nodes_differ_in_nothing():
    assert difference([NODE, replace(NODE, host="nid2")]) is None


@pytest.mark.parametrize("what", Node.FIXES)
def test_the_first_rank_that_differs_is_named_with_what_mends_it(what):
    odd = replace(NODE, host="nid3", **{what: "other"})
    words = difference([NODE, NODE, odd, odd])
    assert words == f"rank 2 on nid3 differs from rank 0 on nid1 in {Node.FIXES[what]}"


def test_two_tasks_on_one_gpu_are_told():
    gpu = replace(NODE, device="A100 GPU-1")
    assert "ranks 0 and 1 on nid1 have one GPU between them" in difference([gpu, gpu])
    assert difference([gpu, replace(gpu, device="A100 GPU-2"), replace(gpu, host="nid2")]) is None


def test_what_is_slow_is_named_with_its_node():
    hosts = ["a", "a", "b", "b", "c", "c"]
    seconds = [{"x": 0.001, "computation": 0.002} for _ in hosts]
    assert slow(seconds, hosts) == []
    seconds[2]["x"] = seconds[3]["x"] = 0.010
    seconds[5]["computation"] = 0.009
    assert slow(seconds, hosts) == [
        "the axis x is slow on 2 rank(s) (b): 10.0 ms on rank 2, 1.0 elsewhere",
        "computation is slow on 1 rank(s) (c): 9.0 ms on rank 5, 2.0 elsewhere",
    ]


def _measure(seconds):
    """On a rank: what is said to be slow, where the last rank takes ``seconds`` one after another, the rest 1 each."""
    import torch.distributed as dist

    last = dist.get_rank() == dist.get_world_size() - 1
    taken = iter(seconds if last else [1.0] * len(seconds))
    preflight._best, best = (lambda _: next(taken)), preflight._best
    try:
        return preflight._slow_again_and_again({"computation": None}, ["a", "b", "c"])
    finally:
        preflight._best = best


def test_what_is_slow_once_is_not_told_and_what_stays_slow_is(ranks):
    assert ranks.run(3, _measure, [9.0, 1.0, 9.0]) == [[]] * 3
    assert (
        ranks.run(3, _measure, [9.0, 8.0, 9.0])
        == [["computation is slow on 1 rank(s) (c): 8000.0 ms on rank 2, 1000.0 elsewhere"]] * 3
    )


def train_with_other_code(config):
    import torch.distributed as dist

    preflight._code, code = (lambda: f"edited on {dist.get_rank() // 2}"), preflight._code
    try:
        train_in_rank(config)
    finally:
        preflight._code = code


def test_a_run_whose_nodes_have_other_code_does_not_begin(ranks, tiny):
    with pytest.raises(RankFailure) as raised:
        ranks.run(4, train_with_other_code, tiny())
    assert str(raised.value).count("rank 2 on") == 4 and "gpt4d's code: bring it up to date there" in str(raised.value)


def test_a_run_directory_that_nodes_do_not_share_is_told(ranks, tiny, tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(RankFailure, match="choose one on a file system that all nodes share"):
        ranks.run(2, _train_with_unshared_directory, tiny(), str(tmp_path / "other"))


def _train_with_unshared_directory(config, other):
    """On a rank: the same path is another directory on the second, as on a disk of its own."""
    import torch.distributed as dist

    seen = preflight._seen
    preflight._PATIENCE_S = 0.0
    if dist.get_rank():
        preflight._seen = lambda path, mark: seen(path.parent.parent / "other" / path.name, mark)
    try:
        train_in_rank(config)
    finally:
        preflight._seen, preflight._PATIENCE_S = seen, 30.0
