"""Progress as people read it."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from flower_app.launch.progress import RunProgress
from flower_app.launch.terminal_view import loss_curve
from flower_app.runs.phases import LOADING, NODES, SETTING_UP, TESTING, TRAINING, begin_phase
from flower_app.runs.run_directory import append_round, read_waiting, write_waiting


def round_line(number, **entries):
    return {"round": number, "train_loss": 3.14159, "round_s": 2.0, "metrics": {}, "failed": [], **entries}


@pytest.fixture
def progress(tmp_path):
    return RunProgress(tmp_path, 100, Console(file=io.StringIO(), width=100))


def printed(progress):
    return progress.console.file.getvalue()


def test_a_round_whose_updates_became_no_weights_is_said(progress, tmp_path):
    append_round(tmp_path, round_line(1, updated=False))
    append_round(tmp_path, round_line(2, updated=True))
    progress.update()
    assert [line for line in printed(progress).splitlines() if "no update counted" in line] == [
        "round 1: no update counted; the model stays as it was"
    ]


def test_a_round_shows_loss_metric_and_time_left(progress, tmp_path):
    with progress:
        append_round(tmp_path, round_line(1, round_s=60.0))
        progress.update()
        assert progress.seconds_left() == 0.0
        append_round(tmp_path, round_line(2, metrics={"loss": 2.0, "bleu": 41.25}))
        progress.update()
    assert printed(progress).splitlines() == [
        "starting",
        "round 1/100  loss 3.142",
        "round 2/100  loss 3.142  bleu 41.25  3:16 left",
    ]


def test_failed_clusters_and_a_loss_that_is_no_number_are_shown(progress, tmp_path):
    append_round(tmp_path, round_line(1, train_loss=float("nan"), failed=[{"cluster": 1, "reason": "gone"}]))
    progress.update()
    said = ["round 1: cluster 1 failed: gone", "round 1/100  loss -  1 cluster failed"]
    assert printed(progress).splitlines() == said


def test_a_line_has_a_score_only_where_it_is_new(progress, tmp_path):
    for number in range(1, 71):
        append_round(tmp_path, round_line(number, metrics={"bleu": 40.0 + number} if number % 14 == 0 else {}))
        # As if a round took more than a second: each has a line.
        progress._spoke = 0.0
        progress.update()
    lines = printed(progress).splitlines()
    scored = [line.split()[1:6] for line in lines if "bleu" in line]
    assert len(lines) == 70
    assert scored == [[f"{n}/100", "loss", "3.142", "bleu", str(40 + n)] for n in (14, 28, 42, 56, 70)]


def test_a_run_that_goes_on_tells_nothing_of_the_rounds_before(tmp_path):
    fault = {"round": 2, "cluster": 0, "device": 1, "kind": "device", "recovered": True, "seconds": 0.3}
    append_round(tmp_path, round_line(1, metrics={"bleu": 10.0}))
    append_round(tmp_path, round_line(2, metrics={"bleu": 20.0}, faults=[fault]))
    progress = RunProgress(tmp_path, 3, Console(file=io.StringIO(), width=100))
    progress.update()
    append_round(tmp_path, round_line(3, metrics={"bleu": 30.0}))
    progress.update()
    assert printed(progress).splitlines() == ["round 3/3  loss 3.142  bleu 30"]


def test_rounds_that_are_taken_back_are_told_when_they_are_trained_again(tmp_path):
    for number in (1, 2, 3):
        append_round(tmp_path, round_line(number))
    progress = RunProgress(tmp_path, 4, Console(file=io.StringIO(), width=100))
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rounds.jsonl").write_text(lines[0])
    append_round(tmp_path, round_line(2, train_loss=1.0, metrics={"bleu": 1.0}))
    progress.update()
    assert printed(progress).splitlines() == ["round 2/4  loss 1  bleu 1  0:04 left"]


def test_the_start_up_is_told_phase_by_phase_with_its_times(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.time", lambda: clock.now)
    # What an earlier process did is no start-up of this one.
    begin_phase(tmp_path, "of an earlier process")
    progress = RunProgress(tmp_path, 2, Console(file=io.StringIO(), width=100))
    with progress:
        for after_s, phase in ((12.0, LOADING), (3.0, NODES), (0.01, SETTING_UP), (8.5, TRAINING)):
            clock.now += after_s
            begin_phase(tmp_path, phase)
            progress.update()
        append_round(tmp_path, round_line(1))
        clock.now += 60.0
        begin_phase(tmp_path, TESTING)
        progress.update()
    progress.report({"metrics": {"bleu": 1.0}, "wall_s": 70.0, "scored_round": 1})
    assert printed(progress).splitlines() == [
        "starting",
        "start-up: Flower's programs 12.0 s",
        "start-up: data, tokenizer and model 3.0 s",
        "start-up: clusters to load their data 8.5 s",
        "round 1/2  loss 3.142",
        "test: bleu 1 (model of round 1)  (1:10)",
        "time: 1:24 in all: 0:24 until round 1, 1:00 since",
        f"run: {tmp_path}",
    ]


def test_faults_recoveries_and_waits_are_told_as_they_happen(progress, tmp_path, monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.time", lambda: clock.now)
    for seconds in (0.0, 20.0, 15.0):
        clock.now += seconds
        write_waiting(tmp_path, {1: "its control unit starts again"})
        progress.update()
    write_waiting(tmp_path, {})
    lost = {"round": 3, "cluster": 1, "device": 4, "kind": "device", "recovered": True, "seconds": 0.31}
    gone = {"round": 3, "cluster": 2, "device": None, "kind": "cluster", "recovered": False, "reason": "it left"}
    append_round(tmp_path, round_line(3, faults=[lost, gone]))
    progress.update()
    assert printed(progress).splitlines() == [
        "waiting for cluster 1: its control unit starts again",
        "still waiting for cluster 1, for 35 s: its control unit starts again",
        "round 3: cluster 1, device 4: lost its process; recovered in 0.3 s",
        "round 3: cluster 2: lost its control unit; not recovered: it left",
        "round 3/100  loss 3.142",
        "no longer waiting for cluster 1, after 35 s",
    ]


def test_a_callback_gets_every_line_and_nothing_is_shown(tmp_path, capsys):
    lines = []
    with RunProgress(tmp_path, 2, quiet=True, on_round=lines.append) as progress:
        append_round(tmp_path, round_line(1))
        append_round(tmp_path, round_line(2))
        progress.update()
        progress.update()
    assert [line["round"] for line in lines] == [1, 2]
    assert capsys.readouterr().err == ""


def test_who_is_waited_for_is_told_with_the_reason_and_at_the_end_how_long(progress, tmp_path, monkeypatch):
    write_waiting(tmp_path, {1: "its stream to the decoder broke off", 2: "its answer has not come"})
    began = read_waiting(tmp_path)["1"].since
    progress.update()
    progress.update()
    write_waiting(tmp_path, {1: "its stream broke off and did not come back within 18 s"})
    progress.update()
    # The clock of the terminal, not of the file.
    monkeypatch.setattr("time.time", lambda: began + 23.0)
    write_waiting(tmp_path, {})
    progress.update()
    assert printed(progress).splitlines() == [
        "waiting for cluster 1: its stream to the decoder broke off",
        "waiting for cluster 2: its answer has not come",
        "waiting for cluster 1: its stream broke off and did not come back within 18 s",
        "no longer waiting for cluster 1, after 23 s",
    ]


def test_the_report_shows_the_way_of_the_metrics_the_result_and_where_it_lies(progress, tmp_path):
    for number in range(1, 31):
        append_round(tmp_path, round_line(number, metrics={"bleu": float(number)}))
    progress.update()
    progress.report({"metrics": {"bleu": 61.5}, "wall_s": 3725.0})
    lines = printed(progress).splitlines()
    assert "test: bleu 61.5  (1:02:05)" in lines
    assert lines[-1] == f"run: {tmp_path}"
    table = [line.split() for line in lines if line and line[0].isdigit()]
    assert len(table) <= 8 and table[-1] == ["30", "3.142", "30"]


def test_the_table_of_scores_tells_the_loss_of_training_from_that_of_validation(progress, tmp_path):
    append_round(tmp_path, round_line(1, metrics={"loss": 2.5, "bleu": 7.0}))
    progress.update()
    progress.report({})
    title, scores = printed(progress).splitlines()[-4:-2]
    assert [word.strip() for word in title.split("  ") if word] == ["round", "train loss", "validation loss", "bleu"]
    assert scores.split() == ["1", "3.142", "2.5", "7"]


def drawn(progress):
    """The lines that stay, as they are on a terminal at this moment."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    console.print(progress._view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def view_of(folder, *lines):
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with RunProgress(folder, 20, console) as progress:
        for line in lines:
            append_round(folder, line)
        progress.update()
        progress._bar.refresh()
        return drawn(progress), console.file.getvalue()


