"""An edge server that boxes can join, for all tests of joining."""

import pytest

from flower_app.joining import newcomer
from helpers.joining import edge_server


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Boxes ask again at once: a test has no two seconds."""
    monkeypatch.setattr(newcomer, "_AGAIN_S", 0.05)


@pytest.fixture
def server(tmp_path):
    with edge_server(tmp_path / "certs") as server:
        yield server
