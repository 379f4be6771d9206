"""The contenders of the benchmark of shared sequences compute the same function, and its figures follow from counts."""

import json
from collections.abc import Callable

import pytest
import torch

from benchmarks.adapters import gpt4d_context, torch_context
from benchmarks.context_steps import ContextConfig, context_grids
from benchmarks.experiments import context
from benchmarks.experiments.context import contiguous_blocks, imbalance, pairs, segment_blocks
from benchmarks.gradient_steps import largest_difference
from benchmarks.settings import DeviceConfig, parse_grid

CONFIG = ContextConfig(length=32, layers=2, hidden=32, heads=8, key_value_heads=2, vocabulary=64)


def computed(build: Callable, name: str):
    """Return loss and gradients of a contender on a rank."""
    step = build(name)
    step.forward_backward()
    return step.gradients(), step.collect_results()["loss"]


def ours(name: str):
    return gpt4d_context.SharedSequences(name, CONFIG.work)


def theirs(name: str):
    return torch_context.shared_sequences(CONFIG.work)[name]


CONTENDERS = [(ours, name) for name in context_grids(4, ["all_gather"])]
CONTENDERS += [(theirs, name) for name in ("ring attention", "Ulysses")]


def test_all_contenders_have_equal_losses_and_gradients(ranks):
    ((expected, loss),) = ranks.run(1, computed, ours, "1x1x1x1")
    assert len(expected) == 2 + 9 * CONFIG.layers
    for build, name in CONTENDERS:
        for gradients, found in ranks.run(4, computed, build, name)[:1]:
            assert found == pytest.approx(loss, rel=1e-6), name
            assert largest_difference(gradients, expected) < 1e-5, name


@pytest.mark.slow
@pytest.mark.full
def test_workers_report_peaks_and_gradients(capsys):
    settings = context.Settings(hosts=1, ranks=2, length=64, layers=1, hidden=32, vocabulary=64, memory_hidden=32)
    rows = context.values(settings, ["all_gather"])
    assert [row["family"] for row in rows] == ["ours"] * 3 + ["torch"] * 2
    assert all(row["peak_mib"] > 0 and row["gradient_difference"] < 1e-5 for row in rows)
    settings.memory_ranks = 2
    first, second = context.memory(settings)
    assert second["over_share"] == pytest.approx(2 * second["peak_mib"] / first["peak_mib"])
    assert "Ulysses" in capsys.readouterr().out


def test_grids_of_all_ranks_share_the_sequence():
    grids = context_grids(8, ["all_gather", "ring"])
    assert len(grids) == len(set(grids)) == 9 and grids[-1] == "8x1x1x1/tokens"
    for name in grids:
        sizes, parallel, _ = parse_grid(name)
        assert sizes.devices == sizes.x * parallel.get("context", 1) == 8
        assert (parallel.get("context_exchange") == "ring") == ("ring" in name)
    assert context_grids(4, ["all_gather"])[-2:] == ["2x1x1x2/context=2/tokens", "4x1x1x1/tokens"]


def test_a_continued_run_measures_only_the_missing_balance_of_kernels(tmp_path):
    stored = {"memory": [], "values": ["stored"], "hosts_2": {}, "hosts_1": {}}
    (tmp_path / "results.json").write_text(json.dumps(stored))
    sizes = {"length": 64, "hidden": 32, "vocabulary": 64, "balance_repeats": 1}
    settings = context.Settings(**sizes, continued=True, out=str(tmp_path / "results"))
    (results,) = context.run(settings)
    assert [row["context"] for row in results["balance"]] == [2, 4, 8]
    for row in results["balance"]:
        assert row["segments_pairs"] == 0 and row["contiguous_pairs"] > 0.4
        assert row["segments_measured"] >= 0 and row["contiguous_measured"] >= 0
    assert stored.items() <= results.items()


@pytest.mark.parametrize("blocks", [segment_blocks, contiguous_blocks])
def test_the_work_of_a_rank_is_its_pairs_of_query_and_key(blocks):
    length, ranks = 48, 4
    causal = torch.ones(length, length).tril()
    segments = torch.arange(length).chunk(2 * ranks)
    own = {
        segment_blocks: [torch.cat((segments[rank], segments[7 - rank])) for rank in range(ranks)],
        contiguous_blocks: torch.arange(length).chunk(ranks),
    }
    expected = [causal[positions].sum().item() for positions in own[blocks]]
    assert [sum(map(pairs, blocks(length, ranks, rank))) for rank in range(ranks)] == expected


def test_segments_balance_attention_and_contiguous_parts_do_not():
    found = {
        blocks: [imbalance([sum(map(pairs, blocks(8192, c, rank))) for rank in range(c)]) for c in (2, 4, 8)]
        for blocks in (segment_blocks, contiguous_blocks)
    }
    assert found[segment_blocks] == [0, 0, 0]
    assert found[contiguous_blocks] == pytest.approx([1 / 2, 3 / 4, 7 / 8], rel=1e-3)


def test_the_computation_is_divided_among_all_ranks():
    sizes = {"length": 256, "hidden": 128, "layers": 1, "flops": 1e8, "launch_us": 0.0}
    one, two = (context.computation(context.Settings(hosts=hosts, **sizes)) for hosts in (1, 2))
    assert one == pytest.approx(2 * two)
    model, tokens = context.Settings(**sizes).work.model, 256
    weights = model.hidden * (2 * 128 + 2 * 32 + 3 * model.inner + model.padded_vocab_size)
    attention = 3.5 * 2 * tokens**2 * model.hidden  # causal
    assert one == pytest.approx((6 * tokens * weights + attention) / 1e8 / 4, rel=0.02)


def test_waiting_is_the_time_that_a_device_does_not_compute():
    rows = [{"median_s": 6.0, "busy_s": 5.0}, {"not_counted": 5}]
    found = context.with_computation(rows, 4.0)
    assert found["rows"] == [{"median_s": 6.0, "busy_s": 5.0, "waiting_s": 1.0, "over_computation": 1.5}, rows[1]]


def test_workers_skip_masked_products_on_virtual_devices():
    for config in (CONFIG, context.Settings()):
        assert config.virtual_device().operations.skips_masked_products
    assert not DeviceConfig(virtual=True).virtual_device().operations.skips_masked_products
