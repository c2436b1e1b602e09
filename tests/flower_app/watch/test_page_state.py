"""State of the page for a run that changes: more rounds, lost clusters and devices, and a log for terminals."""

import json

import pytest

from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from flower_app.config.run_config import RunConfig
from flower_app.runs.run_directory import ROUNDS, append_round, write_config, write_summary
from flower_app.training.live_news import LiveNews
from helpers.planned_run import unfinished_run
from helpers.watched_page import page_of


@pytest.fixture
def run_dir(tmp_path):
    folder = unfinished_run(tmp_path / "run", 4)
    (folder / "logs").mkdir()
    return folder


@pytest.fixture
def line(run_dir):
    return json.loads((run_dir / ROUNDS).read_text().splitlines()[-1])


@pytest.fixture
def page(run_dir):
    return page_of(run_dir)


def state_of(page, after=0, log=0):
    return page.get(f"/state?after={after}&log={log}").json()


def test_a_run_that_is_extended_has_its_new_number_of_rounds_on_a_page_that_is_open(page, run_dir, line):
    assert state_of(page)["num_rounds"] == 4
    write_config(run_dir, RunConfig(scenario="unequal", num_rounds=43))
    append_round(run_dir, line | {"round": 5, "round_s": 2.0})
    state = state_of(page)
    assert (state["last_round"], state["num_rounds"]) == (5, 43)
    assert 'collapipe_rounds{run="run"} 43.0' in page.get("/metrics").text


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("\x1b[92mINFO\x1b[0m :      [ROUND 3/40]\n", "INFO :      [ROUND 3/40]\n"),
        ("\x1b[38;5;208mcolour\x1b[m \x1b[1A\x1b[2K\x9b31mred\n", "colour red\n"),
        ("\x1b]0;a title\x07words\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", "wordslink\n"),
        ("  0%\r 50%\r100%\r\nnext\tcolumn\n", "100%\nnext\tcolumn\n"),
        ("bell\x07 and \x00 nothing\n", "bell and  nothing\n"),
        ("Müller [1m is no escape\n", "Müller [1m is no escape\n"),
    ],
    ids=["colour", "cursor", "title", "progress bar", "controls", "plain"],
)
def test_the_log_is_shown_as_a_terminal_would_without_colours(page, run_dir, written, shown):
    (run_dir / "logs" / "run.log").write_bytes(written.encode())
    assert state_of(page)["log"] == {"offset": len(written.encode()), "text": shown}


def test_a_line_that_is_still_being_written_is_shown_when_it_is_whole(page, run_dir):
    path = run_dir / "logs" / "run.log"
    path.write_bytes(b"first\n\x1b[9")
    log = state_of(page)["log"]
    assert log == {"offset": 6, "text": "first\n"}
    path.write_bytes(b"first\n\x1b[92mgreen\x1b[0m")
    assert state_of(page, log=6)["log"] == {"offset": 6, "text": ""}
    write_summary(run_dir, "failed", error="no power")
    assert state_of(page, log=6)["log"]["text"] == "green"


def clusters_of(page):
    return {c["cluster"]: c for c in state_of(page)["newest"]["clusters"]}


def test_the_devices_of_a_control_unit_that_is_lost_stay(page, run_dir, line):
    before = clusters_of(page)
    assert before.keys() == {0, 1}
    others = [report for report in line["clusters"] if report["cluster"] != 1]
    lost = {"cluster": 1, "reason": "its SuperNode has signed off"}
    append_round(run_dir, line | {"round": 5, "clusters": others, "failed": [lost]})
    after = clusters_of(page)
    assert after.keys() == {0, 1}
    assert (after[1]["num_devices"], after[1]["devices"]) == (before[1]["num_devices"], before[1]["devices"])
    assert (after[1]["round"], after[1]["lost"]) == (4, 5) and (after[0]["round"], after[0]["lost"]) == (5, None)
    # As long as it does not train, in rounds that know nothing of it, too.
    append_round(run_dir, line | {"round": 6, "clusters": others, "virtual": {}})
    assert clusters_of(page)[1]["lost"] == 5
    append_round(run_dir, line | {"round": 7})
    assert clusters_of(page)[1]["lost"] is None


def test_a_device_whose_process_has_ended_is_told_of_between_rounds_until_its_cluster_is_heard(page, run_dir, line):
    def signs():
        return [(s["cluster"], s["device"], s["state"]) for s in state_of(page)["signs_now"]]

    with LiveNews(run_dir) as news:
        ended = [LifeSign(1, "ended", 3.0), LifeSign(2, "silent", 1.0)]
        news.hear(0, 5, ClusterNews(round=5, signs=ended).to_text())
        assert signs() == [(0, 1, "ended"), (0, 2, "silent")]
        news.hear(0, 5, ClusterNews(round=5, is_over=True).to_text())
        append_round(run_dir, line | {"round": 5})
        assert signs() == [(0, 1, "ended")]
        [sign] = state_of(page)["signs_now"]
        assert 3.0 <= sign["seconds"] < 60 and sign["text"].startswith("cluster 0, device 1: its process ended ")
        news.hear(0, 6, ClusterNews(round=6).to_text())
        assert signs() == []


def test_a_cluster_of_an_endless_number_costs_the_page_no_memory(page, run_dir, line):
    """Each cluster up to the largest number has a letter: a trillion of them had no end."""
    append_round(run_dir, line | {"round": 5, "clusters": [], "failed": [{"cluster": 10**12, "reason": "gone"}]})
    assert len(state_of(page)["rounds"][-1]["states"]) == 10_000
