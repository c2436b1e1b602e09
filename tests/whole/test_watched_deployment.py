"""The page of a deployed run, in headless Chromium where there is one: a kill, a freeze and cuts, seen in time."""

import contextlib
import os
import re
import signal
import time

import pytest

from flower_app.launch.superlink import flower_environment
from helpers.deployed_stack import COLLAPIPE, PATIENCE_S
from helpers.hosts import Namespaces, namespaces_missing
from helpers.lost_machines import lone_stack
from helpers.patience import eventually
from helpers.run_history import History
from helpers.running_programs import running
from helpers.watched_page import BROWSER, VISIBLE_S, AskedPage, ShownPage, chromium, seconds_until

pytestmark = pytest.mark.slow

UNEQUAL = """
[[cluster]]
devices = 2

[[cluster]]
devices = 1
"""
PACED = ("local-steps=8", 'device-emulation="paced"', "time-scale=0.05")
"""A round takes some seconds, most of them asleep, so that a fault falls into its midst and is seen at once."""


@pytest.fixture
def page_of(tmp_path):
    """Watch a run: in a browser, else by asking for what the browser would ask for."""
    with contextlib.ExitStack() as ends:

        def open_page(run_dir):
            log = tmp_path / "watch.log"
            command = [*COLLAPIPE, "watch", str(run_dir), "--port", "0"]
            environment = flower_environment(tmp_path / "watch")
            ends.enter_context(running(command, environment, log, lambda: "/?token=" in log.read_text()))
            address = re.search(r"http://\S+", log.read_text()).group()
            try:
                from playwright import sync_api
            except ModuleNotFoundError:
                return AskedPage(address)
            if not BROWSER:
                return AskedPage(address)
            page = ends.enter_context(chromium(sync_api)).new_page(viewport={"width": 1280, "height": 900})
            page.goto(address)
            return ShownPage(page)

        yield open_page


@pytest.mark.timeout(1200)
def test_a_kill_a_freeze_and_a_cut_of_machines_are_on_the_page_as_they_happen(tmp_path, page_of):
    if reason := namespaces_missing():
        pytest.skip(reason)
    with Namespaces(["server", "cu0", "cu1", "d01"]) as hosts:
        stack = lone_stack(hosts, tmp_path, 2, rounds=100)
        scenario = tmp_path / "server" / "scenario.toml"
        scenario.write_text(scenario.read_text().replace("clusters = 2\ndevices = 1\n", "") + UNEQUAL)
        stack.start()
        stack.start_device(0, 1)
        stack.wait_for("d01", "is up")
        run, run_dir = stack.begin(*PACED, config=tmp_path / "server" / "run.toml")
        history = History(stack, run, run_dir)
        page = page_of(run_dir)

        def in_a_round(*clusters):
            """Wait for the midst of a round of all clusters; the page complains of nothing."""
            seen = len(history.rounds)
            history.until(lambda: len(history.rounds) > seen and history.rounds[-1].is_whole)
            history.until_connected(*clusters)
            time.sleep(0.7)
            seconds_until(page.now, lambda text: not text)

        def actor_in_a_round():
            """The process that a device runs in."""
            in_a_round(0, 1)
            return eventually(lambda: hosts.actors("d01"), words=lambda: hosts.processes("d01"))[0]

        def seen_s(*words):
            return seconds_until(page.now, lambda text: all(part in text for part in words), patience_s=30)

        actor = actor_in_a_round()
        os.kill(actor, signal.SIGKILL)
        killed_s = seen_s("cluster 0, device 1", "its process ended")

        actor = actor_in_a_round()
        os.kill(actor, signal.SIGSTOP)
        frozen_s = seen_s("cluster 0, device 1: no sign of life for ")
        counted_s = seen_s("cluster 0, device 1: no sign of life for 3 s")
        os.kill(actor, signal.SIGCONT)

        in_a_round(0, 1)
        hosts.connect("d01", False)
        cut_device_s = seen_s("cluster 0, device 1: no sign of life for ")
        hosts.connect("d01", True)

        in_a_round(0, 1)
        hosts.connect("cu1", False)
        cut_s = seen_s("cluster 1: no sign of life for ")
        hosts.connect("cu1", True)

        print(f"{type(page).__name__}: kill {killed_s:.2f}, freeze {frozen_s:.2f} (3 s: {counted_s:.2f})", end=", ")
        print(f"cut of a device {cut_device_s:.2f}, of a control unit {cut_s:.2f} s")
        assert max(killed_s, frozen_s, cut_device_s, cut_s) < VISIBLE_S
        assert getattr(page, "errors", []) == []
        run.send_signal(signal.SIGINT)
        run.wait(PATIENCE_S)
        hosts.running.remove(run)
