"""CUDA's and NCCL's environment is set before their first use, and the tests never use a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt4d.config import ConfigError
from gpt4d.runtime.gpu import backend_timeout, set_environment


def test_collectives_have_queues_of_their_own_and_priority_and_leave_errors_to_the_watchdog():
    environment = {}
    set_environment(environment=environment)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert environment["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == environment["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert "NCCL_NVLS_ENABLE" not in environment


def test_what_the_user_has_set_stays():
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    set_environment(deterministic=True, environment=environment)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_a_deterministic_run_excludes_sums_in_any_order():
    environment = {}
    set_environment(deterministic=True, trace_dir=Path("runs/a"), environment=environment)
    assert environment["NCCL_NVLS_ENABLE"] == "0" and environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith("runs/a/")


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_blocking_collectives_are_rejected(name):
    with pytest.raises(ConfigError, match=rf"{name}=1: makes the host wait"):
        set_environment(environment={name: "1"})
    set_environment(environment={name: "0"})


def test_torchs_timeouts_are_later_than_ours():
    for timeout_s in (2.0, 120.0, 7200.0):
        assert backend_timeout(timeout_s).total_seconds() >= 2 * timeout_s


def test_tests_and_the_processes_they_start_see_no_gpu():
    assert not torch.cuda.is_available()
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['HIP_VISIBLE_DEVICES'])"
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip()
