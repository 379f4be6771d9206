"""A machine that is measured, written down and read again."""

from gpt4d.config import compose, read_cluster
from gpt4d.planner.search import rank


def measure(path):
    """On a rank, in no time: what it finds is noise, its form is not."""
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from gpt4d.planner import calibrate
    from gpt4d.runtime.launch import Launch

    names = "_LEAST_S", "_LARGEST", "_SIDE", "_TURNS", "_ROUNDS"
    kept = {name: getattr(calibrate, name) for name in names}
    vars(calibrate).update(dict(zip(names, (0.0, {"cpu": 1 << 14}, {"cpu": 32}, 1, 1), strict=True)))
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        found = calibrate.measured(Launch(rank, size, rank, size), torch.device("cpu"), "here")
        if not rank:
            calibrate._write(found, Path(path))
        return found
    finally:
        vars(calibrate).update(kept)


def test_a_measured_machine_is_a_cluster(ranks, tmp_path):
    path = tmp_path / "here.yaml"
    found = ranks.run(4, measure, str(path))
    assert read_cluster(path) == found[0]
    kinds = {(m.kind, m.local, m.nodes) for m in found[0].measured}
    assert kinds == {(k, n, 1) for k in ("all_reduce", "all_gather", "reduce_scatter") for n in (2, 4)}
    assert all(m.gb_s > 0 and m.latency_us >= 0 and 0 <= m.hidden <= 1 for m in found[0].measured)
    config = compose([f"cluster={path}"])
    assert config.cluster == found[0]
    assert len(rank(config, 4).plans) == 10


def test_a_line_goes_through_points_of_very_different_size():
    from gpt4d.planner.calibrate import _line

    sent = [1e4, 1e5, 1e6, 1e7]
    latency, slope = _line(sent, [1e-3 + 2e-9 * nbytes for nbytes in sent])
    assert abs(latency - 1e-3) < 1e-9 and abs(slope - 2e-9) < 1e-15
