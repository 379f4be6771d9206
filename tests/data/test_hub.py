"""The Hugging Face hub where there is no network."""

import socket
import time

import pytest
from huggingface_hub import constants

from gpt4d.config import DataConfig
from gpt4d.data import hub, sources, transformers_tokenizer
from tests.support.data_files import one_line


@pytest.fixture
def no_network(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"  # nobody listens there
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        hub.unreachable.cache_clear()
        yield address
    hub.unreachable.cache_clear()


def load_dataset():
    next(sources.hub_rows(DataConfig(source="hub", path="no/such")))


def load_tokenizer():
    transformers_tokenizer.from_config(DataConfig(tokenizer="no/such", tokenizer_vocab=300))


@pytest.mark.parametrize("load", [load_dataset, load_tokenizer])
def test_without_a_network_the_hub_is_asked_once_and_the_network_is_named(no_network, monkeypatch, capfd, load):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    with one_line(rf"=no/such: .*there is no network: {no_network} cannot be reached"):
        load()
    assert capfd.readouterr() == ("", "")


def test_with_a_network_the_hub_is_used(no_network, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_session", lambda: type("Session", (), {"head": lambda *_, **__: None}))
    assert hub.unreachable() is None and not constants.is_offline_mode()
