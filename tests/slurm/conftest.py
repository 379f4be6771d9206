import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import NoSlurm, SlurmCluster, install


@pytest.fixture(scope="package")
def cluster():
    try:
        install()
        slurm = SlurmCluster()
    except NoSlurm as reason:
        pytest.skip(f"Slurm cannot run here: {reason}")
    yield slurm
    slurm.close()
    assert not slurm.left_running() and not slurm.directory.exists()


def create_stand_in(parent: Path, *plan: str, name: str = "run") -> tuple[dict[str, str], Path]:
    """Create a stand-in that follows ``plan`` (stand_in.py). Return the variables of scripts, and its directory."""
    directory = parent / name
    (directory / "bin").mkdir(parents=True)
    python = directory / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parent / "stand_in.py"}" "$@"\n')
    python.chmod(0o755)
    (directory / "plan").write_text("\n".join(plan))
    return {"GPT4D_VENV": str(directory), "STAND_IN": str(directory)}, directory
