import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from client_pipeline.system.scenario import load_scenario
from flower_app.cli.main import app
from flower_app.report.contents import FIGURES
from flower_app.report.data import RunData
from flower_app.report.page import write_report
from helpers.planned_run import planned_run
from helpers.reported_run import Page, make_run, record

pytestmark = pytest.mark.slow

IDS = {"loss", "latency", "wall", "queues", "selection", "energy", "memory", "bytes", "timeline"}


def data(records, timeline=None):
    return RunData(label="demo", rounds=records, timeline=timeline)


def without_data(path):
    """Return the figures that say that they have no data, and the reason."""
    sections = re.findall(r'<figure id="(\w+)">(.*?)</figure>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert {name for name, _ in sections} == IDS
    return {name: why[1] for name, body in sections if (why := re.search(r"no data: (.*?)<", body))}


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A run of four rounds, and its report."""
    run = make_run(tmp_path_factory.mktemp("reported") / "run")
    return run, write_report([run])


def test_the_report_has_every_figure_and_needs_nothing_else(reported):
    run, path = reported
    assert path == run / "report.html"
    page = Page(path)
    assert {spec.id for spec in FIGURES} == IDS <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not page.open
    assert without_data(path) == {}
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    source = path.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"<\s]*", source)) <= {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert "@import" not in source
    assert set(re.findall(r"url\(([^)]*)\)", source)) <= {f"#{name}" for name in page.ids}
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "config.toml", "report.html", "rounds.jsonl", "summary.json", "timeline.json"]  # fmt: skip


def test_the_header_sums_the_run_up(reported):
    run, path = reported
    text = Page(path).text
    for words in ("demo", "finished", "dssda", "4 of 4", "bleu 41.5", "400.0 s", "48.0 J", "12.5 s"):
        assert words in text
    assert f"collapipe run --config {run / 'config.toml'} --set run-dir=" in text
    assert "No cluster failed or was left out." in text


def test_the_slowest_cluster_sets_the_latency():
    parts = data([record(1), record(3)]).slowest_parts()
    assert parts["pipeline of the slowest cluster"].tolist() == [90, 90]
    assert parts["its upload"].tolist() == [10, 10]
    records = [record(1)]
    records[0]["virtual"]["clusters"][1]["uplink_wait_s"] = 45.0
    parts = data(records).slowest_parts()
    assert [values.tolist() for values in parts.values()] == [[50], [30], [45]]


def test_text_from_files_is_escaped(tmp_path):
    reason = "<script>alert(1)</script>"
    config = "name = \"a<img src='http://x'>\"\nscenario = '<i>'\n"
    records = [record(n, failed=[{"cluster": 1, "reason": reason}], metrics={"<u>bleu": 1.0}) for n in (1, 2, 4)]
    for r in records:
        r["plan"]["policy"] = "<script>p"
    path = write_report([make_run(tmp_path / "<b>run&", records, config=config)])
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"<(script|img|i|u|b)\b", source)
    text = Page(path).text
    assert reason in text and "<b>run&" in text and "1-2, 4" in text


def test_a_run_that_failed_or_goes_on_says_so_first(tmp_path):
    failed = Page(write_report([make_run(tmp_path / "failed", summary="failed", timeline=False)]))
    assert "ended as “failed”: cluster 1 <b>vanished</b>. The report shows the 4 rounds" in failed.text
    running = Page(write_report([make_run(tmp_path / "running", summary=None)]))
    assert "No summary yet" in running.text


def test_missing_data_is_told_and_never_fails(tmp_path):
    bare = [{"round": n, "train_loss": None, "clusters": [], "failed": [], "metrics": {}} for n in (1, 2)]
    path = write_report([make_run(tmp_path / "bare", bare, timeline=False)])
    assert set(without_data(path)) == IDS
    stock = [record(n, virtual=None, plan=None, metrics={}) for n in (1, 2, 3)]
    found = without_data(write_report([make_run(tmp_path / "stock", stock)]))
    assert set(found) == {"loss", "latency", "queues", "energy"}
    assert found["latency"] == "no round has a virtual latency"
    nulls = [record(1, virtual={"latency_s": None, "energy_j": None, "gamma_max": None, "clusters": None})]
    write_report([make_run(tmp_path / "nulls", nulls)])
    assert (
        set(without_data(write_report([make_run(tmp_path / "empty", [], summary="bad-input", timeline=False)]))) == IDS
    )
    (tmp_path / "no-files").mkdir()
    assert set(without_data(write_report([tmp_path / "no-files"]))) == IDS


def test_several_runs_stand_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stock = make_run(tmp_path / "stock", [record(n, virtual=None, plan=None) for n in (1, 2)], timeline=False)
    runs = [make_run(tmp_path / "a" / "dssda"), stock, make_run(tmp_path / "none", [], summary="failed"),
            make_run(tmp_path / "b" / "dssda")]  # fmt: skip
    path = write_report(runs)
    assert path == tmp_path / "report.html"
    page = Page(path)
    assert IDS <= set(page.ids) and not page.open
    assert len(page.ids) == len(set(page.ids))
    for label in ("dssda (1)", "dssda (4)", "stock", "none"):
        assert label in page.text
    assert without_data(path) == {}


def test_a_city_of_a_hundred_clusters_stays_readable_and_small(tmp_path):
    run = planned_run(tmp_path / "city", load_scenario("city"), 8)
    path = write_report([run])
    assert path.stat().st_size < 500_000
    page = Page(path)
    # It was planned, and trained nowhere.
    assert without_data(path) == {"loss": "no round was evaluated"}
    assert re.search(r"100; \d+ have trained, on 6 to 14 devices", page.text)
    for words in (
        "all clusters",
        "80 % of them",
        "largest queue: cluster",
        "cluster: of 100 those with the most and the least",
        "with the longest and the shortest step are shown",
    ):
        assert words in page.text, words
    timeline = json.loads((run / "timeline.json").read_text())["clusters"]
    seconds = {c["cluster"]: max(event[4] for event in c["modelled"]) for c in timeline}
    shown = [int(n) for n in re.findall(r"cluster (\d+)[^,<]*, modelled", page.text)]
    assert len(timeline) == 40 and len(shown) == 8
    assert {max(seconds, key=seconds.get), min(seconds, key=seconds.get)} <= set(shown)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    queues = np.array([[cluster["queue"] for cluster in line["virtual"]["clusters"]] for line in lines])
    assert f"largest queue: cluster {queues.max(axis=0).argmax()}" in page.text


def test_the_command_finds_the_runs_and_prints_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "one")
    done = CliRunner().invoke(app, ["report", "one", "--out", "pictures/one.html"])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == "pictures/one.html"
    assert IDS <= set(Page(tmp_path / "pictures" / "one.html").ids)
    assert CliRunner().invoke(app, ["report", "nothing"]).exit_code == 2
