"""CUDA's and NCCL's environment is set before their first use, and the tests never use a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt4d.config import ConfigError
from gpt4d.runtime.gpu import backend_timeout, check_cuda_graphs, set_environment, share_cores
from gpt4d.runtime.job import process_group
from gpt4d.runtime.launch import Launch


def environment_of(environment=(), **options) -> dict[str, str]:
    """Return the variables that are set, given the variables of the user."""
    variables = dict(environment)
    set_environment(environment=variables, **options)
    return variables


def test_collectives_have_queues_and_priority_and_all_channels_of_the_links():
    environment = environment_of()
    expected = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32", "TORCH_NCCL_HIGH_PRIORITY": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_GRAPH_REGISTER": "0",
        "GPU_MAX_HW_QUEUES": "16",
    }  # fmt: skip
    assert environment.items() >= expected.items()
    assert not {"NCCL_NVLS_ENABLE", "NCCL_MAX_P2P_NCHANNELS"} & environment.keys()


@pytest.mark.parametrize(
    ("platform", "transport", "lazy"),
    [("linux", None, True), ("linux", "TCP", True), ("linux", "TCP_TLS", False), ("darwin", None, False)],
)
def test_gloo_connects_ranks_when_they_communicate_where_its_transport_can(monkeypatch, platform, transport, lazy):
    monkeypatch.setattr(sys, "platform", platform)
    environment = environment_of({"GLOO_DEVICE_TRANSPORT": transport} if transport else {})
    assert (environment.get("TORCH_GLOO_LAZY_INIT") == "1") is lazy


@pytest.mark.parametrize(
    ("amd", "own"),
    [(False, None), (True, None), (True, "PYTORCH_HIP_ALLOC_CONF")]
    + [(False, f"PYTORCH_{kind}ALLOC_CONF") for kind in ("", "CUDA_", "HIP_")],
)
def test_memory_is_reserved_in_expandable_segments_on_nvidia_unless_set(monkeypatch, amd, own):
    monkeypatch.setattr(os.path, "exists", lambda path: amd and path == "/dev/kfd")
    environment = environment_of({own: "backend:native"} if own else {})
    found = {name: value for name, value in environment.items() if name.endswith("ALLOC_CONF")}
    expected = {own: "backend:native"} if own else {} if amd else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert found == expected


@pytest.mark.parametrize(
    ("cores", "tasks", "own", "workers"), [(64, 8, 8, "4"), (16, 8, 2, "2"), (4, 8, 1, "1"), (64, 1, 64, "4")]
)
def test_tasks_of_a_node_share_its_cores_for_compilation(cores, tasks, own, workers):
    environment = {}
    assert share_cores(cores, tasks, environment) == own
    assert environment == {"TORCHINDUCTOR_COMPILE_THREADS": workers}
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "9"}
    share_cores(cores, tasks, environment)
    assert environment == {"TORCHINDUCTOR_COMPILE_THREADS": "9"}


def test_a_job_limits_its_compiling_processes(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")  # removed below, and again after the test
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    with process_group(Launch(local_world_size=10_000), torch.device("cpu")):
        assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "1"


def test_a_deterministic_run_excludes_sums_in_any_order_and_what_the_user_has_set_stays():
    environment = environment_of({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, deterministic=True, trace_dir=Path("runs/a"))
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert environment["NCCL_NVLS_ENABLE"] == "0" and environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith("runs/a/")


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_blocking_collectives_are_rejected(name):
    with pytest.raises(ConfigError, match=rf"{name}=1: makes the host wait"):
        environment_of({name: "1"})
    environment_of({name: "0"})


@pytest.mark.parametrize(("hip", "found"), [(None, "no GPU"), ("7.0", "a GPU of AMD, on which nobody has tested it")])
def test_cuda_graphs_are_rejected_without_a_gpu_and_on_amd(monkeypatch, hip, found):
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(ConfigError, match=f"train.cuda_graphs=true: this machine has {found}; leave it out"):
        check_cuda_graphs()


def test_torchs_timeouts_are_later_than_ours():
    for timeout_s in (2.0, 120.0, 7200.0):
        assert backend_timeout(timeout_s).total_seconds() >= 2 * timeout_s


def test_tests_and_the_processes_they_start_see_no_gpu():
    assert not torch.cuda.is_available()
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['HIP_VISIBLE_DEVICES'])"
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip()
