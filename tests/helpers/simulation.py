"""A real Flower simulation in a process of its own: in this one its end would take the tests' Ray along.

It serves all tests, one after the other: Ray and the clients' processes start once. A test sees as many of its nodes as
it wants.
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

from client_pipeline.runtime.ray.private_ray import ATTEMPTS, NODE_IS_LATE, private_environment

MOST_NODES, AT_ONCE = 7, 2
"""Nodes that there are, and how many of them answer at once: a process for each costs seconds."""
TIMEOUT_S = 560.0
_PLACE = "query.place"
"""A message that a node answers with its cluster."""
_STARTED = []


def simulate(server, client, num_nodes=2):
    """Run ``server(grid)`` and ``client(message, cluster)``, or a ClientApp; returns what the server returned."""
    assert num_nodes <= MOST_NODES
    for attempts_left in reversed(range(ATTEMPTS)):
        if not _STARTED:
            _STARTED.append(_Simulation())
        try:
            kind, value = _STARTED[0].run(server, client, num_nodes)
            break
        except BaseException as error:
            end_simulations()
            if NODE_IS_LATE not in str(error) or not attempts_left:
                raise
    if kind == "error":
        raise value
    return value


def end_simulations():
    """End it, if it was started."""
    while _STARTED:
        _STARTED.pop().end()


class _Simulation:
    """The process, and the folder through which it gets its jobs."""

    def __init__(self):
        self.files = tempfile.TemporaryDirectory()
        self.folder = Path(self.files.name)
        self.number = 0
        with (self.folder / "log").open("wb") as log:
            command = [sys.executable, __file__, str(self.folder)]
            # Else Flower's simulation would join a Ray that somebody has started on this machine.
            environment = os.environ | private_environment() | {"RAY_ADDRESS": "local"}
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def run(self, server, client, num_nodes):
        self.number += 1
        (self.folder / f"client-{self.number}").write_bytes(cloudpickle.dumps(client))
        _write(self.folder / f"server-{self.number}", cloudpickle.dumps((server, num_nodes)))
        outcome, deadline = self.folder / f"outcome-{self.number}", time.monotonic() + TIMEOUT_S
        while not outcome.exists():
            alive = self.process.poll() is None
            assert alive and time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.05)
        return cloudpickle.loads(outcome.read_bytes())

    def end(self):
        _write(self.folder / "end", b"")
        try:
            self.process.wait(timeout=240)
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


def _nodes_by_cluster(grid):
    """Node ids, sorted by what the nodes say that they are."""
    from flwr.app import Message, RecordDict

    while len(nodes := list(grid.get_node_ids())) < MOST_NODES:
        time.sleep(0.02)
    answers = grid.send_and_receive([Message(RecordDict(), node, _PLACE) for node in nodes])
    places = {answer.metadata.src_node_id: answer.content["c"]["partition"] for answer in answers}
    return sorted(nodes, key=places.__getitem__)


def _main(folder):
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    parent, server_app = os.getppid(), ServerApp()

    @server_app.main()
    def main(grid, context):
        number, nodes = 1, _nodes_by_cluster(grid)
        while os.getppid() == parent and not (folder / "end").exists():
            job = folder / f"server-{number}"
            if not job.exists():
                time.sleep(0.02)
                continue
            (folder / "number").write_text(str(number))
            try:
                server, num_nodes = cloudpickle.loads(job.read_bytes())
                grid.get_node_ids = lambda seen=nodes[:num_nodes]: [*seen]
                result = ("value", server(grid))
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
            cluster, kind = int(context.node_config["partition-id"]), message.metadata.message_type
            if kind == _PLACE:
                return self.place(message, cluster)
            number = (folder / "number").read_text()
            if number != self.number:
                self.number, self.client = number, cloudpickle.loads((folder / f"client-{number}").read_bytes())
            if isinstance(self.client, ClientApp):
                return self.client(message, context)
            return self.client(message, cluster) if kind == "train" else self.place(message, cluster)

        def place(self, message, cluster):
            return Message(RecordDict({"c": ConfigRecord({"partition": cluster})}), reply_to=message)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": AT_ONCE}}
    run_simulation(server_app, Relay(), num_supernodes=MOST_NODES, backend_config=backend)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
