"""Machine profiles of published runs, from the words of their ``hardware``."""

from dataclasses import replace

from benchmarks.sustained import SUSTAINED, sustained
from gpt4d.config import CONFIG_DIR, ClusterConfig, LevelConfig, read_cluster
from gpt4d.config.machine import describe
from gpt4d.runtime.machine import MachineFacts

# Word of the hardware, cluster file, GPU. The first word that matches counts.
_MACHINES = (
    ("ic1", "ic1", "A100"),
    ("ic2", "ic2", "A100"),
    ("ic3", "ic3", "A100"),
    ("ic4", "ic4", "A100"),
    ("Perlmutter", "perlmutter", "A100"),
    ("H200", "dgx_h200", "H100"),
    ("H100", "dgx_h100", "H100"),
    ("A100", "dgx_a100", "A100"),
)
_BLACKWELL = {"GB300": (279, 64), "GB200": (186, 64), "B200": (180, 8)}  # GiB of a GPU, GPUs on one NVLink switch
# GB/s that all-reduces reach on the levels of the ATP paper's machines, fitted like the sustained rates.
_REACHED = {"ic1": (1.87,), "ic2": (37.76, 96.8), "ic4": (7.75,)}
_BANDWIDTHS = {"40GB": 1555 / 2039, "HBM2e": 2400 / 3350, "H200": 4800 / 3350}  # of memory, relative to the usual GPU
_POWER = {"500 W": 0.825}  # share of the products of a GPU of 700 W


def machine_of(row: dict) -> ClusterConfig | None:
    """Return the machine of a row with sustained rates; None if it is unknown."""
    words = row["hardware"]
    for gpu, (gib, local) in _BLACKWELL.items():
        if gpu in words:
            return sustained(describe(MachineFacts(500, local, 2, f"NVIDIA {gpu}", gib, local)), SUSTAINED[gpu])
    found = next(((file, gpu) for word, file, gpu in _MACHINES if word in words), None)
    if found is None:
        return None
    file, gpu = found
    rates = SUSTAINED[gpu]
    for word, share in _BANDWIDTHS.items():
        if word in words:
            rates = replace(rates, memory_gb_s=share * rates.memory_gb_s)
    for word, share in _POWER.items():
        if word in words:
            rates = rates.with_power(share)
    cluster = read_cluster(CONFIG_DIR / "cluster" / f"{file}.yaml")
    if "HBM2e" in words:
        cluster = replace(cluster, memory_gib=94)
    if "40GB" in words:
        cluster = replace(cluster, memory_gib=40)
    if "4x100 Gb" in words:
        cluster = replace(cluster, levels=[LevelConfig(None, 50, latency_us=8), *cluster.levels[1:]])
    machine, reached = sustained(cluster, rates), _REACHED.get(file)
    if reached is None:
        return machine
    share = reached[0] / cluster.levels[0].group_gb_s
    meshes = {mesh: [rate and share * rate for rate in pair] for mesh, pair in (cluster.atp_gb_s or {}).items()}
    levels = [replace(level, group_gb_s=rate) for level, rate in zip(machine.levels, reached, strict=True)]
    return replace(machine, levels=levels, atp_gb_s=meshes or None)
