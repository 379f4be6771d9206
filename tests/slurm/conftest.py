import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Cluster, NoSlurm, install


@pytest.fixture(scope="package")
def cluster():
    try:
        install()
        slurm = Cluster()
    except NoSlurm as reason:
        pytest.skip(f"no Slurm here: {reason}")
    yield slurm
    slurm.close()
    assert not slurm.left_running() and not slurm.directory.exists()


def standing_in(at: Path, *plan: str, name: str = "run") -> tuple[dict[str, str], Path]:
    """A stand-in for train.py that does ``plan`` (stand_in.py): the variables by which it is found; its directory."""
    directory = at / name
    (directory / "bin").mkdir(parents=True)
    python = directory / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).parent / "stand_in.py"}" "$@"\n')
    python.chmod(0o755)
    (directory / "plan").write_text("\n".join(plan))
    return {"GPT4D_VENV": str(directory), "STAND_IN": str(directory)}, directory


@pytest.fixture(scope="package")
def limited(cluster, tmp_path_factory):
    """A job with less time than the warning takes. Slurm looks twice a minute: it waits while other tests run."""
    at = tmp_path_factory.mktemp("limited")
    environment, directory = standing_in(at, "listen", "0")
    words = ["--time=5", "--nodelist=node4", str(ROOT / "scripts" / "slurm" / "generic.sh")]
    return cluster.sbatch(*words, log=at / "log", environment=environment), directory