def test_a_terminal_shows_loss_metric_rate_time_left_clusters_and_faults(tmp_path):
    virtual = {"clusters": [{"cluster": n} for n in range(4)]}
    fault = {"round": 3, "cluster": 0, "device": 1, "kind": "device", "recovered": True, "seconds": 0.3}
    lines, output = view_of(
        tmp_path,
        round_line(1, train_loss=4.0, weight=100),
        round_line(2, train_loss=3.0, weight=100, metrics={"bleu": 41.25}),
        round_line(
            3,
            train_loss=2.0,
            weight=300,
            virtual=virtual,
            clusters=[{"cluster": 0}, {"cluster": 3}],
            failed=[{"cluster": 1, "reason": "gone"}],
            faults=[fault],
        ),
    )
    assert lines[0].startswith("round 3/20 ") and lines[0].endswith("gone, 0:34 left")
    assert lines[1:] == [
        "loss 2  bleu 41.25 (round 2)  1 cluster failed █▅▁",
        "2 s a round, 100 targets/s",
        "clusters: 0, 3 train · 2 wait · 1 failed",
        "faults: 1; newest: round 3: cluster 0, device 1: lost its process; recovered in 0.3 s",
    ]
    # What is said once stays above the lines.
    assert output.count("lost its process") >= 2


