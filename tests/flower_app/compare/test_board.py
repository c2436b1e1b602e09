"""``collapipe board``: what its file may say, which runs it asks for, and what it makes of them."""

import csv
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app
from flower_app.compare import trained
from flower_app.compare.board import (
    COSTS,
    Board,
    BoardTask,
    board_cells,
    board_scores,
    check_board,
    config_of,
    read_board,
    run_board,
    run_figures,
)
from flower_app.compare.board_page import write_page
from flower_app.runs.run_directory import FINISHED, append_round, write_summary
from helpers.fake_series import FakeLauncher, fake_round
from helpers.repository import ROOT

BOARD = """
seeds = 3
[methods.ours]
[methods.fedavg]
strategy = "FedAvg"
[methods.fedlora]
strategy = "fedlora"
"lora.rank" = 2
[tasks.topics]
config = "topics.toml"
metric = "bleu"
target = 0.5
budget = { bytes = 400, seconds = 40, joules = 100 }
set = { num-rounds = 4 }
[tasks.topics.methods.fedlora]
lora.rank = 3
[tasks.words]
metric = "loss"
set = { num-rounds = 4, scenario = "table2", evaluate-every = 2, model.trainable = "lora" }
[conditions.lost]
faults.device = 0.1
"""
TOPICS = """
scenario = "table2"
evaluate-every = 1
[model]
trainable = "lora"
[data]
path = "texts"
"""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(trained, "write_pictures", lambda run_dir: None)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "topics.toml").write_text(TOPICS)
    path = tmp_path / "board.toml"
    path.write_text(BOARD)
    return path


def scored_run(run_dir, config, resume):
    """A run that learns in four rounds: FedAvg is best, FedLoRA at its rate of 0.002 level with the first method."""
    gain = {"collapipe": 0.0, "FedAvg": 0.1, "fedlora": 0.001 * (-1) ** config.seed}[config.strategy]
    gain -= abs(config.optimizer.lr - 0.002) * 100 if config.strategy == "fedlora" else 0.0
    gain += config.seed / 100 - config.faults.device
    for number in range(1, 5):
        line = fake_round(number, 1)
        line["clusters"][0]["stream_bytes"] = {"up": 30, "down": 20}
        line["metrics"] = {"loss": 2 - gain - number / 8, "bleu": number / 8 + gain}
        append_round(run_dir, line | {"setup_bytes": 7} if number == 1 else line)
    scores = {"loss": 1.5 - gain, "bleu": 0.5 + gain}
    write_summary(run_dir, FINISHED, rounds=4, wall_s=1.0, metrics=scores)


def test_a_file_is_read_in_layers(file):
    board = read_board(file)
    assert list(board.methods) == ["ours", "fedavg", "fedlora"] and board.reference == "ours"
    assert board.tasks["topics"].budget == {"bytes": 400, "seconds": 40, "joules": 100}
    assert board.tasks["words"].target is None and board.seeds == 3


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "boards").glob("*.toml")), ids=lambda path: path.stem)
def test_packaged_boards_are_of_configurations_that_run(path, tmp_path):
    check_board(read_board(path), path.parent, [f"data.path={tmp_path}", f"model.pretrained={tmp_path}"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 3", "seed = 3", "board.toml: seed: expected one of .*; did you mean 'seeds'"),
        ("seeds = 3", "seeds = 0", "seeds: expected a whole number from 1 to 100, found 0"),
        ("seeds = 3", 'reference = "mine"', "reference: expected one of ours, fedavg, fedlora, found 'mine'"),
        ("[methods.fedavg]", '[methods."../a"]', "'../a': expected a name of letters, digits"),
        ('metric = "loss"', "", "tasks.words.metric: missing"),
        ("target = 0.5", 'target = "high"', "tasks.topics: target: expected a number, found 'high'"),
        ("bytes = 400", "megabytes = 4", "tasks.topics.budget.megabytes: expected one of bytes"),
        ("topics.methods.fedlora", "topics.methods.fedlore", "fedlore: no such method; did you mean 'fedlora'"),
        ("set = { num-rounds = 4 }", "set = 4", "tasks.topics.set: expected a table, found 4"),
        ("[conditions.lost]", "[tune]\noptimizer.lr = 1\n[conditions.lost]", "tune: expected lists of values"),
        (
            "[conditions.lost]",
            "[tune]\nfaults.device = [0.1]\n[conditions.lost]",
            "conditions.lost: faults.device is",
        ),
        ("seeds = 3", 'reference = ["ours"]', "reference: expected one of ours"),
        (BOARD, "[tasks.a]", r"expected tables \[methods.NAME\] of two methods or more"),
        ("seeds = 3", "seeds", "board.toml: .*Expected"),
    ],
)
def test_mistakes_in_a_file_are_named(file, old, new, message):
    file.write_text(BOARD.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_board(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("evaluate-every = 2,", 'evaluate-every = 2, strategi = "x",', "words, ours: .*strategi"),
        ("set = { num-rounds = 4 }", "set = { evaluate-every = 0 }", "topics: budget and target are looked up in"),
        ("[conditions.lost]", "[tune]\noptimizer.lr = [-1.0]\n[conditions.lost]", "topics, ours: optimizer.lr"),
        ('metric = "loss"', 'metric = "accuracy"', "tasks.words.metric: expected one of loss, .*, found 'accuracy'"),
        ("topics.toml", "topic.toml", "--config: expected a TOML file or one of"),
        ("faults.device = 0.1", "faults.device = 7", "topics, ours: faults.device"),
    ],
)
def test_mistakes_in_runs_are_named_before_the_first_one_starts(file, tmp_path, old, new, message):
    file.write_text(BOARD.replace(old, new, 1))
    result = CliRunner().invoke(app, ["board", str(file), "--out", str(tmp_path / "out")])
    assert result.exit_code != 0 and not (tmp_path / "out").exists()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_board(read_board(file), tmp_path, tmp_path / "out", print)


