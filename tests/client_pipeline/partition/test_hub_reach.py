"""A hub that does not answer is asked once."""

import os
import socket
import sys

import pytest

from client_pipeline.partition import hub_reach
from client_pipeline.partition.hub_ids import check_source


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """No environment of the machine's own, and nothing remembered."""
    for name in (*hub_reach._PROXIES, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # A port of the test's own stands for the hub's.
    hub_reach.hub_answers.cache_clear()
    yield
    hub_reach.hub_answers.cache_clear()


def test_a_hub_that_is_away_is_tried_once_and_then_the_cache_alone_is_read(monkeypatch):
    tries = []

    def refused(address, timeout):
        tries.append((address, timeout))
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", refused)
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for _ in range(3):
        # Once it is known, the variable is set; another key asks again, and does not connect again.
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        check_source("some-org/some-data", "data.hub-id")
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert tries == [(("huggingface.co", 443), 5.0)]
    assert constants is None or constants.HF_HUB_OFFLINE
    assert "name its folder" in hub_reach.offline_remedy()
    monkeypatch.delenv("HF_HUB_OFFLINE")


def test_what_is_here_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked"))
    check_source(str(tmp_path), "model.pretrained")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    check_source("some-org/some-data", "data.hub-id")
    assert "HF_HUB_OFFLINE" not in os.environ and hub_reach.offline_remedy() == ""


def test_another_hub_is_asked_by_its_name(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example:8443/path")
    assert hub_reach.hub_host() == "hub.example"
