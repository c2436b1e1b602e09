"""``collapipe reproduce``: curves in, rows, pictures and findings out."""

import csv
import json
import statistics
from dataclasses import replace
from functools import cache
from shutil import copytree

import pytest
from typer.testing import CliRunner

from experiments import fig11
from experiments.base.experiment import PaperFinding
from experiments.base.results import COMPACT, FINDINGS, TABLE, read_rows
from experiments.curves import load_curves
from experiments.fig11 import jain
from experiments.reproduce import EXPERIMENTS, ReproduceOptions, app, reproduce
from helpers.repository import ROOT

PLANNING = [name for name, experiment in EXPERIMENTS.items() if not experiment.trains]
CURVE = """
label = "mine"
seeds = 2
[run]
scenario = "table2"
policy = "dssda"
num-rounds = 3
[smoke]
seeds = 1
run.num-rounds = 2
"""


DOCS = ROOT / "docs"


def quiet(_):
    pass


def cell(text):
    """A value of a CSV file as it was before it became text."""
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Give the folder of an experiment's smoke run, which nobody changes, and its findings."""

    @cache
    def made_once(name):
        out = tmp_path_factory.mktemp(name)
        return out / name, reproduce(name, ReproduceOptions(out=out, smoke=True), quiet)[name]

    return made_once


