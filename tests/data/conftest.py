import pytest

from gpt4d.config import DataConfig
from tests.support.data_files import small_corpus, three_sources


@pytest.fixture
def small(corpus, tmp_path) -> DataConfig:
    """Return the data configuration of the small corpus, with a cache of the test's."""
    return small_corpus(corpus, tmp_path)


@pytest.fixture(scope="session")
def sources(corpus, tmp_path_factory):
    """Return the directories of three token files with one tokenizer."""
    return three_sources(corpus, tmp_path_factory.mktemp("sources"))
