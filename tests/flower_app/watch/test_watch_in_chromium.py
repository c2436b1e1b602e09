"""The page of a watched run in a real browser: headless Chromium, where there is one, driven by playwright.

``COLLAPIPE_TEST_CHROMIUM`` names the browser's program, unless ``chromium`` or ``google-chrome`` is in the path.
"""

import json
import re

import pytest

from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime.transport.faults import FaultRecord
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import FINISHED, ROUNDS, append_round, write_config, write_summary
from flower_app.training.live_news import LiveNews
from flower_app.watch.server import open_port, watched
from helpers.planned_run import unfinished_run
from helpers.watched_page import VISIBLE_S, ShownPage, chromium, driver, seconds_until

pytestmark = pytest.mark.slow

playwright = driver()

TOKEN = "a token of more than sixteen characters"


@pytest.fixture
def browser():
    with chromium(playwright) as program:
        yield program


def run_of(folder, scenario, rounds):
    run_dir = unfinished_run(folder, rounds + 5, scenario, planned=1)
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
        serving = watched(run_dir, open_port(0), TOKEN, told.append)
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


def test_a_kill_a_freeze_and_a_cut_are_seen_as_they_happen(opened):
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


def test_rows_have_names_and_empty_boxes_say_that_they_are(opened):
    _, _, page, errors = opened()
    names = page.evaluate("[...document.querySelectorAll('#names text')].map((text) => text.firstChild.data)")
    assert names == ["0 workshop", "1 depot"]
    box = "(name) => getComputedStyle(document.querySelector(name), '::before').content"
    assert {page.evaluate(box, name) for name in ("#faults", "#changes")} == {'"none so far"'}
    assert page.evaluate(box, "#log") == '"nothing"'
    assert errors == []


COUNTERS = """() => {
  window.counters = [];
  new MutationObserver(() => window.counters.push(document.getElementById("progress").textContent)).observe(
    document.getElementById("progress"), { subtree: true, childList: true, characterData: true });
}"""


def test_a_finished_run_that_is_extended_counts_to_its_new_end(opened):
    """An open page said "round 43 of 40"."""
    run_dir, line, page, errors = opened()
    write_config(run_dir, RunConfig(scenario="unequal", num_rounds=4))
    write_summary(run_dir, FINISHED)
    progress(page, "round 4 of 4")
    page.evaluate(COUNTERS)
    write_config(run_dir, RunConfig(scenario="unequal", num_rounds=12))
    (run_dir / "summary.json").unlink()
    for number in range(5, 13):
        append_round(run_dir, line | {"round": number})
        progress(page, f"round {number} of 12")
    counters = [[int(word) for word in re.findall(r"\d+", text)[:2]] for text in page.evaluate("window.counters")]
    assert counters and all(round_ <= most for round_, most in counters), counters
    assert errors == []


def test_a_first_prediction_that_is_far_off_leaves_the_picture_and_not_the_others_flat(opened):
    run_dir, line, page, errors = opened()
    for number in range(5, 13):
        times = {"predicted_train_s": 900.0 if number == 5 else 3.0, "measured_train_s": 2.5}
        append_round(run_dir, line | {"round": number, "plan": line["plan"] | {"predictions": [times]}})
    progress(page, "round 12 ")
    outside = "1 outside, the largest 900 in round 5"
    seconds_until(lambda: page.text_content("#seconds-outside"), lambda text: text == outside)
    # The largest of the others, and some room.
    assert 3.0 < page.evaluate("charts.seconds.plot.scales.left.max") < 6.0
    assert errors == []


def health(page):
    """Return the health of each device, by its cluster's name and its number."""
    rows = [row.locator("td").all_text_contents() for row in page.locator("#devices tbody tr").all()]
    return {(cells[0].split()[-1], int(cells[1])): cells[-1] for cells in rows}


def test_a_lost_control_units_devices_stay_and_a_killed_idle_device_is_not_idle(opened):
    run_dir, line, page, errors = opened()
    before, idle = health(page), ("workshop", 0)
    with LiveNews(run_dir) as news:
        news.hear(0, 5, ClusterNews(round=5, signs=[LifeSign(idle[1], "ended", 3.0)]).to_text())
        banner(page, "its process ended")
        news.hear(0, 5, ClusterNews(round=5, is_over=True).to_text())
        [report] = [report for report in line["clusters"] if report["cluster"] == 0]
        others = [report | {"devices": {k: d for k, d in report["devices"].items() if k != "0"}}]
        server = {"kind": "server", "cluster": None, "device": None, "round": 5, "step": 0, "recovered": True}
        lost = {"failed": [{"cluster": 1, "reason": "it left"}], "faults": [server | {"seconds": None, "reason": "."}]}
        append_round(run_dir, line | {"round": 5, "clusters": others, **lost})
        progress(page, "round 5 ")
        seconds_until(lambda: health(page)[idle], lambda words: words.startswith("its process ended"))
        after = health(page)
        assert after.keys() == before.keys() and {place[0] for place in after} == {"workshop", "depot"}
        unknown = {words for place, words in after.items() if place[0] == "depot"}
        assert unknown == {"unknown: its control unit is lost since round 5"}
        assert "server (server), over" in page.text_content("#faults")
    assert errors == []


