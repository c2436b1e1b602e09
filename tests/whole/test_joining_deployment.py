"""From bare machines to a training by the page's commands: two on the edge server, one on each other machine."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flower_app.cli.options import ExitCode
from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.ray_node import FIRST_PORT
from flower_app.runs.phases import TRAINING
from helpers.bare_machines import CONFIG, ONE_CLUSTER, Machines
from helpers.deployed_stack import PATIENCE_S, with_sets
from helpers.hosts import Loopback, Namespaces, namespaces_missing

pytestmark = [pytest.mark.slow, pytest.mark.promise]

NAMES = ["server", "cu", "device"]
GET = """
import ssl, sys, urllib.request
address, token_file, authority = sys.argv[1:]
request = urllib.request.Request(address, headers={"Authorization": f"Bearer {open(token_file).read().strip()}"})
context = ssl.create_default_context(cafile=authority) if address.startswith("https:") else None
print(urllib.request.urlopen(request, timeout=120, context=context).read().decode(), end="")
"""


@pytest.fixture(params=["namespaces", "loopback"])
def machines(request, tmp_path):
    reason = namespaces_missing()
    if request.param == "namespaces" and reason:
        pytest.skip(reason)
    if request.param == "loopback" and not reason:
        pytest.skip("the same ran in network namespaces")
    with (Namespaces if request.param == "namespaces" else Loopback)(NAMES) as hosts:
        yield Machines(hosts, tmp_path)


def scraped(machines, name):
    """Read a machine's metrics as Prometheus on the edge server's machine does: value by metric, and device."""
    address, token = machines.wait_for(name, r"metrics: (\S+), for the token in (\S+)").groups()
    assert address.startswith("http:" if name == "server" or machines.is_loopback else "https:")
    authority = machines.folder / name / "collapipe-state" / "joined" / "cluster.pem"
    answer = machines.hosts.run("server", sys.executable, "-c", GET, address, token, authority)
    assert answer.returncode == 0, answer.stderr
    return {
        (sample.name, sample.labels.get("device")): sample.value
        for family in text_string_to_metric_families(answer.stdout)
        for sample in family.samples
    }


@pytest.mark.timeout(1200)
def test_boxes_join_train_and_are_refused_once_they_are_revoked(machines):
    started, started_at = time.monotonic(), time.time()
    server = machines.hosts.address("server")
    ports = machines.own("server", port=SUPERLINK_PORT, join_port=9095)
    machines.start(
        "server", "up", "edge-server", "--name", server, "--codes", 2, "--auto-approve", "--metrics", 0, *ports
    )
    machines.wait_for("server", "with --data FOLDER on a control unit")
    codes = re.findall(r"collapipe join (\S+)", machines.words("server"))
    own = machines.own("cu", ray_port=FIRST_PORT, runtime_port=9094)
    small = ("--object-store-mb", 80)
    # Others may ask it, under TLS by the certificate that it has got.
    metrics = ("--metrics", f"{machines.hosts.address('cu')}:0")
    machines.start("cu", "join", codes[0], "--control-unit", "--device", 0, *metrics, *small, *own)
    own = machines.own("device", ray_port=FIRST_PORT)
    machines.start("device", "join", codes[1], "--cluster", 0, *small, *own)
    # The second command on the edge server is the run itself.
    machines.wait_for("cu", "SuperNode ID")
    machines.wait_for("device", "device 1 of .* is up")
    joined_s = time.monotonic() - started
    (machines.folder / "server" / "scenario.toml").write_text(ONE_CLUSTER)
    (machines.folder / "server" / "run.toml").write_text(CONFIG)
    address = f"{server}:{SUPERLINK_PORT + machines.hosts.ports('server')}"
    sets = with_sets([f"decoder.bind={server}:0"] if machines.is_loopback else [])
    run = machines.run("server", "run", "--superlink", address, "--config", "run.toml", "--json", *sets)
    summary = json.loads(run.stdout)
    lines = (Path(summary["run_dir"]) / "rounds.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    assert [line["faults"] for line in rounds] == [[]] and len(rounds[0]["clusters"][0]["devices"]) == 2
    phases = (Path(summary["run_dir"]) / "phases.jsonl").read_text().splitlines()
    (first_s,) = [p["began"] - started_at for p in map(json.loads, phases) if p["phase"] == TRAINING]
    print(f"both boxes up after {joined_s:.0f} s, training begins after {first_s:.0f} s")
    of_server, of_unit = scraped(machines, "server"), scraped(machines, "cu")
    assert (of_server["collapipe_round", None], of_server["collapipe_running", None]) == (1, 0)
    assert (of_unit["collapipe_cu_rounds_total", None], of_unit["collapipe_cu_in_round", None]) == (1, 0)
    assert all(of_unit["collapipe_cu_device_memory_bytes", device] > 0 for device in ("0", "1"))
    # A device that is revoked is out, and the rest of its cluster goes on with other secrets.
    secret = (machines.folder / "server" / "certs" / "devices-0" / "ray-token").read_text()
    words_before = len(machines.words("cu"))
    machines.run("server", "revoke", "--box", "device-0-1")
    assert machines.programs["device"].wait(PATIENCE_S) != 0, machines.said()
    assert "this box was revoked on the edge server" in machines.words("device")
    machines.wait_for("cu", "starting cu-0 with its new secret")
    machines.wait_for("cu", "SuperNode ID", words_before)
    assert (machines.folder / "server" / "certs" / "devices-0" / "ray-token").read_text() != secret
    # Refused while the edge server goes on.
    machines.run("server", "revoke", "--cluster", 0)
    machines.wait_for("server", "cu-0 may no longer connect")
    assert machines.programs["cu"].wait(PATIENCE_S) != 0, machines.said()
    # By the code that it has joined by, and by the same code as if it were another box.
    refusals = {"cu": "cu-0 starts nothing: this box was revoked", "other": "another box has shown this code before"}
    for state, reason in refusals.items():
        words_before = len(machines.words("cu"))
        options = ("--control-unit", "--device", 0, *small, *machines.own("cu"))
        machines.start("cu", "join", codes[0], *options, *(("--state", state) if state == "other" else ()))
        assert machines.programs["cu"].wait(PATIENCE_S) == ExitCode.BAD_INPUT, machines.said()
        words = machines.words("cu")[words_before:]
        assert reason in words and "is up" not in words, words
    again = json.loads(machines.run("server", "boxes", "--json").stdout)
    assert [box["status"] for box in again["boxes"]] == ["revoked", "revoked"]
    assert machines.programs["server"].poll() is None
