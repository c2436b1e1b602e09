"""A real Flower simulation in a process of its own: in this one its end would take the tests' Ray along."""

import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import cloudpickle

BACKEND = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}


def simulate(server, client, num_nodes=2):
    """Run ``server(grid)`` and ``client(message, cluster)``, or a ClientApp; returns what the server returned."""
    with tempfile.TemporaryDirectory() as folder:
        job, outcome = Path(folder) / "job", Path(folder) / "outcome"
        job.write_bytes(cloudpickle.dumps((server, client, num_nodes)))
        command = [sys.executable, __file__, str(job), str(outcome)]
        done = subprocess.run(command, timeout=280, capture_output=True, text=True, check=False)
        assert outcome.exists(), done.stderr[-3000:]
        kind, value = cloudpickle.loads(outcome.read_bytes())
    if kind == "error":
        raise value
    return value


def _run(job, outcome):
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    server, client, num_nodes = cloudpickle.loads(job.read_bytes())
    server_app = ServerApp()

    @server_app.main()
    def main(grid, context):
        try:
            result = ("value", server(grid))
        except Exception as error:
            # Its traceback stays behind in this process.
            error.add_note(traceback.format_exc())
            result = ("error", error)
        outcome.write_bytes(cloudpickle.dumps(result))

    client_app = client
    if not isinstance(client, ClientApp):
        client_app = ClientApp()

        @client_app.train()
        def train(message, context):
            return client(message, int(context.node_config["partition-id"]))

        @client_app.query()
        def query(message, context):
            answer = ConfigRecord({"partition": context.node_config["partition-id"]})
            return Message(RecordDict({"c": answer}), reply_to=message)

    run_simulation(server_app, client_app, num_supernodes=num_nodes, backend_config=BACKEND)


if __name__ == "__main__":
    _run(*map(Path, sys.argv[1:]))