PUBLISHED = [name for name in EXPERIMENTS if (DOCS / "results" / name).is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_number_is_told_by_its_file(name):
    folder = DOCS / "results" / name
    found = [PaperFinding(**finding) for finding in json.loads((folder / FINDINGS).read_text(encoding="utf-8"))]
    assert found
    # The others' rows are too many; what stands for them is told from the rows themselves.
    assert (folder / TABLE).is_file() != (folder / COMPACT).is_file()
    if (folder / TABLE).is_file():
        assert EXPERIMENTS[name].findings(kept_rows(name, TABLE)) == found


def kept_rows(name, table=COMPACT):
    """Return the rows of a figure that are kept; of one with too many, means of each curve and network."""
    with (DOCS / "results" / name / table).open(encoding="utf-8") as file:
        return [{column: cell(text) for column, text in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("name", ["fig7", "fig8", "fig11"])
def test_published_numbers_are_told_again_from_the_means_that_are_kept(name):
    curves = {curve.name: curve for curve in load_curves(name, smoke=False)}
    rows = kept_rows(name)
    for row in rows:
        config = curves[row["curve"]].config
        what = config.policy if config.strategy == "collapipe" else config.strategy
        row |= {"label": curves[row["curve"]].label, "policy": config.policy, "what": what}
        # Where no quarters are kept, a mean stands for its network's settled rounds, as their last one.
        row.setdefault("round", 4)
    published = json.loads((DOCS / "results" / name / FINDINGS).read_text(encoding="utf-8"))
    assert EXPERIMENTS[name].findings(rows) == [PaperFinding(**finding) for finding in published]


def test_published_segments_are_told_again_from_the_counts_that_are_kept():
    first, *others = (curve.name for curve in load_curves("fig5", smoke=False))
    rows, told = kept_rows("fig5"), []

    def weighted(curve, column, **where):
        chosen = [r for r in rows if r["curve"] == curve and all(r[key] == value for key, value in where.items())]
        plans = sum(r["plans"] for r in chosen)
        return sum(r["plans"] * r[column] for r in chosen) / plans if plans else 0.0, plans

    _, plans = weighted(first, "m")
    for size in (3, 4, 5):
        m, times = weighted(first, "m", segments=size)
        told.append(f"{m:.1f} ({100 * times / plans:.0f} % of the plans)")
    for other in others:
        (ours, _), (theirs, other_plans) = weighted(first, "event_s"), weighted(other, "event_s")
        slower = sum(r["slower_than_first"] for r in rows if r["curve"] == other)
        told.append(f"{100 * (theirs - ours) / ours:+.1f} %; slower in {100 * slower / other_plans:.0f} % of the plans")
    published = json.loads((DOCS / "results/fig5" / FINDINGS).read_text(encoding="utf-8"))
    assert [finding["ours"] for finding in published] == told


def test_what_the_text_says_of_spreads_is_told_by_the_rows():
    text = " ".join((DOCS / "results/real-text/README.md").read_text(encoding="utf-8").split())
    lines = (DOCS / "results/real-text/runs.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in lines]

    def spread(config, how, key):
        values = [run[key] for run in runs if (run["config"], run["how"]) == (config, how)]
        return statistics.mean(values), statistics.stdev(values), len(values)

    (federated, width, _), (central, other, _) = (spread("trec6", how, "macro_f1") for how in ("federated", "central"))
    assert f"macro-F1 is {federated:.2f} ± {width:.2f} federated and {central:.2f} ± {other:.2f} central" in text
    (federated, width, _), (central, other, _) = (
        spread("chinese-ner-pretrain", how, "perplexity") for how in ("federated", "central")
    )
    assert f"perplexity after pre-training: {federated:.0f} ± {width:.0f} and {central:.0f} ± {other:.0f}" in text

    # Differences have a standard error, and their column says so.
    assert "| difference, standard error |" in text
    for config, key, scale in (
        ("trec6", "accuracy", 100),
        ("toutiao", "accuracy", 100),
        ("chinese-ner", "f1", 100),
        ("multi30k", "bleu", 1),
    ):
        (federated, width, n), (central, other, _) = (spread(config, how, key) for how in ("federated", "central"))
        error = (width**2 / n + other**2 / n) ** 0.5
        row = next(line for line in text.split("| `") if line.startswith(f"{config}`"))
        assert f"{scale * (federated - central):+.1f} ± {scale * error:.1f}" in row, config

    floors = [json.loads(line) for line in (DOCS / "results/real-text/floors.jsonl").read_text("utf-8").splitlines()]
    for floor, config in zip(floors, ("trec6", "toutiao", "chinese-ner"), strict=True):
        row = next(line for line in text.split("| `") if line.startswith(f"{config}`"))
        assert f"| {floor['score']:.3f} |" in row, config

    for trained, name in (("full", "whole"), ("lora", "adapters, r = 16 on all linear layers")):
        row = text[text.index(f"| {name} |") :][:200]
        for how in ("federated", "central"):
            keys = ("trec6-minilm", trained, how)
            shares = [run["accuracy"] for run in runs if (run["config"], run.get("trainable"), run["how"]) == keys]
            several = f"{statistics.mean(shares):.3f} ({min(shares):.3f} to {max(shares):.3f}; {len(shares)} seeds)"
            # One seed is no row.
            assert (several if len(shares) > 1 else "not repeated") in row, keys

    with (DOCS / "results/fig11/compact-400-rounds.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    largest = {}
    for row in rows:
        largest.setdefault(float(row["v"]), []).append(max(float(row[f"gamma_{i}"]) for i in range(1, 9)))
    told = {v: f"{statistics.mean(x):.2f} ± {statistics.stdev(x):.2f}" for v, x in largest.items()}
    page = (DOCS / "results/fig11/README.md").read_text(encoding="utf-8")
    assert f"it is {told[0.1]} with V = 0.1, {told[1.0]} with V = 1 and {told[10.0]} with V = 10." in page


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNING)
def test_an_experiment_leaves_rows_picture_and_findings(name, smoke, tmp_path):
    left, findings = smoke(name)
    folder = copytree(left, tmp_path / name)
    assert [vars(f) for f in findings] == json.loads((folder / "findings.json").read_text())
    assert (folder / "figure.png").stat().st_size > 10_000
    rows = read_rows(folder)
    assert len((folder / "results.csv").read_text().splitlines()) == len(rows) + 1
    # Drawing needs the rows alone, and finds the same.
    (folder / "figure.png").unlink()
    assert reproduce(name, ReproduceOptions(out=tmp_path, plot_only=True), quiet)[name] == findings
    assert (folder / "figure.png").is_file()


@pytest.mark.slow
def test_a_curve_made_again_alone_leaves_rows_and_findings_as_they_are(tmp_path):
    """Once the first curve went last when it was made again, and another took its place in the findings."""
    options = ReproduceOptions(out=tmp_path, smoke=True, sets=["num-rounds=4"])
    found, rows = reproduce("fig7", options, quiet), read_rows(tmp_path / "fig7")
    table = (tmp_path / "fig7" / "results.csv").read_text()
    for again in (replace(options, only="1-collapipe"), replace(options, plot_only=True)):
        assert reproduce("fig7", again, quiet) == found
        assert read_rows(tmp_path / "fig7") == rows
        assert (tmp_path / "fig7" / "results.csv").read_text() == table


def test_fig11_holds_every_cluster_to_the_threshold():
    """Once the mean over the clusters was: it hides a cluster that is never selected."""
    row = {"label": "greedy", "policy": "delay-only", "v": 1.0, "seed": 0, "latency_event_s": 10.0, "queue": 1.0}
    row |= {"gamma": 3.3, "gamma_max": 3.4, "longest_queue": 2.0, "energy_j": 1.0}
    rows = [
        row | {"curve": "a", "round": t, "gamma_1": 3.9, "gamma_2": 2.7, "selected_1": 0, "selected_2": 1}
        for t in (1, 2, 3, 4)
    ]
    rows += [row | {"curve": "b", "label": "DSSDA", "policy": "dssda", "latency_event_s": 8.0} for row in rows]
    rows = [row | ({} if row["curve"] == "a" else {"gamma_1": 3.3, "gamma_2": 3.3, "selected_1": 1}) for row in rows]
    against, quarters, greedy, dssda, _ = fig11.findings(rows)
    assert quarters.ours == "V = 1: -20.0, -20.0, -20.0, -20.0 %"
    assert (against.paper, against.ours) == ("-15.48 %", "V = 1: -20.0 ± 0.0 %")
    assert greedy.ours.startswith("10.0 ± 0.0 s; Γ of the cluster that has most 3.90 ± 0.00, of all 3.30")
    assert "fairness 0.50" in greedy.ours and "fairness 1.00" in dssda.ours
    assert (greedy.why, dssda.why) == tuple(
        f"every cluster keeps the threshold 3.4 in {k} of 1 networks" for k in (0, 1)
    )


@pytest.mark.slow
def test_a_reader_can_change_a_curve(tmp_path):
    (tmp_path / "curves" / "drift").mkdir(parents=True)
    (tmp_path / "curves" / "drift" / "mine.toml").write_text(CURVE)
    options = ReproduceOptions(out=tmp_path, smoke=False, curves=tmp_path / "curves", sets=["planner.v=0.5"])
    reproduce("drift", options, quiet)
    rows = read_rows(tmp_path / "drift")
    assert [(row["seed"], row["round"]) for row in rows] == [(i, t) for i in (0, 1) for t in (1, 2, 3)]
    assert {row["label"] for row in rows} == {"mine"}
    [curve] = load_curves("drift", smoke=True, folder=tmp_path / "curves", sets=["planner.v=0.5"])
    assert (curve.seeds, curve.config.num_rounds, curve.config.planner.v) == (1, 2, 0.5)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 2", "seeds = 0", "seeds: expected at least 1, found 0"),
        ("seeds = 2", 'seeds = "two"', "seeds: expected int, found 'two'"),
        ("seeds = 2", "seed = 2", "seed: unknown key"),
        ("num-rounds = 3", "num-round = 3", r"\[run\] .*num-round"),
        ("[run]", "[run", "expected TOML"),
        ("seeds = 1\n", "size = 1\n", "smoke.size: unknown key"),
    ],
)
def test_a_wrong_curve_is_named(old, new, message, tmp_path):
    (tmp_path / "drift").mkdir()
    (tmp_path / "drift" / "mine.toml").write_text(CURVE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as error:
        load_curves("drift", smoke=False, folder=tmp_path)
    assert "mine.toml" in str(error.value)


@pytest.mark.slow
def test_what_is_not_there_is_refused(tmp_path):
    for arguments, message in (
        (["fig3"], "expected all or one of fig4"),
        (["fig4", "--plot"], "run the experiment first"),
        (["fig4", "--curves", str(tmp_path)], "expected one TOML for each curve"),
        (["drift", "--set", "strategy=FedAvg", "--smoke"], "policy"),
    ):
        outcome = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
        assert outcome.exit_code != 0
        assert message in f"{outcome.output}{outcome.exception}"


def test_fairness_is_that_of_jain():
    assert jain([0.5, 0.5, 0.5, 0.5]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([0, 0]) == 0
