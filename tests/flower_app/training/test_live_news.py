"""What control units tell is in the run directory at once, and from there on the page and at the terminal."""

import io
import json
import time

import pytest
from rich.console import Console
from starlette.testclient import TestClient

from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime.faults import FaultRecord
from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.launch.progress import RunProgress
from flower_app.runs.live_faults import CLUSTER_SILENT_S, faults_of_round, missing_signs
from flower_app.runs.run_directory import ROUNDS, append_round, read_live, write_config, write_summary
from flower_app.training.live_news import LiveNews
from flower_app.watch.server import watch_app
from helpers.planned_run import planned_run

TOKEN = "a token of more than sixteen characters"


def fault(**changes):
    record = {"kind": "device", "cluster": 0, "round": 5, "device": 1, "step": 2, "recovered": False}
    return FaultRecord(**record | changes)


def told(*faults, signs=(), is_over=False):
    return ClusterNews(round=5, faults=[one.to_dict() for one in faults], signs=signs, is_over=is_over).to_text()


@pytest.fixture
def run_dir(tmp_path):
    folder = planned_run(tmp_path / "run", load_scenario("unequal"), 4)
    write_config(folder, RunConfig(scenario="unequal", num_rounds=9))
    (folder / "summary.json").unlink()
    return folder


@pytest.fixture
def news(run_dir):
    with LiveNews(run_dir) as news:
        yield news


@pytest.fixture
def page(run_dir):
    client = TestClient(watch_app(run_dir, TOKEN), base_url="http://127.0.0.1:8090")
    client.headers["authorization"] = f"Bearer {TOKEN}"
    return client


def present(page):
    """What goes wrong at this moment, as the page is told."""
    state = page.get("/state").json()
    return {key: state[key] for key in ("faults_now", "signs_now")}


def test_a_fault_is_on_the_page_at_once_and_leaves_it_with_the_round(news, page, run_dir):
    assert present(page) == {"faults_now": [], "signs_now": []}
    news.hear(0, 5, told(signs=[LifeSign(1, "ended", 0.2)]))
    (sign,) = present(page)["signs_now"]
    assert sign["text"] == "cluster 0, device 1: its process ended 0 s ago" and sign["device"] == 1
    news.hear(0, 5, told(fault()))
    shown = present(page)
    assert [(f["kind"], f["device"]) for f in shown["faults_now"]] == [("device", 1)] and shown["signs_now"] == []
    line = json.loads((run_dir / ROUNDS).read_text().splitlines()[-1])
    append_round(run_dir, line | {"round": 5, "faults": [fault(recovered=True).to_dict()]})
    assert present(page) == {"faults_now": [], "signs_now": []}


def test_what_happens_now_is_shown_to_nobody_without_the_token(run_dir):
    assert TestClient(watch_app(run_dir, TOKEN), base_url="http://127.0.0.1:8090").get("/state").status_code == 403


def test_seconds_of_silence_grow_without_further_news(news, run_dir):
    news.hear(0, 5, told(signs=[LifeSign(2, "silent", 3.0)]))
    assert str(missing_signs(run_dir, 5)[0]) == "cluster 0, device 2: no sign of life for 3 s"
    live = read_live(run_dir)[0]
    assert time.time() - live["signs"][0]["since"] == pytest.approx(3.0, abs=1.0)


def test_a_cluster_that_tells_no_more_is_silent_until_its_round_is_over(news, page, run_dir, monkeypatch):
    now = time.time()
    news.hear(0, 5, told())
    news.hear(1, 5, told())
    assert present(page)["signs_now"] == []
    monkeypatch.setattr("flower_app.runs.live_faults.time.time", lambda: now + CLUSTER_SILENT_S + 4)
    texts = [sign["text"] for sign in present(page)["signs_now"]]
    assert texts == [f"cluster {n}: no sign of life for 5 s" for n in (0, 1)]
    news.hear(1, 5, told(is_over=True))
    assert list(read_live(run_dir)) == [0] and len(present(page)["signs_now"]) == 1


def test_changes_are_written_at_once_and_heartbeats_seldom(news, run_dir, monkeypatch):
    written = []
    monkeypatch.setattr("flower_app.training.live_news.write_live", lambda *arguments: written.append(arguments))
    for _ in range(20):
        news.hear(0, 5, told())
    assert len(written) == 1
    news.hear(0, 5, told(signs=[LifeSign(0, "silent", 0.9)]))
    news.hear(0, 5, told(signs=[LifeSign(0, "silent", 1.2)]))
    news.hear(0, 5, told(fault()))
    assert len(written) == 3


def test_news_of_another_round_or_cluster_are_refused(news, run_dir):
    for cluster, round_ in ((0, 6), (1, 5)):
        with pytest.raises(ValueError, match="^news: expected"):
            news.hear(cluster, round_, told(fault()))
    assert read_live(run_dir) == {}


def test_nothing_is_left_when_the_run_ends(run_dir):
    with LiveNews(run_dir) as news:
        news.hear(0, 5, told(fault()))
        assert faults_of_round(run_dir, 5)
    assert read_live(run_dir) == {} and faults_of_round(run_dir, 5) == []


def test_a_cluster_of_this_machine_counts_once(news, run_dir):
    folder = run_dir / "clusters" / "cluster-0"
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps({"round": 5, "faults": [fault().to_dict()]}))
    assert len(faults_of_round(run_dir, 5)) == 1
    news.hear(0, 5, told(fault()))
    news.hear(1, 5, told())
    assert len(faults_of_round(run_dir, 5)) == 1
    write_summary(run_dir, "failed", error="x")


def printed(run_dir, steps):
    """Lines of the terminal as a run goes on, a step after the other."""
    progress = RunProgress(run_dir, 9, Console(file=io.StringIO(), width=200))
    progress.update()
    progress.console.file.truncate(0)
    progress.console.file.seek(0)
    for step in steps:
        step()
        progress.update()
        progress.update()
    return progress.console.file.getvalue().splitlines()


def test_the_terminal_tells_each_fault_and_each_recovery_once(news, run_dir):
    line = json.loads((run_dir / ROUNDS).read_text().splitlines()[-1])
    over, stream = fault(recovered=True, seconds=0.5), fault(kind="stream", device=None, recovered=True, seconds=0.1)
    ends = {"round": 5, "faults": [over.to_dict(), stream.to_dict()], "metrics": {}}
    lines = printed(
        run_dir,
        [
            lambda: news.hear(0, 5, told(fault())),
            lambda: news.hear(0, 5, told(over)),
            lambda: append_round(run_dir, line | ends),
        ],
    )
    assert lines[:3] == [
        "round 5: cluster 0, device 1: lost its process",
        "round 5: cluster 0, device 1: lost its process; recovered in 0.5 s",
        "round 5: cluster 0: lost its stream to the decoder; recovered in 0.1 s",
    ]
    assert not any("lost its process" in later for later in lines[3:])


def test_the_terminal_tells_of_long_silences_alone_and_when_they_end(news, run_dir, monkeypatch):
    monkeypatch.setattr("flower_app.training.live_news._WRITE_S", 0.0)
    lines = printed(
        run_dir,
        [
            lambda: news.hear(0, 5, told(signs=[LifeSign(1, "silent", 0.9)])),
            lambda: news.hear(0, 5, told(signs=[LifeSign(1, "silent", 2.4)])),
            lambda: news.hear(0, 5, told()),
        ],
    )
    assert lines == ["cluster 0, device 1: no sign of life for 2 s", "cluster 0, device 1: there again"]
