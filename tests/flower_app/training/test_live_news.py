"""News of control units: at once in the run directory, on the page and at the terminal."""

import io
import json

import pytest
from rich.console import Console

from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime.transport.faults import FaultRecord
from flower_app.launch.progress import RunProgress
from flower_app.runs.run_directory import ROUNDS, append_round
from flower_app.training.live_news import LiveNews
from helpers.planned_run import unfinished_run
from helpers.watched_page import page_of


def fault(**changes):
    record = {"kind": "device", "cluster": 0, "round": 5, "device": 1, "step": 2, "recovered": False}
    return FaultRecord(**record | changes)


def told(*faults, signs=(), is_over=False):
    return ClusterNews(round=5, faults=[one.to_dict() for one in faults], signs=signs, is_over=is_over).to_text()


@pytest.fixture
def run_dir(tmp_path):
    return unfinished_run(tmp_path / "run", 9)


@pytest.fixture
def news(run_dir):
    with LiveNews(run_dir) as news:
        yield news


@pytest.fixture
def page(run_dir):
    return page_of(run_dir)


def present(page):
    """Return the faults of this moment, as the page receives them."""
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


def test_what_happens_now_is_shown_to_nobody_without_the_token(page):
    del page.headers["authorization"]
    assert page.get("/state").status_code == 403


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
