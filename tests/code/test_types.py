"""The type checker accepts the product's code."""

import subprocess
import sys

import pytest

from tests.test_cli import ROOT


@pytest.mark.slow
def test_the_type_checker_finds_no_error():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