def test_a_runs_figures_count_streams_and_set_up(tmp_path):
    from flower_app.config.run_config import RunConfig

    scored_run(tmp_path, RunConfig(), False)
    figures = run_figures(tmp_path, BoardTask(None, "bleu", budget={"bytes": 410, "seconds": 45}, target=0.3))
    assert figures["bytes"] == 4 * (150 + 50) + 7 and figures["seconds"] == 80 and figures["joules"] == 16
    assert figures["memory_bytes"] == 7 and figures["test"] == 0.5
    # Two rounds take 407 bytes and 40 s.
    assert figures["within"] == {"bytes": 0.25, "seconds": 0.25}
    assert figures["until"] == {"round": 3, "bytes": 607, "seconds": 60, "joules": 12}
    assert figures["curve"][0] == [1, 0.125, 207, 20, 4]
    none = run_figures(tmp_path, BoardTask(None, "loss", budget={"bytes": 10}, target=0.1))
    assert none["within"] == {"bytes": None} and none["until"] is None
    assert run_figures(tmp_path, BoardTask(None, "loss", target=1.7))["until"]["round"] == 3


def test_a_model_that_diverged_has_no_score(tmp_path):
    line = fake_round(2, 1)
    append_round(tmp_path, line | {"metrics": {"loss": float("nan"), "bleu": 3.0}})
    write_summary(tmp_path, FINISHED, rounds=1, wall_s=1.0, metrics={"loss": float("nan"), "bleu": float("inf")})
    for metric, curve in (("loss", 0), ("bleu", 1)):
        figures = run_figures(tmp_path, BoardTask(None, metric, target=1.0))
        assert figures["test"] is None and len(figures["curve"]) == curve
        json.dumps(figures, allow_nan=False)


