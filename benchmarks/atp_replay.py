"""The ATP paper's machines and models, replayed from its own numbers (ATP paper, §5, Table 3 and Fig. 10-12).

    python -m benchmarks.atp_replay [out=benchmarks/results/atp_replay]

Nothing is measured here. A layer takes the time of its FLOPs and of Eq. 2's sums. Two things are calibrated with the
paper's Table 3: the FLOP rate of each model, on IC3 without chunks, and a factor of Eq. 2's time on each of the other
interconnects, with M3. The table's remaining figures are predictions. Writes ``out``.json and ``out``.png.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks import report
from gpt4d.config import ClusterConfig, compose, from_arguments
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.model.gpt2.config import GPT2Config
from gpt4d.planner.atp import AtpMesh, communication, link_bandwidths, meshes
from gpt4d.runtime.errors import one_line_errors

SAMPLES, LENGTH, ELEMENT = 4, 2048, 2  # fp16
HIDDEN = {"M1": 2048, "M2": 4096, "M3": 8192, "M4": 12288}
# TFLOP/s per GPU of 8 GPUs without chunks, and the best of none, 2 and 4 chunks (Table 3).
TABLE_3 = {
    "ic1": {"M2": (3.45, 3.51), "M3": (6.68, 6.79), "M4": (10.71, 10.71)},
    "ic2": {"M2": (42.82, 43.73), "M3": (73.61, 75.95), "M4": (96.83, 100.25)},
    "ic3": {"M2": (97.45, 100.38), "M3": (151.98, 152.64), "M4": (178.19, 178.19)},
    "ic4": {"M2": (15.31, 18.62), "M3": (22.47, 26.18), "M4": (32.52, 38.81)},
}
DEVICES = {"ic1": 8, "ic2": 8, "ic3": 8, "ic4": 16}  # of Fig. 10 and Fig. 11
CHUNKS = 4


@dataclass
class ReplayBenchmark:
    out: str = "benchmarks/results/atp_replay"


def describe(model: str) -> Description:
    """Return one layer of a model of the paper's Table 2, whose heads have 128 features."""
    return registry.describe(GPT2Config(model.lower(), 1, HIDDEN[model], HIDDEN[model] // 128))


def layer_flops(model: str) -> float:
    """Return the FLOPs of a layer's forward and backward by Megatron-LM's formula, without recomputation."""
    hidden, rows = HIDDEN[model], SAMPLES * LENGTH
    return 72 * rows * hidden**2 * (1 + LENGTH / (6 * hidden))


def sums_s(cluster: ClusterConfig, model: str, mesh: AtpMesh) -> float:
    """Return the seconds of a layer's all-reduces (Eq. 2), before calibration."""
    return sum(communication(describe(model), cluster, mesh, SAMPLES, LENGTH, ELEMENT))


def known_meshes(cluster: ClusterConfig, devices: int) -> list[AtpMesh]:
    """Return the meshes whose bandwidths are known: the measured ones where a machine has measurements."""
    return [mesh for mesh in meshes(devices) if not cluster.atp_gb_s or str(mesh) in cluster.atp_gb_s]


def broadcasts_s(cluster: ClusterConfig, model: str, devices: int) -> float:
    """Return the seconds of a layer's transfers with 2-D (2.5-D for 8 devices) tensor parallelism, before calibration.

    SUMMA on q x q devices moves blocks of the input and of the weight for each of three products; a device receives
    (q - 1) / q² of each matrix. 2.5-D splits the batch over two such grids and sums gradients of weights over them.
    The bandwidth is that of DeviceMesh(N, 1), of which a ring uses all.
    """
    q = int(devices**0.5)
    copies = devices // q**2
    hidden, rows = HIDDEN[model], SAMPLES * LENGTH / copies
    inputs, weights = 7 * rows * hidden, 12 * hidden**2
    received = 3 * (inputs + weights) * (q - 1) / q**2 + 2 * (copies - 1) / copies * weights / q**2
    (link_gb_s, _) = link_bandwidths(cluster, AtpMesh(devices, 1))
    assert link_gb_s is not None
    return received * ELEMENT / 1e9 / link_gb_s


class Replay:
    """Seconds of a layer on one of the paper's machines, after calibration with Table 3."""

    def __init__(self) -> None:
        self.clusters = {name: compose([f"cluster={name}"]).cluster for name in TABLE_3}
        self.rates = {model: self._rate(model) for model in TABLE_3["ic3"]}  # FLOP/s of one device
        hidden = [HIDDEN[model] for model in self.rates]
        slope, inverse = numpy.polyfit([1 / h for h in hidden], [1 / rate for rate in self.rates.values()], 1)
        self.rates["M1"] = 1 / (inverse + slope / HIDDEN["M1"])  # not in the table
        self.factors = {name: self._factor(name) for name in TABLE_3}

    def _rate(self, model: str) -> float:
        flops = layer_flops(model)
        step_s = flops / 8 / (TABLE_3["ic3"][model][0] * 1e12)
        return flops / 8 / (step_s - self._best_sums_s("ic3", model, 8))

    def _factor(self, name: str) -> float:
        flops = layer_flops("M3") / 8
        step_s = flops / (TABLE_3[name]["M3"][0] * 1e12)
        return (step_s - flops / self.rates["M3"]) / self._best_sums_s(name, "M3", 8)

    def _best_sums_s(self, name: str, model: str, devices: int) -> float:
        cluster = self.clusters[name]
        return min(sums_s(cluster, model, mesh) for mesh in known_meshes(cluster, devices))

    def tflops(self, name: str, model: str, devices: int, communication_s: float, chunks: int = 1) -> float:
        """Return TFLOP/s per device. Chunks overlap all but one chunk of the shorter of computation and sums."""
        flops = layer_flops(model) / devices
        compute_s, sums = flops / self.rates[model], self.factors[name] * communication_s
        step_s = max(compute_s, sums) + min(compute_s, sums) / chunks
        return flops / step_s / 1e12

    def by_mesh(self, name: str, model: str, devices: int, chunks: int = 1) -> dict[AtpMesh, float]:
        """Return TFLOP/s per device on each mesh."""
        cluster = self.clusters[name]
        return {
            mesh: self.tflops(name, model, devices, sums_s(cluster, model, mesh), chunks)
            for mesh in known_meshes(cluster, devices)
        }

    def methods(self, name: str, model: str) -> dict[str, float]:
        """Return TFLOP/s per device of the methods of Fig. 10."""
        devices = DEVICES[name]
        transfers_s = broadcasts_s(self.clusters[name], model, devices)
        plain = self.by_mesh(name, model, devices)
        chunked = self.by_mesh(name, model, devices, CHUNKS)
        return {
            "Megatron-LM": plain[AtpMesh(devices, 1)],
            "2-D / 2.5-D": self.tflops(name, model, devices, transfers_s),
            "ATP": max(plain.values()),
            f"ATP, {CHUNKS} chunks": max(chunked.values()),
        }


def scaling(name: str) -> dict[str, dict[int, float]]:
    """Return T_comm of ATP-1, 2, 4 and of the best mesh by number of devices, in units of 2Lbsh / GroupBW (Fig. 12)."""
    cluster = compose([f"cluster={name}"]).cluster
    unit = 2 * SAMPLES * LENGTH * HIDDEN["M1"] * ELEMENT / (cluster.levels[0].group_gb_s * 1e9)
    curves: dict[str, dict[int, float]] = {"ATP-1": {}, "ATP-2": {}, "ATP-4": {}, "ATP-OPT": {}}
    for devices in (2**n for n in range(1, 11)):
        times = {mesh.d2: sums_s(cluster, "M1", mesh) / unit for mesh in meshes(devices)}
        for d2 in (1, 2, 4):
            if d2 in times:
                curves[f"ATP-{d2}"][devices] = times[d2]
        curves["ATP-OPT"][devices] = min(times.values())
    return curves


def table(replay: Replay) -> list[dict]:
    """Return Table 3's figures beside the replayed ones, for 8 devices."""
    rows = []
    for name, models in TABLE_3.items():
        for model, (plain, chunked) in models.items():
            best = max(replay.by_mesh(name, model, 8).values())
            with_chunks = max(replay.by_mesh(name, model, 8, CHUNKS).values())
            rows.append(
                {
                    "interconnect": name,
                    "model": model,
                    "paper_tflops": plain,
                    "replayed_tflops": best,
                    "calibrated": name == "ic3" or model == "M3",
                    "paper_gain_of_chunks": chunked / plain - 1,
                    "replayed_gain_of_chunks": max(with_chunks, best) / best - 1,
                }
            )
    return rows


def _bars(panel, groups: Mapping[str, Mapping[str, float]], title: str, legend: bool) -> None:
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    width = 0.8 / len(labels)
    for index, label in enumerate(labels):
        places = [place + (index - (len(labels) - 1) / 2) * width for place in range(len(groups))]
        panel.bar(places, [group.get(label, 0) for group in groups.values()], width, label=label)
    panel.set_xticks(range(len(groups)), list(groups))
    panel.set_title(title, fontsize=10)
    if legend:
        panel.legend(fontsize=7)


def plot(replay: Replay, out: Path) -> None:
    """Draw ``out``.png: rows like Fig. 10 and Fig. 11 with a panel per interconnect, and Fig. 12 below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 9), layout="constrained")
    figure.suptitle("Replay from the ATP paper's published numbers; nothing here is measured", fontsize=11)
    panels = figure.subplots(3, 4, gridspec_kw={"height_ratios": [1, 1, 1.1]})
    for column, name in enumerate(TABLE_3):
        devices = DEVICES[name]
        methods = {model: replay.methods(name, model) for model in HIDDEN}
        _bars(panels[0, column], methods, f"{name.upper()}, {devices} devices: methods (Fig. 10)", column == 0)
        by_mesh = {
            model: {f"ATP-{mesh.d2}": tflops for mesh, tflops in replay.by_mesh(name, model, devices).items()}
            for model in HIDDEN
        }
        _bars(panels[1, column], by_mesh, f"{name.upper()}, {devices} devices: meshes (Fig. 11)", True)
    for row in (0, 1):
        panels[row, 0].set_ylabel("TFLOP/s per device")
    for panel in panels[2]:
        panel.remove()
    bottom = panels[0, 0].get_gridspec()
    for half, name in ((slice(0, 2), "ic5"), (slice(2, 4), "ic6")):
        panel = figure.add_subplot(bottom[2, half])
        for label, points in scaling(name).items():
            panel.plot(
                list(points), list(points.values()), "--" if label == "ATP-OPT" else "-", marker=".", label=label
            )
        panel.set_xscale("log", base=2)
        panel.set_title(f"{name.upper()}: time of all sums (Fig. 12)", fontsize=10)
        panel.set_xlabel("devices")
        panel.set_ylabel("T_comm in 2Lbsh / GroupBW")
        panel.legend(fontsize=8)
    figure.savefig(out.with_suffix(".png"), dpi=110)


def main(arguments: list[str]) -> None:
    config, replay = from_arguments(ReplayBenchmark, arguments), Replay()
    out = Path(config.out)
    rows = table(replay)
    for row in rows:
        print(
            f"{row['interconnect']} {row['model']}: {row['paper_tflops']:7.2f} paper, {row['replayed_tflops']:7.2f} "
            f"replayed{' (calibrated)' if row['calibrated'] else ''}; chunks {row['paper_gain_of_chunks']:+.1%} paper, "
            f"{row['replayed_gain_of_chunks']:+.1%} replayed"
        )
    methods = {name: {model: replay.methods(name, model) for model in HIDDEN} for name in TABLE_3}
    for name, models in methods.items():
        gains = ", ".join(
            f"{model} {tflops['ATP'] / tflops['Megatron-LM'] - 1:+.0%}" for model, tflops in models.items()
        )
        print(f"{name}: ATP over Megatron-LM {gains}")
    command = " ".join(["python -m benchmarks.atp_replay", *arguments])
    factors = {"rates": replay.rates, "factors": replay.factors}
    report.write(out, command, {}, [], table=rows, methods=methods, calibration=factors)
    plot(replay, out)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
