"""What is on the wire inside a cluster while two device machines train: with certificates nothing that can be read."""

import json
from pathlib import Path

import pytest
import torch

from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.ray_node import FIRST_PORT
from flower_app.saved_model import load_model
from helpers.bare_machines import CONFIG, SCENARIO, Machines
from helpers.capture import found_in, recorded
from helpers.deployed_stack import COLLAPIPE, ENVIRONMENT
from helpers.hosts import Namespaces, namespaces_missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing())]

NAMES = ["server", "cu", "d0", "d1"]
# Steps so small that no number changes: what was on the wire can be computed from the trained model.
STANDING_STILL = "\n[optimizer]\nname = 'sgd'\nlr = 1e-30\n"


@pytest.fixture
def machines(tmp_path):
    with Namespaces(NAMES) as hosts:
        yield Machines(hosts, tmp_path)


def start(machines, certs):
    address = machines.hosts.address
    machines.start("server", "up", "edge-server", "--host", address("server"), "--certs", certs / "server")
    machines.wait_for("server", "SuperLink at .* is up")
    small = ("--object-store-mb", 80)
    superlink = f"{address('server')}:{SUPERLINK_PORT}"
    options = ("--cluster", 0, "--server", superlink, "--certs", certs / "cu-0", *small)
    machines.start("cu", "up", "cu", "--host", address("cu"), *options)
    machines.wait_for("cu", "SuperNode ID")
    for device, name in enumerate(("d0", "d1")):
        options = ("--cu", f"{address('cu')}:{FIRST_PORT}", "--certs", certs / "devices-0", *small)
        machines.start(name, "up", "device", "--device", device, "--host", address(name), *options)
        machines.wait_for(name, "device . of .* is up")
    return superlink


def patterns(run_dir, token):
    """What would be seen: the secret, weights of each TEB, and what the embedding makes of a first word."""
    parts = load_model(run_dir).parts
    weights = {name: tensor.detach().numpy().tobytes() for name, tensor in parts.weights().items() if tensor.dim() == 2}
    blocks = {f"weights {name}": data[:256] for name, data in weights.items() if "block" in name}
    assert len(blocks) > 2
    parts.embedding.eval()
    vocabulary = parts.embedding.get_parameter("token.weight").shape[0]
    with torch.no_grad():
        rows = parts.embedding({"input_ids": torch.arange(vocabulary)[:, None]})
    activations = {f"activation of token {i}": row.numpy().tobytes() for i, row in enumerate(rows[:, 0])}
    return {"token": token} | blocks | activations


def refuse_a_stranger(machines, certs):
    """A machine with certificates of another authority gets no further than the handshake."""
    cu, server = machines.hosts.address("cu"), machines.hosts.address("server")
    machines.run("server", "certs", "--server", server, "--clusters", 1, "--out", certs)
    options = ("--certs", certs / "devices-0", "--host", server, "--cu", f"{cu}:{FIRST_PORT}", "--wait", 3)
    command = (*COLLAPIPE, "up", "device", "--device", 1, *options)
    done = machines.hosts.run("server", *command, cwd=machines.folder, env=ENVIRONMENT)
    assert done.returncode == 2 and f"the certificate of {cu}:{FIRST_PORT} is not of this machine's" in done.stderr


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("encrypted", [True, False], ids=["certificates", "no certificates"])
def test_no_tensor_and_no_token_travels_in_plain_text(machines, tmp_path, encrypted):
    certs = tmp_path / "certs"
    (tmp_path / "server").mkdir()
    server = machines.hosts.address("server")
    machines.run("server", "certs", "--server", server, "--clusters", 1, "--out", certs)
    if not encrypted:
        # As a release made them that had no authority for a cluster.
        for name in ("cu-0", "devices-0"):
            for file in ("cluster.pem", "cluster.key"):
                (certs / name / file).unlink()
    with recorded(machines.hosts, ("d0", "d1"), tmp_path) as files:
        superlink = start(machines, certs)
        (tmp_path / "server" / "scenario.toml").write_text(SCENARIO)
        config = CONFIG.replace("decoder-layers = 1", "decoder-layers = 1\ndropout = 0.0") + STANDING_STILL
        (tmp_path / "server" / "run.toml").write_text(config)
        options = ("--certs", certs / "server", "--config", "run.toml", "--json")
        run = machines.run("server", "run", "--superlink", superlink, *options)
    if encrypted:
        refuse_a_stranger(machines, tmp_path / "other")
    run_dir = Path(json.loads(run.stdout)["run_dir"])
    (line,) = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert line["faults"] == [] and len(line["clusters"][0]["devices"]) == 2
    token = (certs / "cu-0" / "ray-token").read_bytes()
    expected = patterns(run_dir, token)
    readable = found_in(files, expected)
    sizes = [file.stat().st_size for file in files]
    print(f"{sizes} bytes recorded, {len(expected)} patterns, {len(readable)} found")
    assert min(sizes) > 1e5
    warned = "within the cluster everything travels in plain text" in machines.words("cu")
    if encrypted:
        assert not readable and not warned
    else:
        kinds = {name.split()[0] for name in readable}
        assert kinds == {"token", "weights", "activation"} and warned