def test_texts_of_a_board_lie_in_its_folder_wherever_it_is_started(file, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    board = read_board(file)
    own = replace(
        board.tasks["words"], set={"data.source": "files", "data.train-source": "t.txt", "data.test-source": "t.txt"}
    )
    config = config_of(replace(board, tasks={"own": own}), "own", "ours", {}, tmp_path, [])
    assert config.data.path == str(tmp_path)


def test_a_key_that_is_tuned_is_not_set(file, tmp_path):
    file.write_text(BOARD + "[tune]\noptimizer.lr = [0.1]\n")
    with pytest.raises(ValueError, match="--set: optimizer.lr is chosen by"):
        check_board(read_board(file), tmp_path, ["optimizer.lr=0.2"])
    with pytest.raises(ValueError, match=r"--set: faults.device is chosen by \[conditions.lost\]"):
        check_board(read_board(file), tmp_path, ["faults.device=0.2"])


def test_seeds_that_diverged_make_no_verdict():
    board = Board({"t": BoardTask(None, "bleu")}, {"a": {}, "b": {"strategy": "FedAvg"}}, "a")
    places = [(m, seed) for m in "ab" for seed in range(3)]
    row = {"task": "t", "condition": "", "memory_bytes": 1, "until": None, "within": {}, **dict.fromkeys(COSTS, 1)}
    tests = {("a", 0): 0.5, ("a", 1): 0.51, ("a", 2): 0.52, ("b", 0): 0.6, ("b", 1): 0.61, ("b", 2): None}
    _, score = board_scores(board, [row | {"method": m, "seed": seed, "test": tests[m, seed]} for m, seed in places])
    assert score["better"] == 0 and score["test"] is None and score["against_reference"]["num_pairs"] == 2
    document = {"scores": [score], "seeds": 3}
    assert "of the 2 seeds that both have" in board_cells(document)[1][0][4]


@pytest.mark.slow
def test_one_seed_tells_no_interval(file, tmp_path):
    file.write_text(BOARD.replace("seeds = 3", "seeds = 1"))
    document = run_board(read_board(file), tmp_path, tmp_path / "out", print, launcher=FakeLauncher(scored_run))
    json.dumps(document, allow_nan=False)
    assert document["said"][0] == (
        "topics: ours cannot be told from fedavg (+0.1 with one seed), fedlora (-0.299 with one seed) in bleu."
    )


@pytest.mark.slow
def test_a_board_is_trained_scored_and_taken_as_it_is(file, tmp_path):
    file.write_text(BOARD.replace("[conditions.lost]", "[tune]\noptimizer.lr = [0.001, 0.002]\n[conditions.lost]"))
    out, board = tmp_path / "out", read_board(file)
    document = run_board(board, tmp_path, out, print, launcher=FakeLauncher(scored_run))
    assert document == json.loads((out / "board.json").read_text())
    assert len(document["rows"]) == 2 * 3 * 2 * 3 == len((out / "rows.jsonl").read_text().splitlines())
    assert all(row["chosen"] == {"optimizer.lr": 0.002} for row in document["rows"] if row["method"] == "fedlora")
    scores = {(s["task"], s["method"]): s for s in document["scores"]}
    ours, fedavg, fedlora = (scores["topics", name] for name in ("ours", "fedavg", "fedlora"))
    assert ours["test"] == pytest.approx(0.51) and ours["deviation"] == pytest.approx(0.01)
    assert ours["under"] == {"lost": pytest.approx(0.41)} and ours["against_reference"] is None
    assert (fedavg["better"], fedlora["better"], scores["words", "fedavg"]["better"]) == (1, 0, 1)
    assert fedavg["against_reference"]["mean"] == pytest.approx(0.1)
    assert scores["words", "fedavg"]["against_reference"]["mean"] == pytest.approx(-0.1)
    assert all("3 of 3" in row for row in board_cells(document)[1][:3])
    assert ours["reached"] == 3 and ours["until"]["seconds"] == pytest.approx(80)
    assert fedlora["waives"] == ["C7", "C9"] and ours["waives"] == []
    assert document["said"][0].startswith("topics: ours is behind fedavg (+0.1, ")
    assert document["said"][2].startswith("topics: ours cannot be told from fedlora (")
    assert document["said"][-1] == (
        "words, fedlora: optimizer.lr = 0.002 is the highest that was tried; the best may lie beyond."
    )
    titles, rows = board_cells(document)
    assert all(len(row) == len(titles) for row in rows) and len(rows) == 6
    with (out / "rows.csv").open(newline="") as table:
        lines = list(csv.DictReader(table))
    assert lines[0]["within.bytes"] == "0.125" and lines[0]["method"] == "ours" and "curve" not in lines[0]
    page = write_page(document, out).read_text()
    assert page.count("data:image/svg+xml") == 2 and "ours is behind fedavg" in page
    # What has finished is taken as it is; a board goes on with another method.
    more = file.read_text() + '[methods.again]\nstrategy = "FedAvg"\n'
    file.write_text(more)
    trained_again = []

    def noted(run_dir, config, resume):
        trained_again.append(run_dir.name)
        scored_run(run_dir, config, resume)

    run_board(read_board(file), tmp_path, out, print, launcher=FakeLauncher(noted))
    assert trained_again and all("optimizer" in name or name.startswith("again") for name in trained_again)
