"""The description of this machine, cluster=auto: from facts, from files and from a launcher's variables."""

import pytest
import torch

from gpt4d.config import LevelConfig, machine
from gpt4d.config.checks import check_cluster
from gpt4d.config.machine import describe
from gpt4d.parallel.grid import Grid
from gpt4d.plan import one_stage
from gpt4d.planner.topology import for_devices, node_size
from gpt4d.planner.workload import compute_bytes
from gpt4d.runtime.machine import MachineFacts, control_group_limits, ranks_and_nodes, read_cpu
from gpt4d.step import build_stage
from gpt4d.training.measuring import summary
from gpt4d.validation import validate
from tests.support.planner_runs import ask
from tests.support.settings import configured

H100 = MachineFacts(1000, 8, 2, "NVIDIA H100 80GB HBM3", 79.19, 8)


def test_a_known_gpu_has_its_rates_and_the_memory_that_torch_reports():
    cluster = describe(H100)
    check_cluster(cluster)
    assert (cluster.name, cluster.device, cluster.memory_gib) == ("this machine's NVIDIA H100 80GB HBM3", "cuda", 79.1)
    assert (cluster.peak_tflops, cluster.attention_tflops) == (989, 400) and cluster.host_gib is None
    assert cluster.fp8_tflops > cluster.matmul_tflops
    assert [(level.ranks, level.group_gb_s) for level in cluster.levels] == [(None, 400), (8, 450)]


@pytest.mark.parametrize(
    ("name", "peak_tflops", "memory_gb_s"),
    [
        *[("NVIDIA A100-SXM4-40GB", 312, 1300), ("NVIDIA A100-SXM4-80GB", 312, 1700)],
        *[("NVIDIA A100-PCIE-40GB", 312, 1300), ("NVIDIA A100 80GB PCIe", 312, 1600)],
        *[("NVIDIA H100 80GB HBM3", 989, 2800), ("NVIDIA H100 PCIe", 756, 1700), ("NVIDIA H100 NVL", 835, 3200)],
        *[("NVIDIA H200", 989, 4000), ("NVIDIA H200 NVL", 835, 4000), ("NVIDIA GH200 480GB", 989, 3200)],
        *[("NVIDIA B200", 2250, 6000), ("NVIDIA GB200", 2500, 6000), ("AMD Instinct MI300X", 1307, 3500)],
        *[("AMD Instinct MI250X / MI250", 191.5, 1200), ("AMD Instinct MI250", 181, 1200)],
    ],
)
def test_gpus_whose_names_contain_each_other_are_told_apart(name, peak_tflops, memory_gb_s):
    model = machine.gpu_model(name)
    assert (model.peak_tflops, model.memory_gb_s) == (peak_tflops, memory_gb_s)


def test_every_gpu_is_a_machine_with_the_rates_of_its_table():
    names = {*machine.gpu_clusters()}
    assert {"h100", "h100_pcie", "rtx4090", "mi300x"} <= names
    for name, cluster in machine.gpu_clusters().items():
        found = configured([f"cluster={name}"]).cluster
        check_cluster(found)
        assert found == cluster and found.levels[0].ranks is None and found.peak_tflops > found.matmul_tflops


@pytest.mark.parametrize("name", ["h200", "h100", "a100"])
def test_nodes_of_a_gpu_have_the_rates_of_its_file(name):
    gpu, dgx = (configured([f"cluster={cluster}"]).cluster for cluster in (name, f"dgx_{name}"))
    for key in (
        "rates",
        "peak_tflops",
        "matmul_tflops",
        "attention_tflops",
        "fp8_tflops",
        "memory_gb_s",
        "operation_us",
    ):
        assert getattr(gpu, key) == getattr(dgx, key)
    assert [(each.ranks, each.group_gb_s) for each in gpu.levels] == [
        (each.ranks, each.group_gb_s) for each in dgx.levels
    ]


@pytest.mark.parametrize(
    ("words", "levels"),
    [
        ("cluster=h100 cluster.nodes=4", [(4, 400), (8, 450)]),
        ("cluster=h100 cluster.devices_per_node=2", [(None, 100), (2, 450)]),
        ("cluster=perlmutter cluster.nodes=3 cluster.devices_per_node=2", [(3, 50), (2, 300)]),
        ("cluster=gb200", [(None, 3600), (18, 3600), (4, 900)]),
        ("cluster=gb200 cluster.nodes=36", [(2, 3600), (18, 3600), (4, 900)]),
        ("cluster.nodes=8 cluster=gb200", [(1, 3600), (8, 3600), (4, 900)]),
    ],
)
def test_a_machine_has_the_nodes_and_the_devices_per_node_that_are_asked_for(words, levels):
    cluster = configured(words.split()).cluster
    assert [(level.ranks, level.group_gb_s) for level in cluster.levels] == levels
    assert machine.sized(cluster) == cluster


def test_other_gpus_and_parts_of_a_gpu_have_no_peak():
    for name in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA RTX A4000", "Tesla V100-SXM2-32GB"):
        assert machine.gpu_model(name) is None
    cluster = describe(MachineFacts(64, None, 1, "Somebody's GPU", 15.9, 2))
    check_cluster(cluster)
    assert cluster.peak_tflops is cluster.attention_tflops is None
    assert node_size(cluster) == 2, "a node has the GPUs that it sees"


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA RTX A6000", "AMD Instinct MI300X", "Unknown"])
def test_a_gpu_without_float8_products_has_no_rate_for_them(name):
    assert describe(MachineFacts(64, None, 1, name, 80, 8)).fp8_tflops is None


