"""The command line: exit codes, messages, and what goes to which stream."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client_pipeline.partition.families import build_parts
from flower_app import verify
from flower_app.cli.main import app
from flower_app.config.run_config import RunConfig
from flower_app.config.sources import load_config
from flower_app.launch import single_run
from flower_app.launch.launcher import Outcome
from flower_app.launch.preflight import check_run
from flower_app.launch.simulation import SimulationLauncher
from flower_app.runs.run_directory import append_round, create_run_directory, read_run_config, write_config
from flower_app.saved_model import save_model
from flower_app.tasks.base import task

TINY = [
    "data.num-examples=60",
    "data.evaluation-examples=4",
    "data.vocab-size=300",
    "model.width=8",
    "model.num-heads=2",
    "model.feed-forward=16",
    "model.decoder-layers=1",
    "task.max-new-tokens=5",
]


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_launch(monkeypatch):
    """Refuse to start anything: what is tested must fail before."""

    def launched(*args, **kwargs):
        raise AssertionError("the run was started")

    monkeypatch.setattr(SimulationLauncher, "launch", launched)


@pytest.fixture
def saved_run(tmp_path):
    """A run directory as a run leaves it, with an untrained model."""
    return save_run([*TINY, f"runs-dir={tmp_path / 'runs'}"])


def save_run(sets):
    config = load_config(None, sets)
    run_dir = create_run_directory(config.runs_dir, config.name)
    write_config(run_dir, config)
    chosen = task(config.task)
    prepared = chosen.prepare(config.data, config.model, config.seed, 1)
    weights = build_parts(prepared.spec, 0).weights()
    save_model(run_dir, prepared.spec, weights, prepared.tokenizer_json, chosen.saved(config.data))
    return run_dir


def pairs_folder(folder, lines):
    folder.mkdir()
    for name, number in lines.items():
        (folder / name).write_text("a b c\n" * number)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "optimizer.lrr=1"], "unknown configuration key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        (["--set", "num-rounds"], "--set: expected key=value, found 'num-rounds'"),
        (["--set", "num-rounds=many"], "num-rounds: expected a whole number, found a text: 'many'"),
        (["--config", "nowhere.toml"], "--config: expected a TOML file or one of"),
        (["--set", "scenario=moon"], "scenario: no packaged scenario 'moon'"),
        (["--set", "scenario=moon.toml"], "scenario: no file"),
        (["--set", "num-clusters=9"], "num-clusters: 9 clusters, but scenario default has 3"),
        (["--set", "strategy=FedNone"], "strategy: expected collapipe, "),
        (["--set", "strategy=FedAdam", "--set", 'strategy-options={"et": 1}'], "strategy-options"),
        (["--set", 'strategy-options={"eta": 1}'], "strategy-options: collapipe takes none; leave it empty"),
        (["--set", "policy=best"], "policy: expected one of"),
        (["--set", "plan=nowhere.json"], "plan: no file"),
        (["--config", "multi30k-tiny", "--set", "data.path=nowhere"], "data.train-source: "),
        (
            ["--set", "model.family=bert"],
            "expected model.family to be one of bart, marian, t5, transformer, found 'bert'",
        ),
        (["--set", "model.pretrained=x"], "starts fresh or from another run (model.from), found 'x'"),
        (["--set", "data.source=hub", "--set", "data.hub-id=."], "data.hub-id: expected a dataset id or"),
        (["--set", "data.tokenizer=/nowhere/at/all"], "data.tokenizer: expected a folder, or a hub id"),
        (["--set", "data.num-examples=2"], "data.partition = iid: cluster 2 of 3 gets none of 2 examples"),
        (
            ["--set", "decoder.tls-certificate=a.pem", "--set", "decoder.tls-key=a.key"],
            "a.pem: No such file or directory; give the path of a PEM file",
        ),
    ],
)
def test_bad_input_is_told_before_anything_starts(arguments, message):
    result = call("run", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert not Path("runs").exists()


def test_a_mistake_shows_its_traceback_to_who_asks_for_it(monkeypatch):
    monkeypatch.setenv("COLLAPIPE_TRACEBACK", "1")
    result = call("run", "--set", "seed=-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.endswith("error: seed: expected at least 0, found -1\n")


@pytest.mark.usefixtures("no_launch")
def test_a_port_that_is_in_use_is_told_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        result = call("run", "--set", f"decoder.bind={bind}")
    assert result.exit_code == 2
    assert f"decoder.bind: cannot listen on {bind}: the port is in use" in result.stderr


def test_a_port_that_was_tried_is_free_for_the_run():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bind = f"127.0.0.1:{probe.getsockname()[1]}"
    for _ in range(2):
        assert check_run(load_config(None, [f"decoder.bind={bind}"])) == 3


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        bind = f"127.0.0.1:{probe.getsockname()[1]}"
    assert check_run(load_config(None, [*mine, f"decoder.bind={bind}"])) == 3


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"delta": [3, 0, 0, 0, 0, 0]},
            "delta [3, 0, 0, 0, 0, 0] sums to 3, expected the model's L = 4 TEBs; change delta or model.encoder-layers",
        ),
        ({"m": 0}, "m = 0 micro-batches, expected 1 <= m <= b = 32; change m or batch-size"),
        ({"m": 33}, "m = 33 micro-batches, expected 1 <= m <= b = 32; change m or batch-size"),
        (
            {"delta": [2, 2]},
            "delta has 2 entries, expected one for each of the K = 6 devices (0 for a device without a segment)",
        ),
        (
            {"delta": [1, 1, 1, 1, 0, 0], "order": [0, 1, 2, 3, 3, 1, 0]},
            "order [0, 1, 2, 3, 3, 1, 0] must name each device with delta > 0, [0, 1, 2, 3], once, "
            "as an index from 0 to 5",
        ),
        (
            {"delta": [1, 1, 1, 1, 1, 1, 1]},
            "delta has 7 entries, expected one for each of the K = 6 devices (0 for a device without a segment)",
        ),
        (
            {"delta": [5, 0, 0, 0, 0, 0], "encoder-layers": 5},
            "delta [5, 0, 0, 0, 0, 0] does not fit under gpipe: C7: device 0 needs 1.875e+09 byte, has 1.5e+09; "
            "give these devices fewer TEBs, or use more devices or another schedule",
        ),
    ],
    ids=["sum", "no m", "m over b", "short delta", "order", "S over K", "memory"],
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


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"train.en": 3, "train.de": 2, "test.en": 1, "test.de": 1}, "has 3 lines"),
        ({"train.en": 3, "train.de": 3, "test.en": 1}, "data.test-target"),
        ({"train.en": 0, "train.de": 0, "test.en": 1, "test.de": 1}, "data.train-source"),
    ],
)
def test_data_files_are_checked_before_anything_starts(tmp_path, lines, message):
    pairs_folder(tmp_path / "text", lines)
    names = {"train-source": "train.en", "train-target": "train.de", "test-source": "test.en", "test-target": "test.de"}
    sets = [f"--set=data.{key}={name}" for key, name in names.items()]
    result = call("run", "--set", "data.source=files", "--set", "data.path=text", *sets)
    assert result.exit_code == 2
    assert message in result.stderr


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


def test_a_saved_model_is_scored(saved_run):
    result = call("evaluate", saved_run, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["run_dir"] == str(saved_run)
    assert found["split"] == "test" and found["examples"] == 4
    assert {"bleu", "loss"} <= found["metrics"].keys()
    assert "bleu" in result.stderr
    assert found["truncated"] == 0 and "warning" not in result.stderr
    cut = call("evaluate", saved_run, "--set", "data.max-length=2")
    assert cut.exit_code == 0 and "warning: 8 sequences of test were cut at data.max-length = 2" in cut.stderr
    beam = call("evaluate", "latest", "--split", "validation", "--set", "task.decode=beam", "--set", "task.beam-size=2")
    assert beam.exit_code == 0 and beam.stdout == "" and "4 examples of validation" in beam.stderr


@pytest.mark.slow
def test_predict_uses_the_model_of_any_task(saved_run, tmp_path):
    found = json.loads(call("predict", saved_run, "a dog", "a cat", "--json").stdout)
    assert found["inputs"] == ["a dog", "a cat"] and len(found["predictions"]) == 2
    names = {"masked-lm": "the [MASK] sees a dog", "sequence-classification": "a dog", "token-classification": "a dog"}
    for name, text in names.items():
        run = save_run([*TINY, "model.family=bert", f"task.name={name}", f"runs-dir={tmp_path / name}"])
        result = call("predict", run, text)
        assert result.exit_code == 0, result.stderr
        assert len(result.stdout.splitlines()) == 1
        assert call("evaluate", run).exit_code == 0
    refused = call("translate", run, "a dog")
    assert refused.exit_code == 2
    assert "was trained on token-classification, not translation; use collapipe predict" in refused.stderr


def test_a_saved_model_translates(saved_run):
    result = call("translate", saved_run, "the man sees a dog", "a dog", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["sources"] == ["the man sees a dog", "a dog"] and len(found["translations"]) == 2
    assert len(call("translate", "latest", "a dog").stdout.splitlines()) == 1


@pytest.mark.parametrize("command", [["evaluate", "latest"], ["translate", "latest", "a dog"]])
def test_a_run_that_is_not_there_is_bad_input(command):
    result = call(*command)
    assert result.exit_code == 2
    assert "run 'latest': found no run directory" in result.stderr


def test_a_run_without_a_model_and_an_unknown_split_are_bad_input(tmp_path):
    write_config(create_run_directory("runs", "a"), RunConfig())
    result = call("evaluate")
    assert result.exit_code == 2 and "the run has not saved a model" in result.stderr
    result = call("evaluate", "--split", "train")
    assert result.exit_code == 2 and "--split: expected test or validation, found 'train'" in result.stderr


def test_a_schedule_is_drawn_as_a_timetable():
    result = call("schedule", "--segments", 2, "--micro-batches", 2, "--schedule", "gpipe")
    assert result.exit_code == 0
    assert result.stdout == "stage 0 | F0 F1 .. .. B0 B1\nstage 1 | .. F0 F1 B0 B1 ..\n"
    for wrong, message in ((["--schedule", "2f2b"], "schedule: expected one of"), (["--segments", 0], "at least 1")):
        result = call("schedule", *wrong)
        assert result.exit_code == 2 and message in result.stderr


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


def test_segments_of_a_verification_are_whole_numbers():
    result = call("verify", "--segments", "2,x")
    assert result.exit_code == 2
    assert "--segments: expected whole numbers with commas, such as 2,1,3; found '2,x'" in result.stderr


@pytest.mark.slow
def test_help_does_not_wait_for_heavy_libraries():
    code = (
        "import sys; from flower_app.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'flwr', 'transformers', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "translate" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_the_console_script_passes_exit_codes_on():
    program = Path(sys.executable).parent / "collapipe"
    result = subprocess.run([program, "run", "--set", "seed=-1"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: seed: expected at least 0, found -1\n"


def test_help_shows_the_units_in_brackets():
    """``[s]`` in the help of ``up device`` was read as a command for struck-out text."""
    shown = " ".join(call("up", "device", "--help").output.split())
    assert "How long the control unit may take to come up [s]." in shown
    assert "Shared memory for TEBs on their way [MB]." in shown
