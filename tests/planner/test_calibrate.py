"""Measurement of a machine, and the file written from it."""

from gpt4d.config import compose, read_cluster
from gpt4d.planner.search import rank


def measure_in_rank(path):
    """Return and write this rank's measurement, so short that its values are noise; tests check its form."""
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from gpt4d.planner import calibrate
    from gpt4d.runtime.launch import Launch

    short = {
        "_MIN_MEASURED_S": 0.0,
        "_MAX_MESSAGE_BYTES": {"cpu": 1 << 14},
        "_MATRIX_SIZE": {"cpu": 32},
        "_COMPARISONS": 1,
        "_ROUNDS": 1,
    }
    originals = {name: getattr(calibrate, name) for name in short}
    vars(calibrate).update(short)
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        cluster = calibrate.measure(Launch(rank, size, rank, size), torch.device("cpu"), "here")
        if not rank:
            calibrate._write(cluster, Path(path))
        return cluster
    finally:
        vars(calibrate).update(originals)


def test_a_measured_machine_can_be_used_as_a_cluster(ranks, tmp_path):
    path = tmp_path / "here.yaml"
    cluster = ranks.run(4, measure_in_rank, str(path))[0]
    assert read_cluster(path) == cluster
    kinds = {(m.kind, m.local, m.nodes) for m in cluster.measured}
    assert kinds == {(k, n, 1) for k in ("all_reduce", "all_gather", "reduce_scatter") for n in (2, 4)}
    assert all(m.gb_s > 0 and m.latency_us >= 0 and 0 <= m.hidden <= 1 for m in cluster.measured)
    config = compose([f"cluster={path}"])
    assert config.cluster == cluster
    assert len(rank(config, 4).plans) == 10


def test_fitted_line_passes_through_points_of_very_different_size():
    from gpt4d.planner.calibrate import _fit_line

    sent = [1e4, 1e5, 1e6, 1e7]
    latency, slope = _fit_line(sent, [1e-3 + 2e-9 * nbytes for nbytes in sent])
    assert abs(latency - 1e-3) < 1e-9 and abs(slope - 2e-9) < 1e-15