def test_processes_on_cpus_share_the_memory_of_their_node():
    cluster = describe(MachineFacts(23.4))
    check_cluster(cluster)
    assert cluster.levels == [LevelConfig(latency_us=100)]
    assert for_devices(cluster, 1).memory_gib == 23 and for_devices(cluster, 8).memory_gib == 23 / 8
    nodes = describe(MachineFacts(23.4, 4, 2))
    check_cluster(nodes)
    assert node_size(nodes) == 4 and for_devices(nodes, 8).memory_gib == for_devices(nodes, 2).memory_gib / 2 == 23 / 4


def test_processes_on_cpus_share_the_rates_of_the_cores_of_their_node():
    cluster = describe(MachineFacts(23.4, cores=4, vectors="avx512f"))
    assert (cluster.matmul_tflops, cluster.memory_gb_s) == (0.4, 40)
    shared = for_devices(cluster, 8)
    assert (shared.matmul_tflops, shared.memory_gb_s) == (0.05, 5) and for_devices(shared, 8) == shared
    assert (
        describe(MachineFacts(23.4, cores=4)).matmul_tflops
        < describe(MachineFacts(23.4, cores=4, vectors="avx2")).matmul_tflops
    )


def test_cores_are_counted_without_threads_and_with_their_widest_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    path = tmp_path / "cpuinfo"
    assert read_cpu(path) == {"cores": 8, "vectors": None}
    path.write_text("siblings\t: 8\ncpu cores\t: 4\nflags\t\t: fpu avx avx2 avx512f\n" * 8)
    assert read_cpu(path) == {"cores": 4, "vectors": "avx512f"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("world_size=1 cluster=h100", "estimates; gpt4d has measured one H200, and no link between GPUs"),
        ("grid=1x1x1x1 cluster=dgx_h200", "measured steps; gpt4d has measured one H200"),
        ("world_size=8 cluster=ic1 parallel.mode=atp", "estimates; gpt4d has measured one H200"),
        ("world_size=1 cluster=local", "measure them in ten seconds: python -m gpt4d.planner.calibrate out=mine.yaml"),
        ("world_size=2 cluster=local", "measure them: torchrun --nproc-per-node 2 -m gpt4d.planner.calibrate"),
        ("world_size=1 cluster=local cluster.rates=measured", "rates of products, memory and links: measured"),
    ],
)
def test_an_answer_says_which_rates_were_measured(words, text):
    (line,) = [line for line in ask(*words.split()).splitlines() if line.startswith("rates of ")]
    assert text in line


def test_equal_nodes_with_slightly_different_memory_are_described_alike():
    assert describe(MachineFacts(251.7, 4, 2)) == describe(MachineFacts(250.2, 4, 2))
    assert describe(MachineFacts(0.755)).host_gib == 0.75 and describe(MachineFacts(9.0)).host_gib == 9


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (None, 1)),
        ({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, (8, 2)),
        ({"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_JOB_NUM_NODES": "3"}, (4, 3)),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "4(x2)"}, (2, 1)),
    ],
    ids=["alone", "torchrun", "batch script", "step"],
)
def test_a_launcher_tells_tasks_per_node_and_nodes(environment, expected):
    assert ranks_and_nodes(environment) == expected


def test_the_smallest_limit_of_the_control_groups_counts(tmp_path):
    own, group = tmp_path / "cgroup", tmp_path / "fs/slurm/job_7/step_0"
    group.mkdir(parents=True)
    own.write_text("0::/slurm/job_7/step_0\n")
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("4294967296\n")
    assert control_group_limits(tmp_path / "fs", own) == [4294967296]
    own.write_text("5:cpu,memory:/job_7\n0::/\n")
    (tmp_path / "fs/memory/job_7").mkdir(parents=True)
    (tmp_path / "fs/memory/job_7/memory.limit_in_bytes").write_text("1073741824\n")
    (tmp_path / "fs/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert control_group_limits(tmp_path / "fs", own) == [1073741824]


def test_the_machine_is_detected_unless_set(monkeypatch):
    monkeypatch.setattr(machine, "this_machine", lambda: describe(H100))
    assert configured([]).cluster == describe(H100)
    changed = configured(["cluster.memory_gib=40", "cluster.levels=[{ranks: 2}]"]).cluster
    assert (changed.memory_gib, changed.device, changed.levels) == (40, "cuda", [LevelConfig(2)])
    assert configured(["cluster=local"]).cluster.name == "local"


def test_a_run_on_a_detected_gpu_is_planned_in_bf16_with_the_memory_of_that_gpu(monkeypatch):
    monkeypatch.setattr(machine, "this_machine", lambda: describe(H100))
    words = "model=gpt_125m", "train.batch_size=8", "train.micro_batch_size=1"
    config, local = (validate(configured([*words, *more]), 1).config for more in ((), ("cluster=local",)))
    assert compute_bytes(config) == 2 and compute_bytes(local) == 4 and local.parallel.cache_layers == 0
    assert (config.parallel.cache_layers, config.parallel.cache_scope) == ("all", "step")


def test_a_run_on_another_device_than_its_cluster_says_so():
    words = ["model.layers=1", "train.batch_size=2"]
    stage = build_stage(one_stage(configured(words)), Grid.single_device(), torch.device("meta"), initialized=False)
    stage.weights.device = torch.device("cuda")
    other = summary(validate(configured([*words, "cluster=local"]), 1), stage)
    assert "\ncluster.device=cpu: the ranks use cuda, so" in other and other.count("leave out cluster") == 1
    assert "cluster.device" not in summary(validate(configured([*words, "cluster=dgx_h100"]), 1), stage)


def test_the_planner_says_that_it_plans_for_this_machine():
    answer = ask("world_size=2")
    assert answer.startswith("cluster is not set: planned for this machine's CPUs (")
    assert "llama_tiny on 2 device(s) of this machine's CPUs" in answer
    assert "cluster is not set" not in ask("world_size=2", "cluster=local")