@pytest.mark.parametrize(
    ("losses", "blocks"),
    [([], ""), ([1.0], ""), ([1.0, None, float("nan"), 1.0], "▁▁"), ([8.0, 1.0], "█▁"), (range(8), "▁▂▃▄▅▆▇█")],
)
def test_the_curve_of_the_losses(losses, blocks):
    assert loss_curve(list(losses)) == blocks


RUN = """
import sys
from pathlib import Path
from flower_app.config.run_config import RunConfig
from flower_app.console import print_json, say
from flower_app.launch.launcher import Outcome
from flower_app.runs.run_directory import append_round, write_summary
from flower_app.launch.single_run import NewRun, launch_run

class Launcher:
    def launch(self, order):
        sys.stdin.readline()
        for number in range(1, 4):
            append_round(order.run_dir, {"round": number, "train_loss": 1.0, "metrics": {"bleu": 1.0}})
            order.watch()
        write_summary(order.run_dir, "finished", rounds=3)
        return Outcome("finished", "", {})

run_dir = Path(sys.argv[1])
(run_dir / "logs").mkdir(parents=True)
outcome = launch_run(NewRun(run_dir, RunConfig(num_clusters=3)), say, Launcher())
say("the end")
print_json({"status": outcome.status})
(run_dir / "ended").touch()
"""


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_no_run(tmp_path):
    """``collapipe run | head`` killed the run at its first unread line, without a summary."""
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout.readline().startswith("run: ")
        run.stdout.close()
        run.stdin.write("\n")
        run.stdin.close()
        run.wait(timeout=300)
    assert (tmp_path / "run" / "ended").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert run.returncode == 0
