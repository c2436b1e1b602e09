"""The page of a watched run in a real browser: headless Chromium, where there is one, driven by playwright.

``COLLAPIPE_TEST_CHROMIUM`` names the browser's program, unless ``chromium`` or ``google-chrome`` is in the path.
"""

import json

import pytest

from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime.faults import FaultRecord
from client_pipeline.system.scenario import load_scenario
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import ROUNDS, append_round, write_config
from flower_app.training.live_news import LiveNews
from flower_app.watch.server import watched
from helpers.planned_run import planned_run
from helpers.watched_page import BROWSER, VISIBLE_S, ShownPage, chromium, seconds_until

pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="the browser's driver is not installed")
if not BROWSER:
    pytest.skip("no Chromium here; COLLAPIPE_TEST_CHROMIUM names one", allow_module_level=True)

TOKEN = "a token of more than sixteen characters"


@pytest.fixture
def browser():
    with chromium(playwright) as program:
        yield program


def run_of(folder, scenario, rounds):
    run_dir = planned_run(folder, load_scenario(scenario), 1)
    write_config(run_dir, RunConfig(scenario=scenario, num_rounds=rounds + 5))
    (run_dir / "summary.json").unlink()
    line = json.loads((run_dir / ROUNDS).read_text())
    with (run_dir / ROUNDS).open("a") as file:
        file.writelines(
            json.dumps(line | {"round": n, "train_loss": 5.0 / n, "metrics": {"bleu": n / rounds}}) + "\n"
            for n in range(2, rounds + 1)
        )
    return run_dir, line


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a run; returns run directory, page, and what the browser has complained of."""
    ends, told = [], []

    def open_page(scenario="unequal", rounds=4, width=1280):
        run_dir, line = run_of(tmp_path / "run", scenario, rounds)
        serving = watched(run_dir, 0, TOKEN, told.append)
        serving.__enter__()
        ends.append(serving)
        page = browser.new_page(viewport={"width": width, "height": 900})
        errors = ShownPage(page).errors
        page.goto(told[-1].removeprefix("watch: "))
        progress(page, f"round {rounds} ")
        return run_dir, line, page, errors

    yield open_page
    for serving in ends:
        serving.__exit__(None, None, None)


def progress(page, words):
    return seconds_until(lambda: page.text_content("#progress"), lambda text: text.startswith(words))


def banner(page, words):
    return seconds_until(lambda: page.text_content("#banner"), lambda text: words in text)


def fault(kind, device, round_=5, **more):
    return FaultRecord(kind=kind, cluster=0, round=round_, device=device, recovered=False, **more).to_dict()


def test_a_kill_a_freeze_and_a_cut_are_seen_within_two_seconds(opened):
    run_dir, line, page, errors = opened()
    with LiveNews(run_dir) as news:
        news.hear(0, 5, ClusterNews(round=5, signs=[LifeSign(1, "ended", 0.1)]).to_text())
        killed_s = banner(page, "cluster 0, device 1: its process ended")
        news.hear(0, 5, ClusterNews(round=5, signs=[LifeSign(2, "silent", 0.8)]).to_text())
        frozen_s = banner(page, "cluster 0, device 2: no sign of life for")
        # From now on the cluster tells nothing: its cable is cut.
        cut_s = banner(page, "cluster 0: no sign of life for")
        news.hear(0, 5, ClusterNews(round=5, faults=[fault("freeze", 2)]).to_text())
        banner(page, "freeze: cluster 0, device 2")
        append_round(run_dir, line | {"round": 5})
        seconds_until(lambda: page.text_content("#banner"), lambda text: not text)
    print(f"killed {killed_s:.2f} s, frozen {frozen_s:.2f} s, cut {cut_s:.2f} s")
    assert killed_s < VISIBLE_S and frozen_s < VISIBLE_S and cut_s < VISIBLE_S
    assert errors == []


def test_seconds_of_silence_are_counted_on_the_page(opened):
    run_dir, _, page, errors = opened()
    with LiveNews(run_dir) as news:
        news.hear(0, 5, ClusterNews(round=5, signs=[LifeSign(2, "silent", 0.8)]).to_text())
        for seconds in (1, 2, 3):
            banner(page, f"device 2: no sign of life for {seconds} s")
    assert errors == []


@pytest.mark.parametrize("width", [1280, 400])
def test_it_can_be_read_at_every_width(opened, width):
    _, _, page, errors = opened(width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('body *')].filter(e => e.childNodes.length && e.innerText)"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 10 and errors == []


def test_a_thousand_rounds_of_a_hundred_clusters_stay_fluent(opened):
    run_dir, line, page, errors = opened("city", 1000)
    # What the page takes for a new round, beside the browser's own frames.
    drawn_ms = page.evaluate("() => { const begun = performance.now(); draw(); return performance.now() - begun; }")
    append_round(run_dir, line | {"round": 1001})
    shown_s = progress(page, "round 1001 ")
    print(f"drawn in {drawn_ms:.0f} ms, a new round is shown after {shown_s:.1f} s")
    assert errors == []
