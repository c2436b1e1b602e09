"""A training on real machines, or what stands for them: all programs, TLS, keys, devices as Ray nodes."""

import json
import os
import shutil
import signal
import stat
import time
from dataclasses import replace

import pytest

from client_pipeline.families.families import build_parts
from client_pipeline.families.hugging_face import spec_from_config
from flower_app.config.sources import load_config
from flower_app.launch.run_series import SeriesRun, train_series
from flower_app.runs.machines import read_machines
from flower_app.tasks.generated import generator
from flower_app.tasks.tokenizer import train_tokenizer
from helpers.deployed_stack import CONFIG, NAMES, NUM_DEVICES, PATIENCE_S, Stack, write_text
from helpers.hosts import Loopback, Namespaces, namespaces_missing
from helpers.patience import eventually
from helpers.tiny_models import library_config

pytestmark = pytest.mark.slow

ROUNDS = 6
"""More than end between the round that a machine leaves and the run's interruption."""
SCENARIO = """
format = "collapipe-scenario/1"

[device]
frequency-ghz = 0.5
memory-gb = 1.5

[block]
memory-gb = 0.375

[[cluster]]
name = "workshop"
devices = 3
[cluster.device]
flop-per-cycle = [20.0, 14.0, 12.0]
memory-gb = 0.8

[[cluster]]
name = "depot"
devices = 2
[cluster.device]
flop-per-cycle = [8.0, 18.0]
frequency-ghz = 0.3
memory-gb = [1.2, 0.8]

[planner]
blocks = 4
gamma-max = 5.0
"""
PULLED = """
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
partition = "nodes"
train-source = "train-{cluster}.txt"
validation-source = "val.txt"
test-source = "test.txt"
max-length = 12

[model]
family = "llama"
pretrained = "model"
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
SENTENCES = [f"a man in a blue shirt is number {number} of the crowd" for number in range(60)]


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
    # Measured costs, a deployment's default, would keep the plan that a fault has left where moving back does not pay.
    config = 'costs = "scenario"' + CONFIG.format(rounds=ROUNDS, layers=4)
    (folder / "server" / "run.toml").write_text(config, encoding="utf-8")
    data = [folder / f"data-{cluster}" for cluster in range(len(NUM_DEVICES))]
    for cluster, own in enumerate(data):
        write_text(own, f"train-{cluster}", pairs[cluster :: len(NUM_DEVICES)][: 40 - 5 * cluster])
        (own / f"train-{cluster}.txt").write_text("\n".join(SENTENCES[cluster :: len(NUM_DEVICES)]), encoding="utf-8")
    write_pretrained(folder / "server")
    # The server's model can be seen from here, as all of these machines are one: a folder without a file is named.
    (folder / "empty").mkdir()
    with (Namespaces if request.param == "namespaces" else Loopback)(NAMES) as hosts:
        # The whole network's file, of which each control unit reads its own cluster.
        stack = Stack(hosts, folder, data, profile=folder / "server" / "scenario.toml", model=folder / "empty")
        stack.start()
        yield stack


def write_pretrained(server):
    """Write a model with its tokenizer, texts to score it by, and the configuration that trains adapters of it."""
    tokenizer = train_tokenizer(SENTENCES, 290, False)
    config = library_config("llama", dropout=0.0, vocab_size=tokenizer.vocab_size)
    spec = spec_from_config(config, "causal-lm", server_layers=2)
    build_parts(spec, seed=3).reference.save_pretrained(server / "model")
    (server / "model" / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    for split in ("val", "test"):
        (server / f"{split}.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    (server / "pulled.toml").write_text(PULLED, encoding="utf-8")


@pytest.fixture(scope="module")
def alone(stack):
    """The same two configurations in one simulation, where one machine has all the text: their run directories."""
    everything = stack.folder / "everything"
    for folder in (stack.folder / "server", *stack.data):
        shutil.copytree(folder, everything, dirs_exist_ok=True)
    run_dirs = {name: stack.folder / "alone" / name for name in ("run", "pulled")}
    series = [
        SeriesRun(name, replace(load_config(str(everything / f"{name}.toml")), run_dir=str(run_dir)))
        for name, run_dir in run_dirs.items()
    ]
    train_series(series, stack.folder / "session", print)
    return run_dirs


def own_ports(stack):
    return ["decoder.bind=127.0.77.1:0"] if stack.shared_ports else []


def rounds_of(run_dir):
    return [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1200)
def test_a_training_on_machines_that_start_again_has_the_losses_of_its_simulation(stack, alone):
    run, run_dir = stack.begin(*own_ports(stack), config=stack.folder / "server" / "run.toml")
    # Looked for from the beginning: the three rounds may be over before all command lines have been read.
    if not stack.shared_ports:
        check_places(stack)
    wait_for_rounds(stack, run, run_dir, lambda rounds: rounds)
    # Nobody else puts files of their own there, also once Ray runs.
    folders = {name: stack.private_folder(name) for name in NAMES if name != "server"}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders.values()} == {0o700}
    stack.cut_power("d00")
    said_by_device = len(stack.log("d00").read_text(errors="replace"))
    stack.start_device(0, 0)
    wait_for_rounds(stack, run, run_dir, lambda rounds: any(line["faults"] for line in rounds))
    run.send_signal(signal.SIGINT)
    run.wait(PATIENCE_S)
    stack.hosts.running.remove(run)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
    before = rounds_of(run_dir)
    assert len(before) < ROUNDS
    lost_in = next(
        line["round"] for line in before for f in line["faults"] if (f["kind"], f["device"]) == ("device", 0)
    )

    names = ("cu1", *(f"d1{device}" for device in range(NUM_DEVICES[1])))
    since = {name: len(stack.log(name).read_text(errors="replace")) for name in names}
    stack.hosts.end(stack.boxes["cu1"])
    stack.gone("cu1")
    stack.start_cu(1)
    stack.wait_for("cu1", "SuperNode ID", since["cu1"])
    for device in range(NUM_DEVICES[1]):
        rejoin(stack, 1, device, since[f"d1{device}"])
    # The run goes on with the devices that are there.
    stack.wait_for("d00", "is up", said_by_device)
    assert [name for name in ("d00", "cu0", "cu1") if folders[name].exists()] == ["cu0"]

    done = stack.hosts.run("server", *stack.run_command("--resume", run_dir.name), cwd=stack.folder)
    assert done.returncode == 0, f"{done.stderr}\n{stack.said()}"
    found, expected = rounds_of(run_dir), rounds_of(alone["run"])
    assert len(found) == len(expected) == ROUNDS and not any(line["failed"] for line in found)
    untouched = True
    for mine, theirs in zip(found, expected, strict=True):
        assert {report["num_examples"] for report in mine["clusters"]} == {40, 35}
        losses = [[report["loss"] for report in line["clusters"]] for line in (mine, theirs)]
        print(f"round {mine['round']}: on machines {losses[0]}, in simulation {losses[1]}")
        assert losses[0] == pytest.approx(losses[1], abs=1e-4), mine["round"]
        # Bit for bit while no device is lost.
        untouched &= not mine["faults"]
        assert losses[0] == losses[1] or not untouched, mine["round"]
        assert [cluster["name"] for cluster in mine["virtual"]["clusters"]] == ["workshop", "depot"]
        # In between it may still be on its way back when a round is planned.
        if mine["round"] < lost_in or mine["round"] > len(before):
            for here, there in zip(mine["clusters"], theirs["clusters"], strict=True):
                assert here["cluster"] == there["cluster"] and here["plan"] == there["plan"]
                assert len(here["devices"]) == NUM_DEVICES[here["cluster"]] == len(here["plan"]["delta"])
    assert not found[0]["faults"]
    assert loss_on_test_text(run_dir) == pytest.approx(loss_on_test_text(alone["run"]), abs=1e-4)
    # Every machine has named itself, before the first round and again when the run went on.
    starts = read_machines(run_dir)
    # A round whose line was written may not have been committed.
    assert [start["after_round"] for start in starts] in ([0, len(before)], [0, len(before) - 1])
    for cluster, number in enumerate(NUM_DEVICES):
        machines = starts[0]["clusters"][str(cluster)]
        assert set(machines["devices"]) == set(map(str, range(number)))
        assert {machine["python"] for machine in (machines["control_unit"], *machines["devices"].values())} == {
            starts[0]["server"]["python"]
        }
    # Each control unit has kept its own checkpoint, in its own folder.
    assert not (run_dir / "clusters").exists()
    for cluster in range(len(NUM_DEVICES)):
        own = stack.folder / f"state-cu{cluster}" / "checkpoints" / run_dir.name / f"cluster-{cluster}"
        assert own.is_dir() and any(own.iterdir())


@pytest.mark.timeout(1200)
def test_control_units_without_the_folder_pull_it_and_train_as_those_that_have_it(stack, alone):
    """A second run on the same machines."""
    run_dir = stack.train(*own_ports(stack), config=stack.folder / "server" / "pulled.toml")
    lines, expected = rounds_of(run_dir), rounds_of(alone["pulled"])
    assert [line["failed"] for line in lines] == [[], []]
    # The model has two TEBs.
    assert [len(cluster["devices"]) for cluster in lines[0]["clusters"]] == [2, 2]
    assert {cluster["plan"]["token_slices"] for line in lines for cluster in line["clusters"]} == {2}
    # The whole file lies in each control unit's cache, by its digest, and nothing half.
    for cluster in range(len(NUM_DEVICES)):
        (pulled,) = (stack.folder / f"state-cu{cluster}" / "checkpoints" / "weights").iterdir()
        assert pulled.read_bytes() == (stack.folder / "server" / "model" / "model.safetensors").read_bytes()
    # It came over the data plane: Flower's messages had none of it.
    assert lines[0]["setup_bytes"] == 0
    losses = [[line["train_loss"] for line in run] for run in (lines, expected)]
    print(f"on machines that pulled {losses[0]}, in simulation {losses[1]}")
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def check_places(stack):
    """Each machine of a cluster has one actor, its own; the server has none."""
    expected, deadline = {name: int(name != "server") for name in NAMES}, time.monotonic() + PATIENCE_S
    while True:
        places = {name: len(stack.hosts.actors(name)) for name in NAMES}
        if places == expected:
            return
        assert time.monotonic() < deadline, f"{places}: {stack.said()}"
        time.sleep(0.3)


def wait_for_rounds(stack, run, run_dir, enough):
    def has_enough():
        assert run.poll() is None, stack.said()
        return (run_dir / "rounds.jsonl").is_file() and enough(rounds_of(run_dir))

    eventually(has_enough, PATIENCE_S, stack.said)


def rejoin(stack, cluster, device, since):
    """A device whose control unit was started anew ends, and a service manager would start it again."""
    name, deadline = f"d{cluster}{device}", time.monotonic() + PATIENCE_S
    # It knows the control unit by its certificate. Without one, or if the control unit is away for a minute, Ray ends
    # and is started again in its first minutes; the box ends where the control unit takes longer.
    ends = ["ended with exit code", *([] if stack.shared_ports else ["was started anew"])]
    while not any(end in (log := stack.log(name).read_text(errors="replace")[since:]) for end in ends):
        assert time.monotonic() < deadline, log
        time.sleep(0.2)
    while " is up" not in log.rpartition("it is started again")[2]:
        assert time.monotonic() < deadline, log
        if stack.boxes[name].poll() is not None:
            stack.gone(name)
            since += len(log)
            stack.start_device(cluster, device)
        time.sleep(0.2)
        log = stack.log(name).read_text(errors="replace")[since:]


def loss_on_test_text(run_dir):
    return json.loads((run_dir / "summary.json").read_text())["metrics"]["loss"]
