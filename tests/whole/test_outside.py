"""Policy, task, family, rule and network from outside train together for real; none is known to the packages."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.config.sources import load_config
from flower_app.launch.run_series import SeriesRun, train_series
from flower_app.runs.run_directory import read_run_config
from helpers.command_line import TINY, rounds
from helpers.outside_rule import SignVote
from helpers.repository import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NETWORK = """
format = "collapipe-scenario/1"
clusters = 4
devices = 1
channels = 3
seed = 3
[device]
flop-per-cycle = 20.0
frequency-ghz = { min = 0.3, max = 0.8 }
memory-gb = 3.0
[block]
memory-gb = 0.375
"""
OUTSIDE = {
    "policy": "helpers.outside_policy:InTurn",
    "task.name": "helpers.outside_task:LengthTask",
    "model.family": "helpers.outside_family:Convolutions",
    "aggregator.name": "helpers.outside_rule:SignVote",
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of everything from outside, started in its folder as a configuration file names it."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "my-network.toml").write_text(NETWORK)
    settings = TINY | OUTSIDE | {"scenario": "my-network.toml", "num-rounds": 2, "evaluate-every": 1, "seed": 1}
    settings |= {"model.encoder-layers": 2, "local-steps": 2}
    (folder / "mine.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    config = load_config(str(folder / "mine.toml"))
    train_series([SeriesRun("outside", replace(config, run_dir=str(folder / "run")))], folder / "session", print)
    return folder / "run"


def weights_after(run_dir, number):
    return load_file(run_dir / "checkpoint" / f"round-{number:06}" / "weights.safetensors")


def test_a_policy_from_outside_decides_who_trains(run_dir):
    for line in rounds(run_dir):
        assert line["plan"]["policy"] == "in-turn"
        # It begins with the cluster of the seed's number; three of four have a channel.
        chosen = {c["cluster"] for c in line["virtual"]["clusters"] if c["selected"]}
        assert chosen == {(1 + line["round"] - 1 + k) % 4 for k in range(3)}
        assert {c["cluster"] for c in line["clusters"]} == chosen


def test_a_network_from_outside_is_the_runs_own(run_dir):
    config = read_run_config(run_dir)
    assert Path(config.scenario).is_absolute() and Path(config.scenario).read_text() == NETWORK
    for line in rounds(run_dir):
        assert len(line["virtual"]["clusters"]) == 4
        channels = {c["channel"] for c in line["virtual"]["clusters"] if c["selected"]}
        assert channels == {0, 1, 2}


def test_a_task_from_outside_is_what_is_learned_and_scored(run_dir):
    assert json.loads((run_dir / "model" / "task.json").read_text())["name"] == OUTSIDE["task.name"]
    for line in rounds(run_dir):
        assert line["metrics"].keys() == {"loss", "accuracy", "macro_f1"} and line["train_loss"] > 0
    texts = ["the dog sleeps", "the old dog sees the small cat beside the river today"]
    arguments = ["predict", str(run_dir), *texts, "--allow-module", "helpers"]
    predicted = CliRunner().invoke(app, arguments)
    assert predicted.exit_code == 0 and set(predicted.stdout.split()) <= {"long", "short"}
    assert len(predicted.stdout.split()) == 2


def test_a_family_from_outside_is_the_model_that_is_cut(run_dir):
    names = weights_after(run_dir, 2).keys()
    assert {"embedding.weight", "blocks.0.convolution.weight", "blocks.1.norm.bias", "head.classifier.weight"} <= names
    assert json.loads((run_dir / "model" / "spec.json").read_text())["family"] == OUTSIDE["model.family"]
    for line in rounds(run_dir):
        blocks = [device["blocks"] for cluster in line["clusters"] for device in cluster["devices"].values()]
        assert blocks == [2, 2, 2]


def test_a_rule_from_outside_makes_the_encoder(run_dir):
    first, second = (weights_after(run_dir, number) for number in (1, 2))
    for name, before in first.items():
        steps = (second[name] - before) / SignVote.step
        if name.startswith("head."):
            assert not torch.allclose(steps, steps.round(), atol=1e-2), name
        else:
            assert torch.allclose(steps, steps.round(), atol=1e-2) and steps.abs().max() == pytest.approx(1, abs=1e-2)


# What CONTRIBUTING.md says of adding things.


def rows():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page[page.index("| you add |") :]
    for line in table[: table.index("\n\n")].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_each_row_of_contributing_names_tests_that_are_there_and_classes_from_outside():
    added = {kind.split(" (")[0]: (where, proof) for kind, where, proof in rows()}
    assert added.keys() == {
        "a strategy",
        "a policy",
        "a task",
        "a model family",
        "an aggregation rule",
        "a network",
        "a configuration key",
    }
    for kind, (where, proof) in added.items():
        named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", proof)
        assert named, kind
        for file, test in named:
            (path,) = ROOT.glob(f"tests/**/{file}.py")
            assert f"def {test}(" in path.read_text(encoding="utf-8"), test
        for helper in re.findall(r"`(outside_\w+\.py)`", where + proof):
            assert list(ROOT.glob(f"tests/**/{helper}")), helper
        for path in re.findall(r"`([\w/-]+/[\w./-]+)`", where):
            assert (ROOT / path).exists(), path


def test_the_classes_from_outside_are_known_to_no_package():
    for package in ("client_pipeline", "strategies", "flower_app", "configs"):
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".toml"):
                text = path.read_text(encoding="utf-8")
                assert not re.findall(r"\boutside_(policy|task|family|rule)\b", text), path
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT / "tests")
