"""A path that is mistyped is an error, and no question to the hub; a hub that does not answer is asked once."""

import os
import socket

import pytest

from client_pipeline.families.families import read_library_config
from client_pipeline.weights.hub_ids import check_source, hub_answers, hub_host, is_offline, offline_remedy
from flower_app.tasks.data.tables import read_hub
from flower_app.tasks.tokenizer import load_tokenizer


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder of models, from which the program is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "bert-tiny").mkdir(parents=True)


@pytest.mark.parametrize(
    "value", ["/models/bert-tiny", "./bert-tinny", "../x", "~/nowhere", "models/bert-tinny", "a/b/c", "bert/", "m.json"]
)
def test_what_looks_like_a_path_is_one_or_an_error(value, models):
    """The text became a stranger's model id, and the hub was asked for it at no fixed revision."""
    readers = {
        "model.pretrained": read_library_config,
        "data.tokenizer": load_tokenizer,
        "data.hub-id": lambda source: read_hub(source, ""),
    }
    for key, read in readers.items():
        with pytest.raises(
            (FileNotFoundError, ValueError), match=f"{key}: .* looks like a path, and /.* does not exist"
        ):
            read(value)


def test_folders_and_hub_ids_pass(models):
    for value in (
        "models/bert-tiny",
        "bert-base-uncased",
        "google/bert_uncased_L-2_H-128_A-2",
        "Helsinki-NLP/opus-2.0",
    ):
        check_source(value, "model.pretrained")


@pytest.fixture
def network(monkeypatch):
    """No environment of the machine's own, and nothing remembered."""
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    hub_answers.cache_clear()
    yield
    hub_answers.cache_clear()


def test_a_hub_that_is_away_is_tried_once_and_then_the_cache_alone_is_read(monkeypatch, network):
    tries = []

    def refused(address, timeout):
        tries.append((address, timeout))
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refused)
    for _ in range(3):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        check_source("some-org/some-data", "data.hub-id")
        assert os.environ["HF_HUB_OFFLINE"] == "1" and is_offline()
    assert tries == [(("huggingface.co", 443), 5.0)]
    assert "name its folder" in offline_remedy()
    with pytest.raises(FileNotFoundError, match="does not answer from here or HF_HUB_OFFLINE is set"):
        read_library_config("some-org/some-model")
    monkeypatch.delenv("HF_HUB_OFFLINE")


def test_what_is_here_asks_nobody(tmp_path, monkeypatch, network):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked"))
    check_source(str(tmp_path), "model.pretrained")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    check_source("some-org/some-data", "data.hub-id")
    assert not is_offline() and offline_remedy() == ""


def test_another_hub_is_asked_by_its_name(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8443/path")
    assert hub_host() == "hub.example"
