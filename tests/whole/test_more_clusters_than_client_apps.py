"""Clusters that train one decoder together need no client app each: the losses are those of one for each."""

import pytest
import tomli_w

from flower_app.config.run_config import nested
from flower_app.config.sources import load_config
from flower_app.launch.app_folder import assemble_app
from flower_app.launch.launcher import LaunchOrder
from flower_app.launch.simulation import SimulationLauncher
from helpers.command_line import TINY, rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


SETTINGS = {"privacy.update-mechanism": "client-fixed", "privacy.update-clip": 0.5}
"""Its mod reads the weights that came with the order."""


def test_two_clusters_train_on_one_client_app_as_on_two(tmp_path):
    app, losses = assemble_app(tmp_path / "app"), []
    for clients in (1, 2):
        run_dir = tmp_path / f"run-{clients}"
        for folder in (run_dir / "plans", run_dir / "logs"):
            folder.mkdir(parents=True)
        names = {"scenario": "two-clusters", "run-dir": str(run_dir), "num-clusters": 2, "num-rounds": 2}
        config = load_config(None, {**TINY, **names, **SETTINGS})
        (tmp_path / "run.toml").write_text(tomli_w.dumps(nested(config.to_flat())))
        order = LaunchOrder(
            run_dir=run_dir, app=app, run_config=tmp_path / "run.toml", num_clusters=2, clients_at_once=clients
        )
        outcome = SimulationLauncher().launch(order)
        assert outcome.status == "finished", outcome.error
        losses.append([line["train_loss"] for line in rounds(run_dir)])
        log = (run_dir / "logs" / "simulation.log").read_text()
        assert ("2 clusters train at once, on 1 client apps" in log) == (clients == 1)
    assert losses[0] == losses[1]
