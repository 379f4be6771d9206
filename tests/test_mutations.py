"""The mutations of tests/mutations.py apply to this version of gpt4d."""

from tests.mutations import MUTATIONS, REPOSITORY


def test_each_mutation_replaces_one_fragment_and_names_tests_that_exist():
    assert not [problem for mutation in MUTATIONS if (problem := mutation.problem())]
    files = {test.partition("::")[0] for mutation in MUTATIONS for test in mutation.tests.split()}
    assert all((REPOSITORY / file).exists() for file in files)


def test_forty_mutations_cover_every_package():
    packages = {mutation.file.partition("/")[0] for mutation in MUTATIONS}
    present = {path.parent.name for path in (REPOSITORY / "gpt4d").glob("*/__init__.py")} - {"testing"}
    assert len(MUTATIONS) == 40 and present <= packages
