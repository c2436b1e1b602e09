"""Classes that a run directory of somebody else names: their modules are imported by who has allowed them alone."""

import os
import sys

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.python_api import Run, train
from flower_app.runs.listing import listed_runs
from flower_app.runs.run_directory import read_run_config
from flower_app.watch.run_state import WatchedRun

MODULE = "module_of_a_stranger"
SETTINGS = {
    "strategy": "compression.update = 'fp16'",
    "policy": "",
    "task.name": "",
    "task.evaluate-generate": "",
    "model.family": "",
    "aggregator.name": "",
}
"""Keys that name classes, and a key that has the class asked what it goes with."""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A module of a stranger that this user's programs find; its import is noted."""
    (tmp_path / f"{MODULE}.py").write_text("open(__file__ + '.imported', 'w').close()\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield (tmp_path / f"{MODULE}.py.imported").exists
    sys.modules.pop(MODULE, None)


def foreign_run(tmp_path, key):
    run_dir = tmp_path / "runs" / "theirs"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "config.toml").write_text(f'{key} = "{MODULE}:Thing"\n{SETTINGS[key]}\nname = "theirs"\n')
    return run_dir


COMMANDS = {
    "resume": ["run", "--resume", "RUN"],
    "evaluate": ["evaluate", "RUN"],
    "predict": ["predict", "RUN", "a text"],
    "translate": ["translate", "RUN", "a text"],
    "leakage": ["leakage", "RUN"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("key", SETTINGS)
def test_a_command_imports_no_module_because_a_run_directory_names_it(tmp_path, imported, key, command):
    run_dir = foreign_run(tmp_path, key)
    arguments = [str(run_dir) if word == "RUN" else word for word in COMMANDS[command]]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and not imported()
    assert f"{key}: '{MODULE}:Thing': a run directory may be from anybody" in result.stderr
    assert f"--allow-module {MODULE}" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_who_allows_the_module_has_it_imported(tmp_path, imported, command):
    run_dir = foreign_run(tmp_path, "strategy")
    arguments = [str(run_dir) if word == "RUN" else word for word in COMMANDS[command]]
    result = CliRunner().invoke(app, [*arguments, "--allow-module", MODULE])
    # It goes on to the next thing that is wrong with it.
    assert result.exit_code == 2 and "a run directory may be from anybody" not in result.stderr
    assert imported() or "no such file" in result.stderr


@pytest.mark.parametrize("use", [lambda run: run.config, lambda run: run.predict("a"), lambda run: run.evaluate()])
def test_no_use_of_a_run_in_python_imports_what_it_names(tmp_path, imported, use):
    run_dir = foreign_run(tmp_path, "strategy")
    with pytest.raises((ValueError, OSError)) as refused:
        use(Run(run_dir))
    assert not imported() and f"Run(..., allow_modules=['{MODULE}'])" in str(refused.value)


def test_in_python_a_module_that_is_allowed_may_be_named(tmp_path, imported):
    run = Run(foreign_run(tmp_path, "task.name"), allow_modules=[MODULE])
    assert run.config.task.name == f"{MODULE}:Thing"
    with pytest.raises((ValueError, OSError), match="checkpoint"):
        train(resume=run)


@pytest.mark.parametrize("name", ["shutil:rmtree", "os:execlp", "client_pipeline.durable:write_text"])
def test_a_function_of_a_module_that_is_imported_already_is_not_called_either(tmp_path, name):
    run_dir = foreign_run(tmp_path, "task.name")
    (run_dir / "config.toml").write_text(f'task.name = "instruction"\ntask.evaluate-generate = "exact-match, {name}"\n')
    for use in (lambda: Run(run_dir).evaluate(), lambda: train(resume=Run(run_dir))):
        with pytest.raises(ValueError, match="^task.evaluate-generate: .* --allow-module"):
            use()


def test_a_run_that_another_one_names_is_no_pipe_that_is_waited_at(tmp_path):
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ValueError, match="config.toml: expected a file"):
        read_run_config(tmp_path)
    (tmp_path / "config.toml").unlink()
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="config.toml: expected a file"):
        read_run_config(tmp_path)


def test_a_look_at_runs_imports_nothing(tmp_path, imported):
    run_dir = foreign_run(tmp_path, "strategy")
    assert [run.name for run in listed_runs(run_dir.parent)] == ["theirs"]
    assert WatchedRun(run_dir).config.name == "theirs"
    assert not imported()
