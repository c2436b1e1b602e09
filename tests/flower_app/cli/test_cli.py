"""The command line: exit codes, messages, and what goes to which stream."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_app import verify
from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.launch import single_run
from flower_app.launch.launcher import Outcome
from flower_app.launch.preflight import check_run
from flower_app.launch.simulation import SimulationLauncher
from flower_app.runs.run_directory import append_round, create_run_directory, read_run_config, write_config
from helpers.running_programs import free_port
from helpers.saved_runs import SMALL, saved_run


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def no_launch(monkeypatch):
    """Refuse to start anything: what is tested must fail before."""

    def launched(*args, **kwargs):
        raise AssertionError("the run was started")

    monkeypatch.setattr(SimulationLauncher, "launch", launched)


@pytest.fixture
def untrained(tmp_path):
    """A run directory as a run leaves it, with an untrained model."""
    return saved_run(SMALL | {"runs-dir": str(tmp_path / "runs")})


def test_a_mistake_shows_its_traceback_to_who_asks_for_it(monkeypatch):
    monkeypatch.setenv("COLLAPIPE_TRACEBACK", "1")
    result = call("run", "--set", "seed=-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.endswith("error: seed: expected at least 0, found -1\n")


def test_a_task_of_ones_own_is_checked_with_all_that_it_generates(tmp_path, monkeypatch):
    # Its labels are those of its training examples: of few examples, they would be too few.
    (tmp_path / "my_kinds.py").write_text(
        "from flower_app.tasks.classification import ClassificationTask\n"
        "from flower_app.tasks.labelled import Examples\n"
        "class Kinds(ClassificationTask):\n"
        "    def generate(self, number, split, seed):\n"
        "        texts, labels = ['a b'] * number, [str(i * 6 // number) for i in range(number)]\n"
        "        return Examples(texts, labels, labels, lambda row, _: f'text {row}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["task.name=my_kinds:Kinds", "model.family=bert", "data.num-examples=60", "data.evaluation-examples=12"]
    assert check_run(load_config(None, [*mine, f"decoder.bind=127.0.0.1:{free_port()}"])) == 3


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"delta": [3, 0, 0, 0, 0, 0]},
            "delta [3, 0, 0, 0, 0, 0] sums to 3, expected the model's L = 4 TEBs; change delta or model.encoder-layers",
        ),
        (
            {"delta": [5, 0, 0, 0, 0, 0], "encoder-layers": 5},
            "delta [5, 0, 0, 0, 0, 0] does not fit under gpipe: C7: device 0 needs 1.875e+09 byte, has 1.5e+09; "
            "give these devices fewer TEBs, or use more devices or another schedule",
        ),
    ],
    ids=["sum", "memory"],
)
def test_a_plan_that_does_not_fit_is_told_before_anything_starts(tmp_path, change, message):
    change = dict(change)
    layers = change.pop("encoder-layers", 4)
    plan = {"selected": True, "delta": [2, 2, 0, 0, 0, 0], "m": 4, "schedule": "gpipe"} | change
    plan.setdefault("order", [k for k, size in enumerate(plan["delta"]) if size])
    (tmp_path / "plan.json").write_text(json.dumps({"format": "collapipe-plan/1", "clusters": [plan] * 3}))
    result = call("run", "--set", "plan=plan.json", "--set", f"model.encoder-layers={layers}")
    assert result.exit_code == 2
    assert result.stderr == f"error: {tmp_path / 'plan.json'}: clusters[0]: {message}\n"


@pytest.mark.parametrize(
    ("status", "code"), [("finished", 0), ("failed", 1), ("bad-input", 2), ("infeasible", 3), ("interrupted", 130)]
)
def test_the_exit_code_of_a_run_is_what_the_run_wrote(monkeypatch, status, code):
    def launched(self, order):
        assert (order.app / "flower_app" / "server_app.py").is_file()
        append_round(order.run_dir, {"round": 1, "train_loss": 2.5, "round_s": 1.0, "metrics": {"bleu": 12.0}})
        order.watch()
        return Outcome(status, "" if code == 0 else "it went wrong", {"status": status, "metrics": {"bleu": 12.5}})

    monkeypatch.setattr(SimulationLauncher, "launch", launched)
    result = call("run", "--json", "--set", "name=quick", "--set", "scenario=two-clusters")
    assert result.exit_code == code
    found = json.loads(result.stdout)
    run_dir = Path(found["run_dir"])
    assert found["status"] == status and found["metrics"] == {"bleu": 12.5}
    assert run_dir == Path("runs/latest").resolve() and run_dir.name.endswith("-quick")
    assert "round 1/" in result.stderr and "loss 2.5" in result.stderr
    assert ("it went wrong" in result.stderr) == (code != 0)
    # All clusters run at once under collapipe run, so auto means step.
    config = read_run_config(run_dir)
    assert (config.num_clusters, config.decoder_sync, config.run_dir) == (2, "step", str(run_dir))


def test_an_interrupted_run_exits_130(monkeypatch):
    def launched(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(SimulationLauncher, "launch", launched)
    monkeypatch.setattr(single_run, "assemble_app", lambda folder: folder.mkdir(parents=True) or folder)
    result = call("run")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_a_saved_model_is_scored(untrained):
    result = call("evaluate", untrained, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["run_dir"] == str(untrained)
    assert found["split"] == "test" and found["examples"] == 4
    assert {"bleu", "loss"} <= found["metrics"].keys()
    assert "bleu" in result.stderr
    assert found["truncated"] == 0 and "warning" not in result.stderr
    cut = call("evaluate", untrained, "--set", "data.max-length=2")
    assert cut.exit_code == 0 and "warning: 8 sequences of test were cut at data.max-length = 2" in cut.stderr
    beam = call("evaluate", "latest", "--split", "validation", "--set", "task.decode=beam", "--set", "task.beam-size=2")
    assert beam.exit_code == 0 and beam.stdout == "" and "4 examples of validation" in beam.stderr


@pytest.mark.slow
def test_predict_uses_the_model_of_any_task(untrained, tmp_path):
    found = json.loads(call("predict", untrained, "a dog", "a cat", "--json").stdout)
    assert found["inputs"] == ["a dog", "a cat"] and len(found["predictions"]) == 2
    names = {"masked-lm": "the [MASK] sees a dog", "sequence-classification": "a dog", "token-classification": "a dog"}
    for name, text in names.items():
        run = saved_run(SMALL | {"model.family": "bert", "task.name": name, "runs-dir": str(tmp_path / name)})
        result = call("predict", run, text)
        assert result.exit_code == 0, result.stderr
        assert len(result.stdout.splitlines()) == 1
        assert call("evaluate", run).exit_code == 0


def test_a_run_without_a_model_is_bad_input(tmp_path):
    write_config(create_run_directory("runs", "a"), RunConfig())
    result = call("evaluate")
    assert result.exit_code == 2 and "the run has not saved a model" in result.stderr


def test_a_schedule_is_drawn_as_a_timetable():
    result = call("schedule", "--segments", 2, "--micro-batches", 2, "--schedule", "gpipe")
    assert result.exit_code == 0
    assert result.stdout == "stage 0 | F0 F1 .. .. B0 B1\nstage 1 | .. F0 F1 B0 B1 ..\n"
    result = call("schedule", "--segments", 0)
    assert result.exit_code == 2 and "at least 1" in result.stderr


class Verification:
    output, loss, reference = 1e-7, 2e-7, None

    def __init__(self, worst):
        self.gradients = {"embedding.token.weight": worst}
        self.worst = worst
        self.passed = worst <= 1e-4


@pytest.mark.parametrize(("worst", "code", "word"), [(1e-6, 0, "passed"), (1e-3, 1, "FAILED")])
def test_verification_exits_1_where_the_models_differ(monkeypatch, worst, code, word):
    asked = {}
    monkeypatch.setattr(verify, "verify", lambda **options: asked.update(options) or Verification(worst))
    options = ["--segments", "2,1,1", "--micro-batches", 5, "--schedule", "1f1b", "--batch-size", 8]
    result = call("verify", *options)
    assert result.exit_code == code
    assert "gradient embedding.token.weight" in result.stdout and word in result.stdout
    assert (asked["segments"], asked["micro_batches"], asked["schedule"]) == ((2, 1, 1), 5, "1f1b")
    found = json.loads(call("verify", *options, "--json").stdout)
    assert found["passed"] == (code == 0) and found["gradients"] == {"embedding.token.weight": worst}
