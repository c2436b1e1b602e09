"""A run that goes on: its rounds in Flower's log are those of the whole run."""

import logging

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from helpers.fake_grid import FakeGrid
from strategies.resumed import ResumedStrategy


class Untrained(FedAvg):
    """Asks nobody."""

    def configure_train(self, server_round, arrays, config, grid):
        return []

    def configure_evaluate(self, server_round, arrays, config, grid):
        return []

    def aggregate_train(self, server_round, replies):
        return None, None


def headings(strategy, num_rounds, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="flwr"):
        strategy.start(FakeGrid(None, 1), ArrayRecord(), num_rounds=num_rounds)
    return [record.getMessage() for record in caplog.records if "ROUND" in record.getMessage()]


def test_the_log_counts_the_rounds_of_the_whole_run(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    assert headings(ResumedStrategy(Untrained(), 40), 3, caplog) == ["[ROUND 41/43]", "[ROUND 42/43]", "[ROUND 43/43]"]
    # Another run of this process counts its own.
    assert headings(Untrained(), 2, caplog) == ["[ROUND 1/2]", "[ROUND 2/2]"]
