"""A training on real machines, or what stands for them: all programs, TLS, keys, devices as Ray nodes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from deployed_stack import COLLAPIPE, NAMES, NUM_CLUSTERS, NUM_DEVICES, Stack
from hosts import Loopback, Namespaces, namespaces_missing

from flower_app.tasks import generator
from flower_app.tasks.tokenizer import train_tokenizer

ROUNDS = 2
SCENARIO = """
format = "collapipe-scenario/1"
clusters = 2
devices = 2

[device]
flop-per-cycle = [20.0, 14.0]
frequency-ghz = 0.5
memory-gb = 1.5

[block]
memory-gb = 0.375

[planner]
blocks = 3
gamma-max = 5.0
"""
CONFIG = f"""
name = "deployed"
scenario = "scenario.toml"
num-rounds = {ROUNDS}
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
encoder-layers = 3
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


@pytest.fixture(scope="module", params=["namespaces", "loopback"])
def stack(request, tmp_path_factory):
    reason = namespaces_missing()
    if request.param == "namespaces" and reason:
        pytest.skip(reason)
    if request.param == "loopback" and not reason and os.environ.get("COLLAPIPE_TEST_LOOPBACK") != "1":
        pytest.skip("the same ran in network namespaces; COLLAPIPE_TEST_LOOPBACK=1 runs it on the loopback, too")
    folder = tmp_path_factory.mktemp(request.param)
    pairs = generator.generate(90, "train", 0)
    # What the server has, and what each control unit has for itself: another folder, as on another machine.
    write_text(folder / "server", "test", generator.generate(4, "test", 1))
    (folder / "server" / "tokenizer").mkdir()
    vocabulary = train_tokenizer((text for pair in pairs for text in pair), 300, False)
    (folder / "server" / "tokenizer" / "tokenizer.json").write_text(vocabulary.to_json(), encoding="utf-8")
    (folder / "server" / "scenario.toml").write_text(SCENARIO, encoding="utf-8")
    (folder / "server" / "run.toml").write_text(CONFIG, encoding="utf-8")
    data = [folder / f"data-{cluster}" for cluster in range(NUM_CLUSTERS)]
    for cluster, own in enumerate(data):
        write_text(own, f"train-{cluster}", pairs[cluster::NUM_CLUSTERS][: 40 - 5 * cluster])
    with (Namespaces if request.param == "namespaces" else Loopback)(NAMES) as hosts:
        stack = Stack(hosts, folder, data)
        stack.start()
        yield stack


def simulated(stack):
    """The same configuration in simulation, where one machine has all the text."""
    everything = stack.folder / "everything"
    for folder in (stack.folder / "server", *stack.data):
        shutil.copytree(folder, everything, dirs_exist_ok=True)
    arguments = ["run", "--config", everything / "run.toml", "--json"]
    done = subprocess.run([*COLLAPIPE, *arguments], cwd=everything, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["run_dir"])


def rounds_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1200)
def test_a_training_on_machines_has_the_losses_of_its_simulation(stack):
    sets = ["decoder.bind=127.0.77.1:0"] if stack.shared_ports else []
    deployed = stack.train(*sets, config=stack.folder / "server" / "run.toml")
    alone = simulated(stack)
    found, expected = rounds_of(deployed), rounds_of(alone)
    assert len(found) == len(expected) == ROUNDS
    for mine, theirs in zip(found, expected, strict=True):
        assert {report["num_examples"] for report in mine["clusters"]} == {40, 35}
        for here, there in zip(mine["clusters"], theirs["clusters"], strict=True):
            assert here["cluster"] == there["cluster"] and here["plan"] == there["plan"]
            assert len(here["devices"]) == NUM_DEVICES
            assert here["loss"] == pytest.approx(there["loss"], abs=1e-4)
    assert loss_on_test_text(deployed) == pytest.approx(loss_on_test_text(alone), abs=1e-4)
    # Each control unit has kept its own checkpoint, in its own folder.
    assert not (deployed / "clusters").exists()
    for cluster in range(NUM_CLUSTERS):
        own = stack.folder / f"state-cu{cluster}" / "checkpoints" / deployed.name / f"cluster-{cluster}"
        assert own.is_dir() and any(own.iterdir())
    if not stack.shared_ports:
        # Actors stay for a while: those of the devices are on the devices' machines, and nowhere else.
        for name in NAMES:
            actors = [command for command in stack.hosts.commands(name) if command.startswith("ray::Device")]
            assert len(actors) == name.startswith("d"), (name, actors)


def loss_on_test_text(run_dir):
    return json.loads((run_dir / "summary.json").read_text())["metrics"]["loss"]
