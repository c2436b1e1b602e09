"""Real Flower simulations in processes of their own: in this one their end would take the tests' Ray along.

Each serves all tests that want its number of nodes, one after the other: Ray and the clients' processes start once.
"""

import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import cloudpickle
import psutil

from client_pipeline.runtime.private_ray import private_environment

PAIR = 2
"""So many clients answer at once. More than these do so one after the other: a process for each costs seconds."""
TIMEOUT_S = 560.0
_STARTED = {}


def simulate(server, client, num_nodes=2):
    """Run ``server(grid)`` and ``client(message, cluster)``, or a ClientApp; returns what the server returned."""
    if num_nodes not in _STARTED:
        _STARTED[num_nodes] = _Simulation(num_nodes)
    try:
        kind, value = _STARTED[num_nodes].run(server, client)
    except BaseException:
        _STARTED.pop(num_nodes).end()
        raise
    if kind == "error":
        raise value
    return value


def end_simulations():
    """End all that were started."""
    while _STARTED:
        _STARTED.popitem()[1].end()


class _Simulation:
    """The process, and the folder through which it gets its jobs."""

    def __init__(self, num_nodes):
        self.files = tempfile.TemporaryDirectory()
        self.folder = Path(self.files.name)
        self.number = 0
        with (self.folder / "log").open("wb") as log:
            command = [sys.executable, __file__, str(self.folder), str(num_nodes)]
            # Else Flower's simulation would join a Ray that somebody has started on this machine.
            environment = os.environ | private_environment() | {"RAY_ADDRESS": "local"}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def run(self, server, client):
        self.number += 1
        (self.folder / f"client-{self.number}").write_bytes(cloudpickle.dumps(client))
        _write(self.folder / f"server-{self.number}", cloudpickle.dumps(server))
        outcome, deadline = self.folder / f"outcome-{self.number}", time.monotonic() + TIMEOUT_S
        while not outcome.exists():
            alive = self.process.poll() is None
            assert alive and time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.05)
        return cloudpickle.loads(outcome.read_bytes())

    def end(self):
        _write(self.folder / "end", b"")
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            family = psutil.Process(self.process.pid)
            for process in [*family.children(recursive=True), family]:
                process.kill()
            self.process.wait()
        self.files.cleanup()


def _write(path, data):
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(data)
    aside.rename(path)


def _main(folder, num_nodes):
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    parent, server_app = os.getppid(), ServerApp()

    @server_app.main()
    def main(grid, context):
        number = 1
        while os.getppid() == parent and not (folder / "end").exists():
            job = folder / f"server-{number}"
            if not job.exists():
                time.sleep(0.02)
                continue
            (folder / "number").write_text(str(number))
            try:
                result = ("value", cloudpickle.loads(job.read_bytes())(grid))
            except Exception as error:
                # Its traceback stays behind in this process.
                error.add_note(traceback.format_exc())
                result = ("error", error)
            _write(folder / f"outcome-{number}", cloudpickle.dumps(result))
            number += 1

    class Relay(ClientApp):
        """Has the job's own client answer."""

        number = None

        def __call__(self, message, context):
            number = (folder / "number").read_text()
            if number != self.number:
                self.number, self.client = number, cloudpickle.loads((folder / f"client-{number}").read_bytes())
            if isinstance(self.client, ClientApp):
                return self.client(message, context)
            cluster = int(context.node_config["partition-id"])
            if message.metadata.message_type == "train":
                return self.client(message, cluster)
            return Message(RecordDict({"c": ConfigRecord({"partition": cluster})}), reply_to=message)

    at_once = num_nodes if num_nodes <= PAIR else 1
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": at_once}}
    run_simulation(server_app, Relay(), num_supernodes=num_nodes, backend_config=backend)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
