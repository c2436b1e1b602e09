"""Every mistake gets one line that names the key or file, what was found, what was expected and what to do.

The lines themselves are in ``mistakes.toml``: who changes a message changes it there, and reads it once more.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.launch.launcher import Outcome
from flower_app.launch.simulation import SimulationLauncher
from helpers.mistakes import ports, prepare_folder

MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))["mistake"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    prepare_folder(folder)
    with ports() as values:
        yield folder, {"folder": str(folder), **values}


@pytest.fixture(autouse=True)
def in_folder(prepared, monkeypatch):
    monkeypatch.chdir(prepared[0])
    monkeypatch.setenv("FLWR_HOME", str(prepared[0] / "flwr-home"))

    def launched(self, order):
        return Outcome("failed", "nothing is launched here")

    monkeypatch.setattr(SimulationLauncher, "launch", launched)


def filled(text, values):
    return re.sub(r"\{(folder|taken|free|block)\}", lambda found: str(values[found[1]]), text)


def traces(folder):
    """Files of Flower, and directories of runs."""
    return {path for path in folder.rglob("*") if "flower" in path.parts or path.parent.name == "runs"}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["command"][:60])
def test_a_mistake_gets_its_one_line(mistake, prepared):
    before = traces(prepared[0])
    result = CliRunner().invoke(app, shlex.split(filled(mistake["command"], prepared[1])))
    assert result.exit_code == 2 and result.stdout == ""
    said = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert said == [filled(mistake["line"], prepared[1])]
    assert "Traceback" not in result.stderr
    assert traces(prepared[0]) == before


def test_a_run_of_several_that_fails_gets_a_line(tmp_path):
    out = tmp_path / "compared"
    result = CliRunner().invoke(app, ["compare", "--train", "--policies", "dssda", "--rounds", "1", "--out", str(out)])
    assert result.exit_code == 1 and result.stdout == ""
    assert re.match(
        r"error: nothing is launched here; logs: .*/logs\. The same command", result.stderr.splitlines()[-1]
    )


WITHOUT_A_NETWORK = (
    "; huggingface.co does not answer from here or HF_HUB_OFFLINE is set, and the cache has none: download it where "
    "there is a network, and name its folder"
)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            "data.source=hub data.hub-id=some-org/some-data",
            "error: data.hub-id: expected a dataset id or a dataset folder, found 'some-org/some-data' (LIBRARY)"
            f"{WITHOUT_A_NETWORK}",
        ),
        (
            "task.name=masked-lm model.family=bert model.pretrained=some-org/some-model",
            "error: model.pretrained: expected a folder with config.json and safetensors weights, or a hub id, found "
            "'some-org/some-model' ('some-org/some-model' is neither a folder nor a hub id of a model that can be "
            f"loaded: LIBRARY{WITHOUT_A_NETWORK})",
        ),
    ],
)
def test_a_hub_id_without_a_network_gets_one_line_with_the_remedy(keys, line, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(app, ["run", *(word for key in keys.split() for word in ("--set", key))])
    assert result.exit_code == 2 and result.stdout == ""
    # Between the two stands what the library says, in its own words.
    before, after = line.split("LIBRARY")
    assert result.stderr.startswith(before) and result.stderr.endswith(f"{after}\n")
    assert len(result.stderr.splitlines()) == 1


ONE_FILE = "run --config classes.toml --set data.test-source=test.csv"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "run --set num-rounds=5",
            "warning: optimizer.warmup-steps: 40 steps of warm-up, but the run has 20 (num-rounds = 5 x local-steps = "
            "4), so the learning rate ends at 0.0025, not 0.005; set optimizer.warmup-steps = 2",
        ),
        (
            "run --set plan=good.json --set policy=uniform",
            "warning: plan: the plan file {folder}/good.json takes the place of policy = 'uniform', which plans "
            "nothing; leave one of them out",
        ),
        (
            f"{ONE_FILE} --set data.validation-source=",
            "warning: data.validation-source: is empty, so the test file test.csv is scored after the rounds too; "
            "choose nothing by these scores, or set data.validation-source to a file of its own",
        ),
        (
            f"{ONE_FILE} --set data.validation-source=test.csv",
            "warning: data.validation-source: is the same file, so the test file test.csv is scored after the rounds "
            "too; choose nothing by these scores, or set data.validation-source to a file of its own",
        ),
        (
            "run --config classes.toml",
            "warning: data.test-source: is empty, so the final score is that of the validation file valid.csv; set "
            "data.test-source to a file of its own to report it",
        ),
        (
            f"{ONE_FILE} --set data.validation-source=train.csv",
            "warning: data.validation-source: train.csv is the training file too, so its score tells nothing; name a "
            "file of its own",
        ),
    ],
)
def test_what_runs_but_hardly_as_meant_is_warned_of(command, line, prepared):
    prepared[0].joinpath("good.json").write_text(
        '{"format": "collapipe-plan/1", "clusters": ['
        + ", ".join(['{"delta": [2, 0, 1, 0, 1, 0], "order": [4, 0, 2], "m": 6, "schedule": "1f1b"}'] * 3)
        + "]}"
    )
    result = CliRunner().invoke(app, shlex.split(f"{command} --set runs-dir=warned"))
    # It goes on: what is launched is the test's own.
    assert result.exit_code == 1 and "nothing is launched here" in result.stderr
    assert [said for said in result.stderr.splitlines() if said.startswith("warning: ")] == [filled(line, prepared[1])]
