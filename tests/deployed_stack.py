"""The whole stack of a deployment on test machines: an edge server, two control units, two devices each."""

import json
import os
import sys
import time
from pathlib import Path

from client_pipeline.link.hosts import is_loopback
from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.ray_node import FIRST_PORT

NUM_CLUSTERS, NUM_DEVICES = 2, 2
NAMES = ["server", "cu0", "cu1", "d00", "d01", "d10", "d11"]
PATIENCE_S = 400
# Seven machines share this one's memory: none of them is short of it because all of them together are.
ENVIRONMENT = os.environ | {"RAY_memory_monitor_refresh_ms": "0"}
COLLAPIPE = (sys.executable, "-m", "flower_app.cli")


class Stack:
    """Programs of all machines, as a reader of docs/deployment.md starts them."""

    def __init__(self, hosts, folder, data):
        self.hosts, self.folder, self.data = hosts, folder, data
        self.certs = folder / "certs"
        self.shared_ports = is_loopback(hosts.address("server"))

    @property
    def superlink(self):
        return f"{self.hosts.address('server')}:{SUPERLINK_PORT + self.hosts.ports('server')}"

    def log(self, name):
        return self.folder / f"{name}.log"

    def up(self, name, *arguments):
        state = () if name.startswith("d") else ("--state", self.folder / f"state-{name}")
        arguments = (*COLLAPIPE, "up", *arguments, "--host", self.hosts.address(name), *state)
        return self.hosts.start(name, *arguments, log=self.log(name), env=ENVIRONMENT)

    def start(self):
        clusters = ("--clusters", str(NUM_CLUSTERS), "--out", self.certs)
        made = self.hosts.run("server", *COLLAPIPE, "certs", "--server", self.hosts.address("server"), *clusters)
        assert made.returncode == 0, made.stderr
        port = SUPERLINK_PORT + self.hosts.ports("server")
        self.up("server", "edge-server", "--certs", self.certs / "server", "--port", port)
        self.wait_for("server", "SuperLink at")
        # One after the other: all at once would be seven starts of Ray on the one machine that this is.
        for cluster in range(NUM_CLUSTERS):
            self.start_cu(cluster)
            self.wait_for(f"cu{cluster}", "SuperNode ID")
            for device in range(NUM_DEVICES):
                self.start_device(cluster, device)
                self.wait_for(f"d{cluster}{device}", "is up")

    def start_cu(self, cluster):
        name = f"cu{cluster}"
        ports = self.hosts.ports(name)
        self.up(
            name,
            "cu",
            *("--cluster", cluster, "--server", self.superlink, "--certs", self.certs / f"cu-{cluster}"),
            *("--data", self.data[cluster], "--object-store-mb", 80),
            *(("--ray-port", FIRST_PORT + ports, "--runtime-port", 9094 + ports) if ports else ()),
        )

    def start_device(self, cluster, device):
        name, cu = f"d{cluster}{device}", f"cu{cluster}"
        ports = self.hosts.ports(name)
        self.up(
            name,
            "device",
            *("--device", device, "--cu", f"{self.hosts.address(cu)}:{FIRST_PORT + self.hosts.ports(cu)}"),
            *("--certs", self.certs / f"devices-{cluster}", "--object-store-mb", 80, "--wait", PATIENCE_S),
            *(("--ray-port", FIRST_PORT + ports) if ports else ()),
        )

    def wait_for(self, name, words):
        deadline = time.monotonic() + PATIENCE_S
        while words not in (said := self.log(name).read_text(errors="replace")):
            ended = [child.args for child in self.hosts.running if child.poll() is not None]
            assert not ended, f"{ended[0]} ended: {self.said()}"
            assert time.monotonic() < deadline, f"{name}: no {words!r} in: {said[-3000:]}"
            time.sleep(0.5)

    def said(self):
        """The last words of all programs, for a failure."""
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log")
        )

    def train(self, *sets, config):
        """Run a training; returns its directory."""
        where = ("--superlink", self.superlink, "--certs", self.certs / "server", "--config", config)
        done = self.hosts.run("server", *COLLAPIPE, "run", *where, "--json", *with_sets(sets), cwd=self.folder)
        assert done.returncode == 0, f"{done.stderr}\n{self.said()}"
        return Path(json.loads(done.stdout)["run_dir"])


def with_sets(sets):
    return [argument for pair in sets for argument in ("--set", pair)]
