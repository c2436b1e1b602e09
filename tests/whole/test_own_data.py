"""Real text as a new user has it, a CSV with named columns: what ``init`` writes, three commands to a prediction."""

import csv
import sys
from dataclasses import replace

import pytest

from flower_app.config.sources import load_config
from flower_app.first_config.first_config import FirstConfigRequest, make_first_config
from helpers.command_line import collapipe, rounds
from helpers.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import own_data

TEXTS = [("trec6", "question", "test"), ("toutiao", "title", "dev")]
"""Folder and tuned recipe, the column of the texts, the held-out file."""


@pytest.fixture(params=TEXTS, ids=lambda text: text[0])
def tables(request, real_data, tmp_path, monkeypatch):
    """The text as CSV files in a new user's folder; its recipe and its held-out file."""
    name, column, held_out = request.param
    own_data.write_tables(real_data(name), column, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path, name, held_out


def test_init_writes_the_tuned_recipe_of_the_same_text(tables):
    """The measured lengths differ, and some rounds: the rest of a difference is the seed's."""
    _, name, _ = tables
    made = make_first_config(FirstConfigRequest(sources=["train.csv"]), str)
    ours, tuned = load_config(str(made.file)), load_config(name)
    assert tuned.num_rounds <= ours.num_rounds <= 1.2 * tuned.num_rounds
    same_length = replace(ours.model, max_length=tuned.model.max_length)
    assert same_length == tuned.model and abs(ours.model.max_length - tuned.model.max_length) <= 8
    steps = {key: getattr(tuned.optimizer, key) for key in ("warmup_steps", "total_steps")}
    assert ours.optimizer.warmup_steps == pytest.approx(steps["warmup_steps"], rel=0.2)
    assert replace(ours.optimizer, **steps) == tuned.optimizer
    for key in ("scenario", "local_steps", "batch_size", "policy", "strategy", "runtime", "compression", "privacy"):
        assert getattr(ours, key) == getattr(tuned, key), key
    assert (ours.data.lowercase, ours.data.vocab_size) == (tuned.data.lowercase, tuned.data.vocab_size)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tables", TEXTS[:1], indirect=True)
def test_three_commands_lead_from_a_table_of_real_text_to_predictions(tables):
    folder, _, held_out = tables
    for command in (
        ["init", "train.csv"],
        # So few rounds learn next to nothing: benchmarks/own_data.py has the whole run.
        ["run", "--config", "collapipe.toml", "--set", "num-rounds=2", "--set", "optimizer.warmup-steps=1"],
        ["predict", "latest", "--file", f"{held_out}.csv", "--out", "predicted.csv"],
    ):
        done = collapipe(*command, cwd=folder, timeout=1500)
        assert done.returncode == 0, done.stderr[-3000:]
    assert [line["round"] for line in rounds(folder / "runs" / "latest")] == [1, 2]
    with (folder / "predicted.csv").open(encoding="utf-8", newline="") as file:
        predicted = list(csv.DictReader(file))
    with (folder / f"{held_out}.csv").open(encoding="utf-8", newline="") as file:
        given = list(csv.DictReader(file))
    assert [{key: row[key] for key in given[0]} for row in predicted] == given
    assert {row["prediction"] for row in predicted} <= {row["kind"] for row in given}
