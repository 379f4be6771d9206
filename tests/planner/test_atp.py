"""The ATP paper's results for its machines, from its equations."""

import functools

import pytest

from gpt4d.config import ClusterConfig, LevelConfig
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.model.gpt2 import GPT2Config
from gpt4d.planner.atp import AtpMesh, all_reduce_bandwidths, communication, link_bandwidths, meshes
from tests.support.settings import configured

# M1 … M4 of the paper; batch 4, sequence 2048, fp16.
MODELS = [registry.describe(GPT2Config("m", 1, hidden, hidden // 128, 4096)) for hidden in (2048, 4096, 8192, 12288)]
MATRIX_A = ClusterConfig(levels=[LevelConfig(4, 25.0), LevelConfig(4, 600.0, 200.0)])  # Figure 7
# M2, M3 and M4: 2⁴⁰ FLOP of a layer (Table 2), and these per second and GPU on eight GPUs without chunks (Table 3).
TABLE_2 = 9.75, 37.5, 83.25
TABLE_3 = {"ic2": (42.82, 73.61, 96.83), "ic3": (97.45, 151.98, 178.19), "ic4": (15.31, 22.47, 32.52)}


def seconds_of(cluster: ClusterConfig, mesh: AtpMesh, model: Description = MODELS[0]) -> float:
    return sum(communication(model, cluster, mesh, 4, 2048, 2))


def best(cluster: ClusterConfig, devices: int, model: Description = MODELS[0]) -> AtpMesh:
    return min(meshes(devices), key=lambda mesh: seconds_of(cluster, mesh, model))


@functools.cache
def paper_cluster(name: str) -> ClusterConfig:
    return configured([f"cluster={name}"]).cluster


def test_the_worked_example_of_figure_7_and_all_reduces_by_equation_4():
    meshes = {AtpMesh(8, 2): (12.5, 200.0), AtpMesh(4, 4): (6.25, 600.0), AtpMesh(16, 1): (25.0, None)}
    assert {mesh: link_bandwidths(MATRIX_A, mesh) for mesh in meshes} == meshes
    assert all_reduce_bandwidths(MATRIX_A, AtpMesh(8, 2)) == (pytest.approx(8 / 14 * 12.5), pytest.approx(200.0))


def test_communication_time_follows_equation_2():
    """h=2048, one layer, 4 sequences of 2048 in fp16 on DeviceMesh(4, 2) with B1 = 2 and B2 = 5 GB/s."""
    cluster = ClusterConfig(atp_gb_s={"4x2": [2.0, 5.0]})
    first, second = communication(MODELS[0], cluster, AtpMesh(4, 2), 4, 2048, 2)
    rows = 2 * 4 * 2048 * 2048 * 2 / 1e9
    assert first == pytest.approx(rows * 2 / (2 * 2.0)) and second == pytest.approx(rows * 7 / (4 * 5.0))


@pytest.mark.parametrize("model", MODELS, ids=["m1", "m2", "m3", "m4"])
def test_fully_connected_machines_use_atp_1_below_8_devices_else_atp_2(model):
    assert [best(paper_cluster("ic3"), devices, model) for devices in (2, 4)] == [(2, 1), (4, 1)]
    assert best(paper_cluster("ic4"), 16, model) == (8, 2)
    assert best(paper_cluster("ic4"), 4, model) == (4, 1)


def test_at_8_fully_connected_devices_the_formula_prefers_atp_2():
    """In units of 2·L·b·s·h elements over a device's bandwidth. The paper measured, and reports, ATP-1 there."""
    unit = 2 * 4 * 2048 * 2048 * 2 / 600e9
    ic3, two_meshes = paper_cluster("ic3"), (AtpMesh(8, 1), AtpMesh(4, 2))
    atp_1, atp_2 = (seconds_of(ic3, mesh) for mesh in two_meshes)
    assert (atp_1 / unit, atp_2 / unit) == (pytest.approx(3.5), pytest.approx(3.25))


def test_pairs_joined_by_pcie_use_atp_1_and_pcie_alone_uses_atp_4_with_the_measured_bandwidths():
    assert best(paper_cluster("ic2"), 8) == (8, 1)
    times = {mesh: seconds_of(paper_cluster("ic1"), mesh) for mesh in meshes(8)}
    assert min(times, key=times.get) == (2, 4)
    assert times[AtpMesh(2, 4)] / times[AtpMesh(8, 1)] == pytest.approx(1 - 0.46, abs=0.01)


@pytest.mark.parametrize("name", ["ic5", "ic6"])
def test_one_layer_matrices_follow_the_closed_form(name):
    cluster = paper_cluster(name)
    unit = 2 * 4 * 2048 * 2048 * 2 / (cluster.levels[0].group_gb_s * 1e9)
    for devices in (4, 16, 64, 256):
        for d1, d2 in meshes(devices):
            seconds = seconds_of(cluster, AtpMesh(d1, d2))
            assert seconds == pytest.approx(unit * (14 * d2 + 4 * d1 - 18) / (d1 * d2))
    atp_1 = [seconds_of(cluster, AtpMesh(n, 1)) for n in (4, 16, 64, 256)]
    best_mesh = [seconds_of(cluster, best(cluster, n)) for n in (4, 16, 64, 256)]
    assert atp_1 == sorted(atp_1) and best_mesh == sorted(best_mesh, reverse=True)


def layer_seconds(name: str) -> tuple[list[float], list[float]]:
    """Return the seconds of a layer of M2, M3 and M4 by Tables 2 and 3, and the seconds of its all-reduces by Eq. 2."""
    total_s = [count / 8 / rate for count, rate in zip(TABLE_2, TABLE_3[name], strict=True)]
    cluster = paper_cluster(name)
    sums_s = [seconds_of(cluster, best(cluster, 8, model), model) for model in MODELS[1:]]
    return total_s, sums_s


@pytest.mark.parametrize(("name", "predicted"), [("ic2", (0, 1, 2)), ("ic4", (1, 2))])
def test_equation_2_predicts_table_3_with_the_rates_of_slow_machines(name, predicted):
    """IC3 gives the time of each model's products, and M3 gave the rates of ic2 and ic4."""
    compute_s = [total - sums for total, sums in zip(*layer_seconds("ic3"), strict=True)]
    for model in predicted:
        total_s, sums_s = (seconds[model] for seconds in layer_seconds(name))
        assert compute_s[model] + sums_s == pytest.approx(total_s, rel=0.02)
