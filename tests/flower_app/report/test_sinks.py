"""Scalars for MLflow and Weights & Biases: what is refused before a run begins, and what their stores hold."""

import json
import sys
from types import SimpleNamespace

import pytest

from flower_app.report.sinks import RoundSinks, open_sinks, sink_names

LINE = {"round": 3, "train_loss": 0.5, "lr": 0.1, "metrics": {"bleu": 12.0}, "clusters": [], "virtual": {}}


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"report-to: .*pip install 'collapipe\[wandb\]'"):
        sink_names("wandb")
    with pytest.raises(ValueError, match=r"^tensorboard: .*pip install 'collapipe\[tensorboard\]', or leave"):
        sink_names("", tensorboard=True)


def test_a_store_that_fails_is_warned_of_once_and_ends_neither_a_round_nor_the_others(monkeypatch):
    class Locked:
        def write(self, record):
            raise OSError("database is locked")

        def close(self):
            raise RuntimeError("no such run")

    class Whole:
        def write(self, record):
            calls.append(record["round"])

        def close(self):
            calls.append("close")

    calls, warnings = [], []
    monkeypatch.setattr("flower_app.report.sinks.log", lambda level, text, *values: warnings.append(text % values))
    sinks = RoundSinks({"mlflow": Locked(), "tensorboard": Whole()})
    for number in (1, 2):
        sinks.write(LINE | {"round": number})
    sinks.close()
    assert calls == [1, 2, "close"]
    assert warnings == ["report-to: mlflow failed, the training goes on: OSError: database is locked"]


@pytest.mark.slow
def test_a_local_store_of_mlflow_holds_the_rounds_of_a_run_that_went_on(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for number in (3, 4):
        sinks = open_sinks("mlflow", False, run_dir, number, {"seed": 7, "optimizer.lr": 0.1})
        sinks.write(LINE | {"round": number, "train_loss": 1.0 / number})
        sinks.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    [experiment] = [e for e in client.search_experiments() if e.name == "collapipe"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params == {"seed": "7", "optimizer.lr": "0.1"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in history] == [(3, 1 / 3), (4, 1 / 4)]
    assert run.data.metrics["validation/bleu"] == 12.0


def test_weights_and_biases_gets_the_runs_name_settings_and_scalars(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    # The package is no dependency, and its server is not ours: what it is asked for is what can be looked at here.
    module = SimpleNamespace(init=lambda **settings: calls.append(settings) or Run(), __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    sinks = open_sinks("wandb", False, tmp_path / "20260101-run", 1, {"seed": 7})
    sinks.write(LINE)
    sinks.close()
    begun, (step, values), end = calls
    assert (begun["project"], begun["id"], begun["resume"]) == ("collapipe", "20260101-run", "allow")
    assert begun["config"] == {"seed": 7}
    assert step == 3 and values["train/loss"] == 0.5 and values["validation/bleu"] == 12.0
    assert end == "finish" and json.dumps(values)
