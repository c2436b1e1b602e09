"""Packets inside a cluster while two device machines train: nothing in them can be read."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.ray_node import FIRST_PORT
from flower_app.runs.run_directory import read_run_config
from flower_app.saved_model import load_model
from flower_app.tasks.base import task
from helpers.bare_machines import CONFIG, ONE_CLUSTER, Machines
from helpers.capture import found_in, recorded
from helpers.deployed_stack import COLLAPIPE, ENVIRONMENT
from helpers.hosts import Namespaces, namespaces_missing
from helpers.joining import edge_folder, joined_by_files

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing()),
]

NAMES = ["server", "cu", "d0", "d1"]
# Steps so small that no number changes: what was on the wire can be computed from the model.
STANDING_STILL = "\n[optimizer]\nname = 'sgd'\nlr = 1e-30\n"
CONTROL = b"a datagram in plain text, which shows that the packets were recorded"
SEND = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[1].encode(), (sys.argv[2], 9))"


class RecordedRun(NamedTuple):
    """Machines, run directory and packets of one run."""

    machines: Machines
    certs: Path
    run_dir: Path
    packets: list[Path]
    """Number of each device's machine."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of a cluster with two device machines."""
    folder = tmp_path_factory.mktemp("wire")
    with Namespaces(NAMES) as hosts:
        machines, certs = Machines(hosts, folder), folder / "certs"
        edge_folder(certs, hosts.address("server"))
        with recorded(hosts, ("d0", "d1"), folder) as files:
            superlink = start(machines, certs)
            (folder / "server" / "scenario.toml").write_text(ONE_CLUSTER)
            config = CONFIG.replace("decoder-layers = 1", "decoder-layers = 1\ndropout = 0.0") + STANDING_STILL
            (folder / "server" / "run.toml").write_text(config)
            options = ("--certs", certs / "server", "--config", "run.toml", "--json")
            done = machines.run("server", "run", "--superlink", superlink, *options)
            for name in ("d0", "d1"):
                hosts.run(name, sys.executable, "-c", SEND, CONTROL.decode(), hosts.address("cu"))
        yield RecordedRun(machines, certs, Path(json.loads(done.stdout)["run_dir"]), files)


def start(machines, certs):
    address = machines.hosts.address
    boxes = {"cu": {}, "d0": {"cluster": 0}, "d1": {"cluster": 0}}
    # The edge server reads who may connect when it starts.
    for name, options in boxes.items():
        joined_by_files(certs, machines.folder / f"state-{name}", address(name), object_store_mb=80, **options)
    machines.start("server", "up", "edge-server", "--host", address("server"), "--certs", certs / "server")
    machines.wait_for("server", "SuperLink at .* is up")
    for name, options in boxes.items():
        machines.start(name, "join", "--state", machines.folder / f"state-{name}")
        machines.wait_for(name, "device . of .* is up" if options else "SuperNode ID")
    return f"{address('server')}:{SUPERLINK_PORT}"


def patterns(run_dir, token):
    """Return the visible patterns: the secret, weights of each TEB, and the embedding of a first word."""
    config = read_run_config(run_dir)
    # As the run began: the mean over the clusters rounds the last bits.
    parts = task(config.task).prepare(config.data, config.model, config.seed, 2).build(config.seed)
    for name, trained in load_model(run_dir).parts.weights().items():
        torch.testing.assert_close(trained, parts.weights()[name], rtol=1e-6, atol=1e-7)
    weights = {name: tensor.detach().numpy().tobytes() for name, tensor in parts.weights().items() if tensor.dim() == 2}
    blocks = {f"weights {name}": data[:256] for name, data in weights.items() if "block" in name}
    assert len(blocks) > 2
    parts.embedding.eval()
    vocabulary = parts.embedding.get_parameter("token.weight").shape[0]
    with torch.no_grad():
        rows = parts.embedding({"input_ids": torch.arange(vocabulary)[:, None]})
    activations = {f"activation of token {i}": row.numpy().tobytes() for i, row in enumerate(rows[:, 0])}
    return {"token": token} | blocks | activations


def test_no_tensor_and_no_token_travels_in_plain_text(run):
    (line,) = [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]
    assert line["faults"] == [] and len(line["clusters"][0]["devices"]) == 2
    token = (run.certs / "devices-0" / "ray-token").read_bytes()
    expected = patterns(run.run_dir, token) | {"control": CONTROL}
    readable = found_in(run.packets, expected)
    sizes = [file.stat().st_size for file in run.packets]
    print(f"{sizes} bytes recorded, {len(expected)} patterns, {len(readable)} found")
    assert min(sizes) > 1e5 and set(readable) == {"control"}


def test_a_machine_of_another_authority_gets_no_further_than_the_handshake(run):
    machines, folder = run.machines, run.machines.folder
    cu, server = machines.hosts.address("cu"), machines.hosts.address("server")
    edge_folder(folder / "other", server)
    joined_by_files(folder / "other", folder / "other-cu", cu)
    joined_by_files(folder / "other", folder / "state", server, cluster=0)
    done = machines.hosts.run("server", *COLLAPIPE, "doctor", "box", "--state", folder / "state", env=ENVIRONMENT)
    assert done.returncode == 1 and f"the certificate of {cu}:{FIRST_PORT} is not of this machine's" in done.stdout
