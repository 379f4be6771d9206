"""Before training, ranks that differ in code, settings, files or link speed are found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from gpt4d.training import preflight
from gpt4d.training.preflight import NodeFacts, find_difference, find_slow
from tests.support.grids import train_in_rank
from tests.support.rank_pool import RankFailure

NODE = NodeFacts("nid1", "c0de", "a100", "f00", "2.13.0", "3.11", "cpu", "mark")


def test_equal_nodes_have_no_difference():
    assert find_difference([NODE, replace(NODE, host="nid2")]) is None


@pytest.mark.parametrize("field", NodeFacts.FIXES)
def test_the_first_rank_that_differs_is_named_with_the_fix(field):
    odd = replace(NODE, host="nid3", **{field: "other"})
    message = find_difference([NODE, NODE, odd, odd])
    assert message == f"rank 2 on nid3 differs from rank 0 on nid1 in {NodeFacts.FIXES[field]}"


def test_two_tasks_on_one_gpu_are_an_error():
    gpu = replace(NODE, device="A100 GPU-1")
    assert "ranks 0 and 1 on nid1 share one GPU" in find_difference([gpu, gpu])
    assert find_difference([gpu, replace(gpu, device="A100 GPU-2"), replace(gpu, host="nid2")]) is None


def test_a_slow_axis_or_computation_is_named_with_its_nodes():
    hosts = ["a", "a", "b", "b", "c", "c"]
    seconds = [{"x": 0.001, "computation": 0.002} for _ in hosts]
    assert find_slow(seconds, hosts) == []
    seconds[2]["x"] = seconds[3]["x"] = 0.010
    seconds[5]["computation"] = 0.009
    assert find_slow(seconds, hosts) == [
        "axis x is slow on 2 rank(s) (b): 10.0 ms on rank 2, median 1.0 ms",
        "computation is slow on 1 rank(s) (c): 9.0 ms on rank 5, median 2.0 ms",
    ]


def _measure(seconds):
    """On a rank: find slow ranks if the last rank takes ``seconds`` in successive rounds and every other rank 1 s."""
    last = dist.get_rank() == dist.get_world_size() - 1
    durations = iter(seconds if last else [1.0] * len(seconds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "best_time", lambda _: next(durations))
        return preflight.find_persistently_slow({"computation": None}, ["a", "b", "c"])


def test_only_what_is_slow_in_every_round_is_reported(ranks):
    assert ranks.run(3, _measure, [9.0, 1.0, 9.0]) == [[]] * 3
    slow = "computation is slow on 1 rank(s) (c): 8000.0 ms on rank 2, median 1000.0 ms"
    assert ranks.run(3, _measure, [9.0, 8.0, 9.0]) == [[slow]] * 3


def train_with_other_code(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "code_hash", lambda: f"edited on {dist.get_rank() // 2}")
        train_in_rank(config)


def test_a_run_does_not_start_if_nodes_have_different_code(ranks, tiny):
    with pytest.raises(RankFailure) as raised:
        ranks.run(4, train_with_other_code, tiny())
    assert str(raised.value).count("rank 2 on") == 4 and "gpt4d's code; install the same version" in str(raised.value)


def test_a_run_directory_that_nodes_do_not_share_is_an_error(ranks, tiny, tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(RankFailure, match="choose a directory on a file system that all nodes share"):
        ranks.run(2, _train_with_unshared_directory, tiny(), str(tmp_path / "other"))


def _train_with_unshared_directory(config, other):
    """On a rank: the path of the run directory leads to a different directory on rank 1, as on a local disk."""
    read_marker = preflight.read_marker
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "MARKER_TIMEOUT_S", 0.0)
        if dist.get_rank():
            patch.setattr(preflight, "read_marker", lambda path, *rest: read_marker(Path(other, path.name), *rest))
        train_in_rank(config)
