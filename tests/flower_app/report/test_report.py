import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.testing import CliRunner

from client_pipeline.system.scenario import load_scenario
from flower_app.cli.main import app
from flower_app.report.chrome_trace import write_trace
from flower_app.report.contents import FIGURES
from flower_app.report.data import RunData
from flower_app.report.page import to_svg, write_report
from flower_app.report.wall_figure import wall_parts
from helpers.planned_run import planned_run

pytestmark = pytest.mark.slow

IDS = {"loss", "latency", "wall", "queues", "selection", "energy", "memory", "bytes", "timeline"}
EVENTS = [["F", 0, 0, 0.0, 2.0], ["z", 0, 0, 2.0, 2.5], ["F", 1, 0, 2.5, 3.5], ["B", 1, 0, 3.5, 5.5],
          ["g", 0, 0, 5.5, 6.0], ["B", 0, 0, 6.0, 10.0]]  # fmt: skip


def virtual(number):
    """Cluster 0 is the slower one; cluster 1 is not selected in the third round."""
    trained = {"selected": True, "device_energy_j": [2.0, 0.0, 3.0], "link_bytes": [1e6, 0.0, 2e6],
               "device_memory_bytes": [6e8, 0.0, 9e8], "whole_model_bytes": 4.5e9}  # fmt: skip
    clusters = [
        {"cluster": 0, "train_s": 90.0, "uplink_s": 10.0, "waiting_s": 0.0, "uplink_energy_j": 1.0} | trained,
        {"cluster": 1, "train_s": 50.0, "uplink_s": 30.0, "waiting_s": 20.0, "uplink_energy_j": 1.0} | trained,
    ]
    if number == 3:
        clusters[1] = {"cluster": 1, "selected": False, "train_s": None, "uplink_s": None}
    for cluster in clusters:
        cluster |= {"gamma": 2.4, "queue": 0.1 * number}
    return {"latency_s": 100.0, "latency_eq15_s": 104.0, "energy_j": 12.0, "gamma_max": 2.6, "clusters": clusters}


def record(number, **changes):
    devices = {"2": {"blocks": 2, "busy_s": 0.1, "idle_bytes": 200_000_000, "peak_bytes": 260_000_000}}
    return {
        "round": number,
        "train_loss": 4.0 / number,
        "bytes_down": 1_000_000,
        "bytes_up": 900_000,
        "clusters": [
            {"cluster": 0, "loss": 1.0, "devices": devices, "prepare_s": 0.25, "train_s": 1.5, "collect_s": 0.5}
        ],
        "failed": [],
        "metrics": {"loss": 2.0, "bleu": 10.0 * number} if number % 2 == 0 else {},
        "lr": 0.001,
        "wall_s": 3.0 * number,
        "round_s": 3.0,
        "messages_s": 2.5,
        "faults": [{"kind": "device", "cluster": 0, "device": 2, "recovered": True}] if number == 3 else [],
        "plan": {"policy": "dssda", "status": "optimal", "left_out": []},
        "virtual": virtual(number),
        **changes,
    }


def make_run(folder, records=None, summary="finished", timeline=True, config='name = "demo"\nnum-rounds = 4\n'):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    records = [record(n) for n in (1, 2, 3, 4)] if records is None else records
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if summary:
        metrics = {"bleu": 41.5} if summary == "finished" else {}
        error = {} if summary == "finished" else {"error": "cluster 1 <b>vanished</b>"}
        (folder / "summary.json").write_text(
            json.dumps({"status": summary, "wall_s": 12.5, "metrics": metrics} | error)
        )
    if timeline:
        clusters = [
            {"cluster": 0, "order": [2, 0], "modelled": EVENTS, "measured": [e for e in EVENTS if e[0] in "FB"]}
        ]
        (folder / "timeline.json").write_text(json.dumps({"round": 4, "clusters": clusters}))
    return folder


def data(records, timeline=None):
    return RunData(label="demo", rounds=records, timeline=timeline)


