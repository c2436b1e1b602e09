"""The whole stack of a deployment on test machines: an edge server, two control units, three and two devices."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import psutil

from client_pipeline.link.hosts import is_loopback
from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.ray_node import FIRST_PORT
from helpers.joining import edge_folder, joined_by_files
from helpers.patience import eventually

NUM_DEVICES = (3, 2)
"""Number of devices of each cluster."""
NAMES = ["server", "cu0", "cu1", *(f"d{c}{device}" for c, number in enumerate(NUM_DEVICES) for device in range(number))]
PATIENCE_S = 400
# Eight machines share this one's memory: none of them is short of it because all of them together are.
ENVIRONMENT = os.environ | {
    "RAY_memory_monitor_refresh_ms": "0",
    # A device that has lost its control unit's Ray waits a minute for it; here it is known to be gone.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
}
COLLAPIPE = (sys.executable, "-m", "flower_app.cli")
SCENARIO = """
format = "collapipe-scenario/1"
clusters = {clusters}
devices = {devices}

[device]
flop-per-cycle = {flop_per_cycle}
frequency-ghz = 0.5
memory-gb = 1.5

[block]
memory-gb = 0.375

[planner]
blocks = 2
gamma-max = 5.0
"""
CONFIG = """
name = "deployed"
scenario = "scenario.toml"
num-rounds = {rounds}
local-steps = 2
batch-size = 8
evaluate-every = 0
policy = "uniform"

[data]
source = "files"
partition = "nodes"
train-source = "train-{{cluster}}.en"
train-target = "train-{{cluster}}.de"
test-source = "test.en"
test-target = "test.de"
tokenizer = "tokenizer"

[model]
width = 16
num-heads = 2
feed-forward = 32
encoder-layers = {layers}
decoder-layers = 1
dropout = 0.1

[decoder]
join-timeout = 300.0

[runtime]
timeout = 300.0
"""


def write_text(folder, name, pairs):
    folder.mkdir(exist_ok=True)
    for ending, side in (("en", 0), ("de", 1)):
        (folder / f"{name}.{ending}").write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")


def last_words(folder):
    """Return the ends of all programs' logs, for a failure."""
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in folder.glob("*.log"))


