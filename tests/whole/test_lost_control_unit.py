"""A control unit whose machine dies in the midst of a deployed run: the others go on, and it comes back."""

import json
import math
import re
import signal

import pytest

from helpers.deployed_stack import PATIENCE_S
from helpers.hosts import Namespaces, namespaces_missing
from helpers.lost_machines import lone_stack
from helpers.repository import ROOT
from helpers.run_history import History
from strategies.grid.reply_timeouts import LOST_S

pytestmark = pytest.mark.slow

CLUSTERS, ROUNDS = 3, 200
PACED = ('device-emulation="paced"', "time-scale=0.1")
"""Rounds take some seconds, most of them asleep: those that are lost are waited for, and nothing is in a hurry."""
NORMAL_ROUNDS = 3
"""A round that a cluster leaves may take this many times as long as one before, beside the time until it is out."""

KILLED_IN_TRAINING = "is killed while it trains"
KILLED_OTHERWISE = "is killed before it has said hello, or as its update goes up"
CUT_OFF = "is cut off, or hangs"
"""Rows of the table of docs/faults.md."""


def promised_s(row):
    """Return the longest stay of a lost control unit in its round, from a row of docs/faults.md's table [s]."""
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    seconds = {"20 s": 20.0, "about a minute": 60.0, "two minutes": 120.0}
    return seconds[re.search(rf"^\| {row} \| within (.*?) \|", page, re.MULTILINE)[1]]


def check_went_on_in_time(history, cluster, row):
    """The round that a cluster left was ended by what notices the loss, and by none of the timeouts behind it.

    These are three minutes and more: ``decoder.step-timeout``, ``join-timeout`` and ``reply-timeout``, and the grace of
    a run without nodes.
    """
    waited_s, reason = history.went_on(cluster)
    allowed_s = promised_s(row) + LOST_S + NORMAL_ROUNDS * history.absences[cluster].normal_s
    print(f"cluster {cluster}: the others went on after {waited_s:.1f} s, {allowed_s:.1f} s are allowed: {reason}")
    assert waited_s <= allowed_s


def check_leaves_in_time(history, cluster):
    """Check it of a cluster that was killed; it may have been between two rounds."""
    history.went_on(cluster)
    absence = history.absences[cluster]
    row = KILLED_IN_TRAINING if absence.trained else KILLED_OTHERWISE
    if absence.trained:
        # Whatever rounds take on a busy machine: not as long as heartbeats that are missed, let alone a timeout.
        print(f"cluster {cluster}: the others waited for {absence.waited_s:.1f} s since its stream broke off")
        assert absence.waited_s <= 2 * (promised_s(row) + LOST_S) < promised_s(CUT_OFF)
    check_went_on_in_time(history, cluster, row)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """One deployed run, of which machines are lost in both tests; the second goes on where the first has ended."""
    if reason := namespaces_missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("lost")
    with Namespaces(["server", *(f"cu{cluster}" for cluster in range(CLUSTERS))]) as hosts:
        stack = lone_stack(hosts, folder, CLUSTERS, ROUNDS)
        stack.start()
        history = History(stack, *stack.begin(*PACED, config=folder / "server" / "run.toml"))
        history.until(lambda: len(history.rounds) >= 3)
        yield history


@pytest.mark.timeout(1800)
def test_a_control_unit_whose_machine_dies_is_left_out_and_comes_back(history):
    # Both in the midst of a round: one machine starts again at once, the other after 25 s.
    history.until_trained_by(1, 2)
    history.until_connected(1, 2)
    history.lose({1: 0.0, 2: 25.0})
    for cluster in (1, 2):
        check_leaves_in_time(history, cluster)
    for cluster in (1, 2):
        assert history.rounds_until_back(cluster)[0] <= 2

    # Once more: one after 5 s, the other never.
    history.until_trained_by(1, 2)
    history.until_connected(1, 2)
    history.lose({1: 5.0, 2: math.inf})
    for cluster in (1, 2):
        check_leaves_in_time(history, cluster)
    assert history.rounds_until_back(1)[0] <= 2
    history.until(lambda: 2 not in history.rounds[-1].clusters and 1 in history.rounds[-1].clusters)
    assert all(0 in round_.clusters for round_ in history.rounds)
    # Flower refuses a node that it takes to be connected still, and its SuperNode ends: it is started again until then.
    starts_again = history.stack.log("cu1").read_text(errors="replace").count("it is started again")
    print(f"cluster 1: its SuperNode was started again {starts_again} times in two absences")
    assert starts_again <= 12
    # The terminal has said whom it waited for.
    terminal = history.stack.log("run").read_text()
    assert "waiting for cluster 1: its" in terminal and "waiting for cluster 2: its" in terminal, terminal


@pytest.mark.timeout(1800)
def test_a_control_unit_that_is_cut_off_is_left_out_and_comes_back(history):
    """Its processes live on: nothing ends a connection but the silence."""
    history.until_trained_by(0, 1)
    history.until_connected(1)
    history.pull_network(1, math.inf)
    check_went_on_in_time(history, 1, CUT_OFF)
    assert all(0 in round_.clusters for round_ in history.rounds)
    history.bring_back(1)
    assert history.rounds_until_back(1)[0] <= 2


@pytest.mark.timeout(1800)
def test_what_the_run_and_its_control_units_have_written_fits_together(history, history_checker):
    run, run_dir, stack = history.run, history.run_dir, history.stack
    run.send_signal(signal.SIGINT)
    run.wait(PATIENCE_S)
    stack.hosts.running.remove(run)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    folders = {n: stack.folder / f"state-cu{n}/checkpoints/{run_dir.name}/cluster-{n}" for n in range(CLUSTERS)}
    sizes = {"clusters": CLUSTERS, "local-steps": 2, "batch-size": 8}
    assert history_checker.problems(history_checker.read(run_dir, folders, sizes)) == []