class Page(HTMLParser):
    """Ids, addresses, text and well-nestedness of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.addresses, self.texts, self.open = [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.addresses.append(value)
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "br", "link"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)

    @property
    def text(self):
        return " ".join(self.texts)


def without_data(path):
    """Which figures say that they have no data, and why."""
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


def test_the_measured_memory_is_what_lies_above_an_idle_process():
    memory = data([record(1), record(2)]).memory()
    assert memory[0, 2] == (9e8, 60_000_000)
    assert memory[1, 0][0] == 6e8 and np.isnan(memory[1, 0][1])
    assert (0, 1) not in memory


def test_the_raster_tells_failed_and_left_out_clusters_from_those_not_selected():
    plan = {"left_out": [{"cluster": 2, "reason": "C8"}]}
    failed = record(2, failed=[{"cluster": 1, "reason": "gone"}, {"cluster": None, "reason": "node 7"}], plan=plan)
    states = data([record(1), failed, record(3)]).states()
    assert states.tolist() == [
        ["selected", "selected", "selected"],
        ["selected", "failed", "not selected"],
        ["not selected", "left out", "not selected"],
    ]


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


def test_a_single_round_and_rounds_without_any_cluster_are_drawn(tmp_path):
    # The one round had no fault.
    found = without_data(write_report([make_run(tmp_path / "one", [record(2)])]))
    assert found == {}
    nobody = record(2, clusters=[])
    for cluster in nobody["virtual"]["clusters"]:
        cluster.update(selected=False, train_s=None, uplink_s=None, device_energy_j=None)
    nobody["virtual"] |= {"latency_s": None, "energy_j": None}
    write_report([make_run(tmp_path / "gap", [record(1), nobody, record(3)])])


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


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.id)
def test_every_figure_is_well_formed_and_names_the_units_of_its_axes(spec):
    timeline = {"clusters": [{"cluster": 0, "order": [2, 0], "modelled": EVENTS, "measured": EVENTS[:1]}]}
    svg = to_svg(spec, [data([record(n) for n in (1, 2, 3, 4)], timeline)])
    assert svg == to_svg(spec, [data([record(n) for n in (1, 2, 3, 4)], timeline)])
    text = " ".join(ElementTree.fromstring(svg).itertext())
    words = {
        "loss": ["loss [nat]", "virtual time [s]", "bleu"],
        "latency": ["virtual time [s]"],
        "wall": ["wall time of a round [s]", "local steps", "server", "device (1)", "wall time [s]"],
        "queues": ["Γmax = 2.6"],
        "selection": ["cluster 1", "75 %"],
        "energy": ["[J]"],
        "memory": ["memory [GB]", "0.2"],
        "bytes": ["bytes of a round [MB]"],
        "timeline": ["stage 0, device 2", "wall time [s]"],
    }
    for word in words[spec.id]:
        assert word in text
    assert "mathdefault" not in svg


def test_the_wall_seconds_of_a_round_are_told_by_what_they_went_to():
    slow = {"cluster": 0, "prepare_s": 0.25, "train_s": 1.5, "collect_s": 0.5}
    quick = {"cluster": 1, "prepare_s": 0.5, "train_s": 1.0, "collect_s": 0.25}
    run = data([record(1, clusters=[quick, slow]), record(2, clusters=[]), {"round": 3}])
    parts = {name: list(values) for name, values in wall_parts(run).items()}
    # 3 s in all, 2.5 s until the last reply; the slowest cluster took 2.25 s of these.
    assert [values[0] for values in parts.values()] == [1.5, 0.75, 0.25, 0.5]
    assert [values[1] for values in parts.values()][2:] == [2.5, 0.5]
    assert all(math.isnan(values[2]) or values[2] == 0 for values in parts.values())
    assert sum(values[0] for values in parts.values()) == 3.0


def test_many_rounds_and_clusters_make_a_file_that_a_browser_opens(tmp_path):
    records = []
    for number in range(1, 401):
        r = record(number)
        r["virtual"]["clusters"] = [r["virtual"]["clusters"][(n + number) % 2] | {"cluster": n} for n in range(12)]
        records.append(r)
    path = write_report([make_run(tmp_path / "long", records)])
    assert path.stat().st_size < 2_500_000


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


def test_sites_stand_with_their_names_and_their_own_number_of_devices(tmp_path):
    run = planned_run(tmp_path / "unequal", load_scenario("unequal"), 3)
    path = write_report([run])
    text = Page(path).text
    assert "2: 0 workshop (3 devices), 1 depot (4 devices)" in text
    assert "cluster 0 (workshop)" in text and "cluster 1 (depot), modelled" in text
    trace = json.loads(write_trace(run).read_text())["traceEvents"]
    assert "cluster 1 (depot), modelled" in {event["args"].get("name") for event in trace}


@pytest.mark.parametrize("number", [1, 24, 25, 60])
def test_every_number_of_clusters_is_drawn(tmp_path, number):
    records = [record(n) for n in range(1, 4)]
    for r in records:
        r["virtual"]["clusters"] = [r["virtual"]["clusters"][n % 2] | {"cluster": n} for n in range(number)]
        r["virtual"]["clusters"][0] |= {"gamma": None, "queue": None}
    missing = without_data(write_report([make_run(tmp_path / "run", records)]))
    assert missing.keys() == ({"queues"} if number == 1 else set())


def test_the_command_finds_the_runs_and_prints_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "one")
    done = CliRunner().invoke(app, ["report", "one", "--out", "pictures/one.html"])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == "pictures/one.html"
    assert IDS <= set(Page(tmp_path / "pictures" / "one.html").ids)
    assert CliRunner().invoke(app, ["report", "nothing"]).exit_code == 2


def test_a_long_run_is_drawn_as_means_of_some_rounds():
    queues = next(spec for spec in FIGURES if spec.id == "queues")
    assert "means of" not in to_svg(queues, [data([record(n) for n in range(1, 251)])])
    figure = queues.draw([data([record(n) for n in range(1, 502)])])
    curve = figure.axes[0].lines[0]
    assert figure.axes[0].get_xlabel() == "round (means of 3)"
    assert curve.get_xdata()[:2].tolist() == [2, 5]
    assert curve.get_ydata()[0] == pytest.approx(0.2)


def test_predicted_stands_beside_measured_where_a_run_planned_by_what_it_measured(tmp_path):
    compared = {"cluster": 0, "predicted_train_s": 3.0, "measured_train_s": 3.2}
    planned = record(1)["plan"] | {"predictions": [compared, compared | {"cluster": 1, "measured_train_s": 4.5}]}
    records = [record(1), record(2, plan=planned)]
    data = RunData(label="demo", rounds=records, timeline=None)
    predicted, measured = data.predictions()
    assert measured[1] == 4.5 and predicted[1] == 3.0 and not (measured[0] == measured[0])
    latency = next(spec for spec in FIGURES if spec.id == "latency")
    assert "predicted local steps" in to_svg(latency, [data])
    assert "predicted local steps" not in to_svg(latency, [RunData(label="demo", rounds=[record(1)], timeline=None)])
