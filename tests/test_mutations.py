"""The mutations of tests/mutations.py and tests/simulated_gpu/mutations.py apply to this version of gpt4d."""

import pytest

from tests.mutations import MUTATIONS, REPOSITORY
from tests.simulated_gpu import mutations as gpu_mutations


@pytest.mark.parametrize("mutations", [MUTATIONS, gpu_mutations.MUTATIONS], ids=["all areas", "simulated GPU"])
def test_each_mutation_replaces_one_fragment_and_names_tests_that_exist(mutations):
    assert not [problem for mutation in mutations if (problem := mutation.problem())]
    words = {word for mutation in mutations for word in mutation.tests.split()}
    files = [word.partition("::")[0] for word in words if ".py" in word]
    assert files and all((REPOSITORY / file).is_file() for file in files)


def test_forty_mutations_cover_every_package():
    packages = {mutation.file.partition("/")[0] for mutation in MUTATIONS}
    present = {path.parent.name for path in (REPOSITORY / "gpt4d").glob("*/__init__.py")}
    assert len(MUTATIONS) >= 40 and present <= packages
