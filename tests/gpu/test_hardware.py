"""Check 0: versions, and the speed of memory and of products on this device."""

import platform
import shutil
import subprocess

import pytest
import torch

from tests.gpu import usage
from tests.gpu.check import Check, Unavailable

_OLDEST_TORCH = (2, 11)
_COPY_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 256}
# Measured rates by a part of the device's name: TB/s of a copy on the device, read and written; TFLOP/s of a product.
_REFERENCES = {"H200": (4.3, 780.0)}
_SHARE = 0.8  # share of the reference that passes


def describe(check: Check) -> None:
    """Report the versions and the name of the device."""
    values = {"torch": torch.__version__, "python": platform.python_version(), "name": platform.machine()}
    if not check.rehearsal:
        if not torch.cuda.is_available():
            raise Unavailable("torch finds no GPU; use a machine that has one, or --device=cpu for a rehearsal")
        values |= {
            "name": torch.cuda.get_device_name(0),
            "devices": torch.cuda.device_count(),
            "memory_gib": torch.cuda.mem_get_info(0)[1] / 2**30,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, usage.nccl_version())),
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    check.values |= values


@pytest.mark.gpu(number=0, part=1, limit_s=20, work_s=15)
def test_copies_and_products_reach_the_rates_of_the_device(check: Check) -> None:
    describe(check)
    values, device = check.values, check.device
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = usage.seconds_of(lambda: target.copy_(source), device)
    size = _MATRIX_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product_s = usage.seconds_of(lambda: a @ b, device)
    rates = 2 * source.nbytes / copy_s / 1e12, 2 * size**3 / product_s / 1e12
    values |= {"copy_tb_s": rates[0], "product_tflops": rates[1]}
    expected = next((rates for name, rates in _REFERENCES.items() if name in values["name"]), None)
    check.figure = f"torch {values['torch']}, {values['name']}: {rates[0]:.3g} TB/s, {rates[1]:.4g} TFLOP/s"
    version = tuple(int(part) for part in values["torch"].split(".")[:2])
    check.require(version >= _OLDEST_TORCH, f"torch {values['torch']} is too old; install 2.11 or newer")
    if expected is None:
        check.figure += " (no reference)"
    else:
        for rate, reference, unit in zip(rates, expected, ("TB/s", "TFLOP/s"), strict=True):
            check.require(rate >= _SHARE * reference, f"{rate:.3g} {unit} is below {_SHARE:.0%} of {reference:g}")


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None where its tool is not installed."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
