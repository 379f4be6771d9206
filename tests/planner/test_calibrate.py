"""Measurement of a machine, and the file written from it."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gpt4d.config import read_cluster
from gpt4d.config.machine import COMMUNICATOR_GIB
from gpt4d.planner import calibrate
from gpt4d.planner.search import rank
from gpt4d.runtime.launch import Launch
from tests.support.settings import configured


def measure_in_rank(path):
    """Write this rank's measurement, whose values are noise. Return it, and the intervals that each used axis holds."""
    grids = []

    class RecordedGrid(calibrate.Grid):
        def __init__(self, *args):
            super().__init__(*args)
            grids.append(self)

    replaced = {
        "MIN_MEASURED_S": 0.0, "MAX_MESSAGE_BYTES": {"cpu": 1 << 14}, "MATRIX_SIZE": {"cpu": 32}, "COMPARISONS": 1,
        "ATTENTION_SHAPE": {"cpu": (1, 8, 2, 8)}, "ROUNDS": 1, "Grid": RecordedGrid,
    }  # fmt: skip
    with patch.multiple(calibrate, **replaced):
        rank, size = dist.get_rank(), dist.get_world_size()
        cluster = calibrate.measure(Launch(rank, size, rank, size), torch.device("cpu"), "here")
        if not rank:
            calibrate.write_cluster(cluster, path)
    used = [axis.traffic for grid in grids for axis in grid if axis.traffic.num_started]
    return cluster, [len(traffic.wait_intervals) + len(traffic.run_intervals) for traffic in used]


def test_a_measured_machine_can_be_used_as_a_cluster(ranks, tmp_path):
    path = tmp_path / "here.yaml"
    cluster, _ = ranks.run(4, measure_in_rank, path)[0]
    assert read_cluster(path) == cluster
    assert cluster.rates == "measured by gpt4d.planner.calibrate on 4 device(s)"
    assert cluster.attention_tflops > 0 and cluster.fp8_tflops > 0
    kinds = {(m.kind, m.local, m.nodes) for m in cluster.measured}
    assert kinds == {(k, n, 1) for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") for n in (2, 4)}
    assert all(m.gb_s > 0 and m.latency_us >= 0 and 0 <= m.hidden <= 1 for m in cluster.measured)
    config = configured([f"cluster={path}", "parallel.pipeline.stages=1"])
    assert config.cluster == cluster
    assert len(rank(config, 4).plans) == 10


def test_no_intervals_are_held_after_a_measurement(ranks, tmp_path):
    for _, intervals in ranks.run(2, measure_in_rank, tmp_path / "here.yaml"):
        assert intervals == [0, 0]  # intervals on the axes of two grids, for the links and for the skew


def test_the_memory_of_a_communicator_is_measured_with_the_first_collective_of_all_ranks(monkeypatch):
    free = [70 << 30]

    class World:
        def all_reduce(self, tensor):
            free[0] -= 1 << 29
            return tensor

    monkeypatch.setattr(calibrate, "Grid", lambda sizes, device_type: SimpleNamespace(world=World()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 << 30))
    device = torch.device("cpu")  # the reduced tensor needs no GPU
    assert calibrate.communicator_gib(Launch(world_size=2), device) == 0.5
    assert calibrate.communicator_gib(Launch(), device) == COMMUNICATOR_GIB


def test_products_are_measured_on_random_matrices():
    square = calibrate.square_matrix(torch.device("cpu")).float()
    assert abs(square.mean()) < 0.02 and abs(square.std() - 1) < 0.02


def test_fitted_line_passes_through_points_of_very_different_size():
    sent = [1e4, 1e5, 1e6, 1e7]
    latency, slope = calibrate.fit_line(sent, [1e-3 + 2e-9 * nbytes for nbytes in sent])
    assert abs(latency - 1e-3) < 1e-9 and abs(slope - 2e-9) < 1e-15


def test_the_rates_of_a_gpu_are_those_of_a_tiny_operation_and_of_a_copy(monkeypatch):
    """The clock counts the device's work: a tiny operation takes 5 us, and a copy reads and writes 4 GB per second."""
    copied = 1 << 20
    monkeypatch.setattr(calibrate, "COPIED_BYTES", copied)

    def seconds(work, device):
        with patch.object(torch.Tensor, "copy_", lambda *_: "copy"):
            return 2 * copied / 4e9 if isinstance(work(), str) else 5e-6

    monkeypatch.setattr(calibrate, "measured_seconds", seconds)
    operation_us, memory_gb_s = calibrate.time_kernels(torch.device("cpu"))
    assert (operation_us, memory_gb_s) == (pytest.approx(5), pytest.approx(4))
