"""Figures of the page of language models are those of its rows."""

import json
import math
import statistics

import pytest

from helpers.repository import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "results/language-models/README.md").read_text(encoding="utf-8")
FORMATS = (("perplexity", 1), ("loss", 3))
RECIPE = "r = 2 on all linear layers"
ROWS = [
    json.loads(line)
    for line in (DOCS / "results/language-models/smollm2.jsonl").read_text(encoding="utf-8").splitlines()
]


def chosen(how, part, **settings):
    """Rows of a way to train, with a score on a part of the text."""
    found = [
        row
        for row in ROWS
        if row["how"] == how and part in row and all(row.get(key) == value for key, value in settings.items())
    ]
    assert found
    return found


@pytest.mark.parametrize(
    ("how", "lr", "fused"), [("central", 0.008, None), ("central", 0.011, None), ("two clusters", 0.011, 8)]
)
def test_a_line_of_the_table_has_the_means_and_the_range_of_its_seeds(how, lr, fused):
    settings = {"recipe": RECIPE, "lr": lr, **({"fused_micro_batches": fused} if fused else {})}
    losses = [row["test"]["loss"] for row in chosen(how, "test", **settings)]
    mean = statistics.fmean(losses)
    low, high = (math.exp(value) for value in (min(losses), max(losses)))
    line = f"| {lr * 1e3:g}e-3 | {math.exp(mean):.2f} ({low:.2f} to {high:.2f}) | {mean:.3f} | {len(losses)} |"
    assert len(losses) == 3 and line in PAGE


def test_floor_and_untuned_model_are_those_of_the_rows():
    floors = [row["test"] for row in chosen("Kneser-Ney trigrams", "test")]
    perplexities, losses = ("; ".join(f"{row[key]:.{digits}f}" for row in floors) for key, digits in FORMATS)
    assert f"of all 29,000 | - | {perplexities} | {losses} | - |" in PAGE
    (before,) = chosen("before training", "test")
    assert f"| before | - | {before['test']['perplexity']:.1f} | {before['test']['loss']:.3f} | - |" in PAGE


@pytest.mark.parametrize("how", ["central", "two clusters"])
def test_the_rates_of_the_table_are_the_best_on_the_validation_text(how):
    rows = sorted(chosen(how, "validation", recipe=RECIPE, seed=0), key=lambda row: row["lr"])
    assert ", ".join(f"{row['validation']['perplexity']:.1f}" for row in rows) in PAGE
    best = min(rows, key=lambda row: row["validation"]["loss"])
    assert best["lr"] == {"central": 0.008, "two clusters": 0.011}[how]
    assert rows[0]["lr"] <= best["lr"] < rows[-1]["lr"]


def test_the_exported_model_has_the_loss_of_the_run():
    (row,) = chosen("exported, in plain transformers", "test")
    assert row["test"]["loss"] == pytest.approx(row["collapipe_evaluate"]["loss"], rel=1e-5)
    for loss in (row["test"]["loss"], row["collapipe_evaluate"]["loss"]):
        assert f"{loss:.6f}" in PAGE
