"""Delay until a run's page shows devices that are killed, frozen or cut off while the run goes on."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from helpers.command_line import sets
from helpers.patience import eventually, patient
from helpers.signals import default_signals
from helpers.watched_page import AskedPage

pytestmark = [pytest.mark.slow, pytest.mark.promise]

PATIENCE_S = 1_000
FAULTS = {
    "num_rounds": 8,
    "local_steps": 8,
    "faults.device": 0.5,
    "faults.freeze": 0.5,
    "faults.freeze-seconds": 6.0,
    "faults.stream": 0.0,
    "faults.partition": 0.3,
    "faults.partition-seconds": 6.0,
    "faults.seed": 3,
    "runtime.devices-per-actor": 1,
    "scenario": "edge-boxes",
}


def injected(run_dir):
    """Faults that were injected so far; the last line of a file may be half."""
    lines = [line for path in run_dir.glob("clusters/*/injected.jsonl") for line in path.read_text().splitlines(True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def delays(run_dir, seen):
    """Return the delay of each injected fault on the page [s]; None: not yet, by kind."""
    found = {}
    for fault in injected(run_dir):
        kinds = {"device": ("ended", "device"), "freeze": ("silent", "freeze"), "partition": ("silent",)}[fault["kind"]]
        device = None if fault["kind"] == "partition" else fault["device"]
        times = [seen[key][0] for kind in kinds if (key := (fault["round"], fault["cluster"], device, kind)) in seen]
        found.setdefault(fault["kind"], []).append(min(times) - fault["time"] if times else None)
    return found


def all_kinds_shown(found):
    shown = {kind for kind, values in found.items() if any(s is not None for s in values)}
    return shown == {"device", "freeze", "partition"}


def told_at_the_terminal(words):
    return "lost its process" in words and "no sign of life for" in words


@pytest.mark.timeout(1200)
def test_a_kill_a_freeze_and_a_cut_are_on_the_page_as_they_happen(tmp_path):
    command = [sys.executable, "-m", "flower_app.cli", "run", "--watch", "--watch-port", "0", *sets(**FAULTS)]
    log = tmp_path / "log"
    with log.open("wb") as file:
        run = subprocess.Popen(
            command, cwd=tmp_path, stdout=file, stderr=file, env=os.environ, preexec_fn=default_signals
        )
    seen = {}
    try:

        def address():
            match = re.search(r"watch: (\S+)", log.read_text())
            assert match or run.poll() is None, log.read_text()
            return match

        page = AskedPage(eventually(address, PATIENCE_S, log.read_text, poll_s=0.1)[1])
        page.get("state?after=0&log=0")
        (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
        # Until each kind was shown once: the rest of the rounds would say the same.
        deadline = time.monotonic() + patient(PATIENCE_S)
        while run.poll() is None and time.monotonic() < deadline:
            try:
                present = page.get("state?after=0&log=0")
            except OSError:
                # The page ends with the run.
                break
            for sign in present["signs_now"]:
                key = (sign["round"], sign["cluster"], sign["device"], sign["state"])
                seen.setdefault(key, (time.time(), sign["text"]))
            for fault in present["faults_now"]:
                key = (fault["round"], fault["cluster"], fault["device"], fault["kind"])
                seen.setdefault(key, (time.time(), fault["reason"]))
            if all_kinds_shown(delays(run_dir, seen)) and told_at_the_terminal(log.read_text()):
                break
            # As often as the page itself does.
            time.sleep(0.4)
    finally:
        run.terminate()
        run.wait(120)
    words, found = log.read_text(), delays(run_dir, seen)
    print({kind: [None if s is None else round(s, 1) for s in values] for kind, values in found.items()})
    assert all_kinds_shown(found), (found, words[-3000:])
    texts = [text for (_, _, _, state), (_, text) in seen.items() if state == "silent"]
    assert all(re.search(r"no sign of life for \d+ s$", text) for text in texts) and texts
    # At the terminal, too, while its round goes on.
    assert told_at_the_terminal(words)
