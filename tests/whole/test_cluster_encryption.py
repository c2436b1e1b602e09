"""What is on the wire inside a cluster while two device machines train: with certificates nothing that can be read."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.ray_node import FIRST_PORT
from flower_app.runs.run_directory import read_run_config
from flower_app.saved_model import load_model
from flower_app.tasks.base import task
from helpers.bare_machines import CONFIG, SCENARIO, Machines
from helpers.capture import found_in, recorded
from helpers.deployed_stack import COLLAPIPE, ENVIRONMENT
from helpers.hosts import Namespaces, namespaces_missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing()),
]

ENCRYPTED, PLAIN = 0, 1
"""Clusters of one run: the second one has no authority of its own."""
NAMES = ["server", "cu0", "d00", "d01", "cu1", "d10", "d11"]
# Steps so small that no number changes: what was on the wire can be computed from the model.
STANDING_STILL = "\n[optimizer]\nname = 'sgd'\nlr = 1e-30\n"


class RecordedRun(NamedTuple):
    """What a run has left."""

    machines: Machines
    certs: Path
    run_dir: Path
    packets: list[Path]
    """Of each device's machine, cluster by cluster."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of both clusters, each with two device machines."""
    folder = tmp_path_factory.mktemp("wire")
    with Namespaces(NAMES) as hosts:
        machines, certs = Machines(hosts, folder), folder / "certs"
        (folder / "server").mkdir()
        machines.run("server", "certs", "--server", hosts.address("server"), "--clusters", 2, "--out", certs)
        # As a release made them that had no authority for a cluster.
        for name in (f"cu-{PLAIN}", f"devices-{PLAIN}"):
            for file in ("cluster.pem", "cluster.key"):
                (certs / name / file).unlink()
        with recorded(hosts, ("d00", "d01", "d10", "d11"), folder) as files:
            superlink = start(machines, certs)
            (folder / "server" / "scenario.toml").write_text(SCENARIO.replace("clusters = 1", "clusters = 2"))
            config = CONFIG.replace("decoder-layers = 1", "decoder-layers = 1\ndropout = 0.0") + STANDING_STILL
            (folder / "server" / "run.toml").write_text(config)
            options = ("--certs", certs / "server", "--config", "run.toml", "--json")
            done = machines.run("server", "run", "--superlink", superlink, *options)
        yield RecordedRun(machines, certs, Path(json.loads(done.stdout)["run_dir"]), files)


def start(machines, certs):
    address = machines.hosts.address
    machines.start("server", "up", "edge-server", "--host", address("server"), "--certs", certs / "server")
    machines.wait_for("server", "SuperLink at .* is up")
    small = ("--object-store-mb", 80)
    superlink = f"{address('server')}:{SUPERLINK_PORT}"
    for cluster in (ENCRYPTED, PLAIN):
        cu, options = f"cu{cluster}", ("--cluster", cluster, "--server", superlink, "--certs", certs / f"cu-{cluster}")
        machines.start(cu, "up", "cu", "--host", address(cu), *options, *small)
        machines.wait_for(cu, "SuperNode ID")
        for device in range(2):
            name = f"d{cluster}{device}"
            options = ("--cu", f"{address(cu)}:{FIRST_PORT}", "--certs", certs / f"devices-{cluster}", *small)
            machines.start(name, "up", "device", "--device", device, "--host", address(name), *options)
            machines.wait_for(name, "device . of .* is up")
    return superlink


def patterns(run_dir, token):
    """What would be seen: the secret, weights of each TEB, and what the embedding makes of a first word."""
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


@pytest.mark.parametrize("cluster", [ENCRYPTED, PLAIN], ids=["certificates", "no certificates"])
def test_no_tensor_and_no_token_travels_in_plain_text(run, cluster):
    (line,) = [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]
    assert line["faults"] == [] and len(line["clusters"][cluster]["devices"]) == 2
    token = (run.certs / f"cu-{cluster}" / "ray-token").read_bytes()
    expected = patterns(run.run_dir, token)
    files = run.packets[2 * cluster : 2 * cluster + 2]
    readable = found_in(files, expected)
    sizes = [file.stat().st_size for file in files]
    print(f"{sizes} bytes recorded, {len(expected)} patterns, {len(readable)} found")
    assert min(sizes) > 1e5
    warned = "within the cluster everything travels in plain text" in run.machines.words(f"cu{cluster}")
    if cluster == ENCRYPTED:
        assert not readable and not warned
    else:
        kinds = {name.split()[0] for name in readable}
        assert kinds == {"token", "weights", "activation"} and warned


def test_a_machine_of_another_authority_gets_no_further_than_the_handshake(run):
    machines, certs = run.machines, run.machines.folder / "other"
    cu, server = machines.hosts.address(f"cu{ENCRYPTED}"), machines.hosts.address("server")
    machines.run("server", "certs", "--server", server, "--clusters", 1, "--out", certs)
    options = ("--certs", certs / "devices-0", "--host", server, "--cu", f"{cu}:{FIRST_PORT}", "--wait", 3)
    command = (*COLLAPIPE, "up", "device", "--device", 1, *options)
    done = machines.hosts.run("server", *command, cwd=machines.folder, env=ENVIRONMENT)
    assert done.returncode == 2 and f"the certificate of {cu}:{FIRST_PORT} is not of this machine's" in done.stderr