class Stack:
    """Programs of all machines, as a reader of docs/deployment.md starts them."""

    def __init__(self, hosts, folder, data, own_devices=0, profile=None, model=None):
        self.hosts, self.folder, self.data = hosts, folder, data
        self.own_devices = own_devices
        """Devices that each control unit's machine is itself; 0: each device is a machine."""
        self.profile = profile
        """File from which each control unit knows its devices; None: as the server says."""
        self.model = model
        """Folder in which each control unit looks for pretrained weights; None: in the run's own."""
        self.certs = folder / "certs"
        self.shared_ports = is_loopback(hosts.address("server"))
        self.environments = {}
        """Further environment of a machine's programs, by its name."""
        self.boxes = {}
        """Programs of each machine, by its name."""

    @property
    def port(self):
        return SUPERLINK_PORT + self.hosts.ports("server")

    @property
    def superlink(self):
        return f"{self.hosts.address('server')}:{self.port}"

    def log(self, name):
        return self.folder / f"{name}.log"

    def up(self, name, *arguments):
        arguments = (*COLLAPIPE, *arguments, "--state", self.folder / f"state-{name}")
        environment = ENVIRONMENT | self.environments.get(name, {})
        self.boxes[name] = self.hosts.start(name, *arguments, log=self.log(name), env=environment)

    def private_folder(self, name):
        """Folder of a machine's sockets, logs and keys of this start."""
        return Path(json.loads((self.folder / f"state-{name}" / "running.json").read_text())["folder"])

    def cut_power(self, name):
        """End all that runs on a machine at once."""
        box = self.boxes[name]
        # A machine that shares its namespace with no other is known by that; else by who started what.
        family = [box.pid, *(child.pid for child in psutil.Process(box.pid).children(recursive=True))]
        for pid in [*family, *self.hosts.processes(name)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.gone(name)

    def gone(self, name):
        """Wait until a box has ended; a service manager would start it again."""
        box = self.boxes.pop(name)
        box.wait(PATIENCE_S)
        self.hosts.running.remove(box)

    def start(self):
        edge_folder(self.certs, self.hosts.address("server"), superlink_port=self.port)
        # The edge server reads who may connect when it starts.
        for cluster in range(len(self.data)):
            self.join_cu(cluster)
        self.start_server()
        self.wait_for("server", "SuperLink at")
        # One after the other: all at once would be seven starts of Ray on the one machine that this is.
        for cluster in range(len(self.data)):
            self.start_cu(cluster)
            self.wait_for(f"cu{cluster}", "SuperNode ID")
            for device in range(0 if self.own_devices else NUM_DEVICES[cluster]):
                self.start_device(cluster, device)
                self.wait_for(f"d{cluster}{device}", "is up")

    def start_server(self):
        place = ("--host", self.hosts.address("server"), "--certs", self.certs / "server", "--port", self.port)
        self.up("server", "up", "edge-server", *place)

    def join(self, name, **options):
        """Let a machine join by files, once; the next start takes the same place."""
        state, ports = self.folder / f"state-{name}", self.hosts.ports(name)
        if not (state / "joined").is_dir():
            moved = {"ray_port": FIRST_PORT + ports} if ports else {}
            host = self.hosts.address(name)
            joined_by_files(self.certs, state, host, object_store_mb=80, **moved, **options)

    def start_cu(self, cluster):
        self.up(f"cu{cluster}", "join")

    def join_cu(self, cluster):
        ports = self.hosts.ports(f"cu{cluster}")
        options = {"cluster": cluster, "data": str(self.data[cluster]), "devices": list(range(self.own_devices))}
        options |= {"device_profile": str(self.profile)} if self.profile else {}
        options |= {"model": str(self.model)} if self.model else {}
        options |= {"runtime_port": 9094 + ports} if ports else {}
        self.join(f"cu{cluster}", **options)

    def start_device(self, cluster, device):
        self.join(f"d{cluster}{device}", cluster=cluster, devices=[device])
        self.up(f"d{cluster}{device}", "join")

    def wait_for(self, name, words, since=0):
        def said():
            return self.log(name).read_text(errors="replace")[since:]

        def is_said():
            if words in said():
                return True
            assert self.boxes[name].poll() is None, f"{name} ended: {self.said()}"
            return False

        eventually(is_said, PATIENCE_S, lambda: f"{name}: no {words!r} in: {said()[-3000:]}", poll_s=0.1)

    def said(self):
        return last_words(self.folder)

    def train(self, *sets, config):
        """Run a training; returns its directory."""
        command = self.run_command("--config", config, "--json", *with_sets(sets))
        done = self.hosts.run("server", *command, cwd=self.folder)
        assert done.returncode == 0, f"{done.stderr}\n{self.said()}"
        return Path(json.loads(done.stdout)["run_dir"])

    def run_command(self, *arguments):
        return (*COLLAPIPE, "run", "--superlink", self.superlink, "--certs", self.certs / "server", *arguments)

    def begin(self, *sets, config):
        """Start a training; returns its program, and its directory once it is there."""
        runs = self.folder / "runs"
        before = set(runs.glob("*"))
        command = self.run_command("--config", config, *with_sets(sets))
        run = self.hosts.start("server", *command, log=self.log("run"), cwd=self.folder)

        def new():
            assert run.poll() is None, self.log("run").read_text()
            return [path for path in runs.glob("*") if path not in before and not path.is_symlink()]

        return run, eventually(new, PATIENCE_S, self.log("run").read_text, poll_s=0.1)[0]


def with_sets(sets):
    return [argument for pair in sets for argument in ("--set", pair)]