def test_a_device_that_died_in_the_newest_round_and_was_replaced_does_not_train(opened):
    run_dir, line, page, errors = opened()
    [report] = [report for report in line["clusters"] if report["cluster"] == 0]
    place, device = next((("workshop", int(k)), d) for k, d in report["devices"].items() if d["blocks"])
    assert health(page)[place] == "trains"
    dead = {str(place[1]): {"blocks": 0, "busy_s": device["busy_s"]}}
    others = [report | {"devices": report["devices"] | dead}]
    fault = {"kind": "device", "cluster": 0, "device": place[1], "round": 5, "step": 3, "recovered": True}
    faults = [fault | {"seconds": 0.6, "reason": "its process ended"}]
    append_round(run_dir, line | {"round": 5, "clusters": others, "faults": faults})
    progress(page, "round 5 ")
    seconds_until(lambda: health(page)[place], lambda words: words == "device in round 5")
    assert errors == []


COUNT_TOUCHED = """() => {
  window.touched = 0;
  const nodes = (list) => [...list].reduce((sum, n) => sum + 1 + (n.querySelectorAll?.("*").length ?? 0), 0);
  new MutationObserver((records) => {
    for (const r of records) window.touched += r.type === "childList" ? nodes(r.addedNodes) + nodes(r.removedNodes) : 1;
  }).observe(document, { subtree: true, childList: true, characterData: true, attributes: true });
}"""


class Polls:
    """Requests of the page, and the bytes of each answer.

    Parameters
    ----------
    page : of the browser
    """

    def __init__(self, page):
        self._page, self.sizes = page, []
        page.on("requestfinished", self._count)

    def _count(self, request):
        if "/state?" in request.url:
            self.sizes.append(request.sizes()["responseBodySize"])

    def wait(self, count):
        """Wait for so many more; returns the bytes of each."""
        begin = len(self.sizes)
        while len(self.sizes) < begin + count:
            self._page.wait_for_timeout(50)
        return self.sizes[begin:]


@pytest.fixture
def city(opened):
    """A run of 1,000 rounds and 100 clusters: to add a round to it; its page; and how that polls."""
    run_dir, line, page, errors = opened("city", 1000)
    (run_dir / "logs").mkdir()
    page.evaluate(COUNT_TOUCHED)

    def add_round(number):
        """All numbers of all devices are others than before, and there are faults and changes of plans."""
        clusters = [
            c | {"devices": {k: d | {"busy_s": d["busy_s"] + number} for k, d in c["devices"].items()}}
            for c in line["clusters"]
        ]
        changes = [{"cluster": n, "taken": True, "reason": f"of round {number}"} for n in range(20)]
        faults = [fault(1, number, step=step) for step in range(20)]
        news = {"round": number, "clusters": clusters, "faults": faults, "plan": line["plan"] | {"changes": changes}}
        with (run_dir / "logs" / "run.log").open("a") as file:
            file.writelines(f"round {number}, line {n}: the words of the log\n" for n in range(50))
        append_round(run_dir, line | news)
        return progress(page, f"round {number} ")

    yield add_round, page, Polls(page)
    assert errors == []


def test_a_refresh_disturbs_nobody_who_reads_or_types(city):
    add_round, page, polls = city
    add_round(1001)
    place = "() => document.getElementById('filter').getBoundingClientRect().top"
    page.select_option("#cluster", "6")
    page.locator("#filter").scroll_into_view_if_needed()
    page.locator("#filter").press_sequentially("LINE 7")
    add_round(1002)
    assert page.text_content("#log").splitlines() == [f"round {n}, line 7: the words of the log" for n in (1001, 1002)]
    page.locator("#filter").fill("line")
    page.evaluate("() => { for (const id of ['log', 'faults']) document.getElementById(id).scrollTop = 30; }")
    page.evaluate("() => getSelection().selectAllChildren(document.querySelector('#devices tbody tr'))")
    page.locator("#filter").focus()
    polls.wait(2)
    before_px, log = page.evaluate(place), page.text_content("#log")
    add_round(1003)
    polls.wait(2)
    assert page.evaluate(place) == pytest.approx(before_px, abs=1)
    assert page.input_value("#filter") == "line" and page.evaluate("document.activeElement.id") == "filter"
    assert page.input_value("#cluster") == "6"
    # Who reads further up in the log goes on there, and finds what is new at the end.
    assert page.evaluate("document.getElementById('log').scrollTop") == 30 and page.text_content("#log") == log
    page.evaluate("() => { const log = document.getElementById('log'); log.scrollTop = log.scrollHeight; }")
    seconds_until(lambda: page.text_content("#log"), lambda text: "round 1003, line 49" in text)
