"""From conversations to an answer in three commands: init, run, predict."""

import json

import pytest

from flower_app.runs.run_directory import find_run, read_answers, read_rounds
from helpers.chat_cases import save_chat_model
from helpers.command_line import collapipe

pytestmark = pytest.mark.slow

ROWS = [
    {"instruction": f"{a} or {b}?", "input": "", "output": a}
    for a in ("the dog", "the king", "a cow")
    for b in ("boy", "letter", "house", "tree")
]


def test_alpacas_json_becomes_an_assistant_in_three_commands(tmp_path):
    (tmp_path / "alpaca.json").write_text(json.dumps(ROWS * 5))
    save_chat_model(tmp_path / "model", "chatml", positions=64)
    made = collapipe("init", "alpaca.json", "--pretrained", "model", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    short = ("num-rounds=4", "evaluate-every=2", "task.evaluate-generate=exact-match", "task.max-new-tokens=6")
    packed = ("data.packing=true", "data.max-length=64")
    sets = [part for pair in (*short, *packed) for part in ("--set", pair)]
    trained = collapipe("run", "--config", "collapipe.toml", *sets, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    run = find_run("latest", tmp_path / "runs")
    lines = read_rounds(run)[0]
    assert len(lines) == 4 and {"loss", "perplexity", "exact_match"} <= lines[-1]["metrics"].keys()
    answers = read_answers(run)
    assert len(answers["before"]) == len(answers["after"]) == 6
    assert "Answers</h2>" in (run / "report.html").read_text()
    answered = collapipe("predict", "latest", "the dog or boy?", "--json", cwd=tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert len(json.loads(answered.stdout)["predictions"]) == 1
