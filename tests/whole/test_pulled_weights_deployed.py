"""A control unit and devices without a copy of the pretrained model: pulled, cut and trained by the real programs."""

import json
from pathlib import Path

import pytest

from client_pipeline.partition.families import build_parts
from client_pipeline.partition.hugging_face import spec_from_config
from flower_app.deployment.edge_server import SUPERLINK_PORT
from flower_app.deployment.ray_node import FIRST_PORT
from flower_app.tasks.tokenizer import train_tokenizer
from helpers.bare_machines import SCENARIO, Machines
from helpers.hosts import Namespaces, namespaces_missing
from helpers.tiny_models import library_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(namespaces_missing()), reason=namespaces_missing())]

NAMES = ["server", "cu", "d0", "d1"]
CONFIG = """
name = "pulled"
scenario = "scenario.toml"
costs = "model"
num-rounds = 2
local-steps = 2
batch-size = 8
evaluate-every = 0
policy = "uniform"

[task]
name = "causal-lm"

[data]
source = "files"
path = "{folder}"
train-source = "train.txt"
validation-source = "val.txt"
test-source = "test.txt"
max-length = 12

[model]
family = "llama"
pretrained = "{folder}/model"
decoder-layers = 2
trainable = "lora"

[lora]
rank = 2

[planner]
token-slices = 2

[decoder]
join-timeout = 300.0

[runtime]
timeout = 300.0
"""
TEXTS = [f"a man in a blue shirt is number {number} of the crowd" for number in range(60)]


@pytest.fixture
def machines(tmp_path):
    with Namespaces(NAMES) as hosts:
        yield Machines(hosts, tmp_path)


def write_inputs(folder):
    """What the server has: a model with its tokenizer, texts, a network and the configuration."""
    tokenizer = train_tokenizer(TEXTS, 290, False)
    config = library_config("llama", dropout=0.0, vocab_size=tokenizer.vocab_size)
    spec = spec_from_config(config, "causal-lm", server_layers=2)
    build_parts(spec, seed=3).reference.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    for split in ("train", "val", "test"):
        (folder / f"{split}.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (folder / "scenario.toml").write_text(SCENARIO)
    (folder / "run.toml").write_text(CONFIG.format(folder=folder))


def start(machines, certs):
    address = machines.hosts.address
    machines.start("server", "up", "edge-server", "--host", address("server"), "--certs", certs / "server")
    machines.wait_for("server", "SuperLink at .* is up")
    small = ("--object-store-mb", 80)
    superlink = f"{address('server')}:{SUPERLINK_PORT}"
    # The server's folder can be seen from here, as all of these machines are one: one without a file is named.
    empty = machines.folder / "empty"
    empty.mkdir()
    options = ("--cluster", 0, "--server", superlink, "--certs", certs / "cu-0", "--model", empty, *small)
    machines.start("cu", "up", "cu", "--host", address("cu"), "--state", machines.folder / "state", *options)
    machines.wait_for("cu", "SuperNode ID")
    for device, name in enumerate(("d0", "d1")):
        options = ("--cu", f"{address('cu')}:{FIRST_PORT}", "--certs", certs / "devices-0", *small)
        machines.start(name, "up", "device", "--device", device, "--host", address(name), *options)
        machines.wait_for(name, "device . of .* is up")
    return superlink


@pytest.mark.timeout(1800)
def test_a_control_unit_without_the_folder_pulls_it_and_trains_as_one_that_has_it(machines, tmp_path):
    folder, certs = tmp_path / "server", tmp_path / "certs"
    folder.mkdir()
    write_inputs(folder)
    machines.run("server", "certs", "--server", machines.hosts.address("server"), "--clusters", 1, "--out", certs)
    superlink = start(machines, certs)
    options = ("--certs", certs / "server", "--config", "run.toml", "--json")
    done = machines.run("server", "run", "--superlink", superlink, *options)
    lines = rounds_of(Path(json.loads(done.stdout)["run_dir"]))
    assert [line["failed"] for line in lines] == [[], []] and len(lines[0]["clusters"][0]["devices"]) == 2
    assert {cluster["plan"]["token_slices"] for line in lines for cluster in line["clusters"]} == {2}
    # The whole file lies in the control unit's cache, by its digest, and nothing half.
    (pulled,) = (tmp_path / "state" / "checkpoints" / "weights").iterdir()
    assert pulled.read_bytes() == (folder / "model" / "model.safetensors").read_bytes()
    # It came over the data plane: Flower's messages had none of it.
    assert lines[0]["setup_bytes"] == 0
    alone = machines.run("server", "run", "--config", "run.toml", "--json")
    expected = rounds_of(Path(json.loads(alone.stdout)["run_dir"]))
    losses = [[line["train_loss"] for line in run] for run in (lines, expected)]
    print(f"on machines that pulled {losses[0]}, in simulation {losses[1]}")
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def rounds_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
