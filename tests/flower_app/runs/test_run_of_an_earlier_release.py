"""A run that CollaPipe 0.1.0 left opens with this release: its configuration has keys that were removed since.

``run-of-0-1-0.tar.xz`` is the directory of a run of one round and two clusters, without its reports and logs: a model
of the smallest sizes for ``task.name = "sequence-classification"``.
"""

import json
import tarfile

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.config.removed import REMOVED_KEYS
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config, read_config
from flower_app.config.strategy_choice import check_same_run
from flower_app.runs.run_directory import read_run_config
from helpers.repository import ROOT
from strategies.checkpoint import last_committed

ARCHIVE = ROOT / "tests" / "data" / "run-of-0-1-0.tar.xz"


@pytest.fixture
def run_dir(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run-of-0-1-0"


def collapipe(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def with_values(run_dir, values):
    """Write other values of keys into a run's stored configuration."""
    lines = (run_dir / "config.toml").read_text().splitlines()
    for key, (before, after) in values.items():
        name = key.rpartition(".")[2]
        lines[lines.index(f"{name} = {before}")] = f"{name} = {after}"
    (run_dir / "config.toml").write_text("\n".join(lines))


def test_the_stored_configuration_has_every_removed_key_at_its_former_default(run_dir):
    stored = read_config(run_dir / "config.toml")
    assert {key: stored[key] for key in REMOVED_KEYS} == {key: removed.default for key, removed in REMOVED_KEYS.items()}


@pytest.mark.parametrize("changed", [{}, {"planner.lookahead": ("1", "4")}])
def test_a_run_of_an_earlier_release_is_evaluated_and_predicts_and_is_exported(run_dir, changed):
    with_values(run_dir, changed)
    code, output, errors = collapipe("evaluate", run_dir, "--json")
    assert (code, json.loads(output)["examples"]) == (0, 8), errors
    code, output, errors = collapipe("predict", run_dir, "a text of some words", "--json")
    assert code == 0 and json.loads(output), errors
    code, output, errors = collapipe("export", run_dir, run_dir.parent / "exported")
    assert code == 0 and (run_dir.parent / "exported" / "model.safetensors").is_file(), errors


def test_a_run_that_used_no_removed_key_goes_on(run_dir):
    config, checkpoint = read_run_config(run_dir), last_committed(run_dir)
    former = {key: removed.default for key, removed in REMOVED_KEYS.items()}
    stored = config.to_flat() | former
    check_same_run(config, checkpoint._replace(state=checkpoint.state | {"config": stored}))
    used = checkpoint._replace(state=checkpoint.state | {"config": stored | {"planner.lookahead": 4}})
    with pytest.raises(ValueError, match="planner.lookahead: CollaPipe 0.2.0 removed this key, found 4; each round is"):
        check_same_run(config, used)


def test_a_run_of_an_earlier_release_that_cannot_go_on_says_what_to_do(run_dir):
    code, _, errors = collapipe("run", "--resume", run_dir, "--set", "num-rounds=2")
    assert code == 2 and "another release of CollaPipe began this run" in errors
    assert "go on with that release, or start a new run with model.from set to this one's model" in errors


@pytest.mark.parametrize("value", [0, 2, 1.0, True, "1"])
def test_other_values_of_a_removed_key_are_refused_by_its_name(value):
    with pytest.raises(ValueError, match=r"^planner.lookahead: CollaPipe 0.2.0 removed this key, found"):
        RunConfig.from_flat({"planner.lookahead": value})


def test_a_file_of_a_user_may_keep_the_former_default(tmp_path):
    (tmp_path / "mine.toml").write_text("[planner]\nlookahead = 1\n")
    assert load_config(str(tmp_path / "mine.toml")) == load_config()
