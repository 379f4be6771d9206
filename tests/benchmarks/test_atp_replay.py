"""The replay of the ATP paper follows its equations and predicts figures with which it was not calibrated."""

import pytest

from benchmarks.atp_replay import Replay, scaling, table


def test_the_replay_predicts_the_pairs_and_the_infiniband_of_table_3():
    rows = {(row["interconnect"], row["model"]): row for row in table(Replay())}
    for key in (("ic2", "M2"), ("ic2", "M4"), ("ic4", "M4")):
        assert (
            rows[key]["replayed_tflops"] == pytest.approx(rows[key]["paper_tflops"], rel=0.02)
            and not rows[key]["calibrated"]
        )


def test_with_more_devices_the_best_mesh_needs_less_time_and_megatron_more():
    for name in ("ic5", "ic6"):
        curves = scaling(name)
        assert curves["ATP-1"][64] > curves["ATP-1"][16] and curves["ATP-OPT"][64] < curves["ATP-OPT"][16]
        assert curves["ATP-1"][16] == pytest.approx((14 + 4 * 16 - 18) / 16)
