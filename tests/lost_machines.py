"""A small deployment whose control units are their own devices: text, scenario, configuration."""

from deployed_stack import Stack

from flower_app.tasks import generator
from flower_app.tasks.tokenizer import train_tokenizer

SCENARIO = """
format = "collapipe-scenario/1"
clusters = {clusters}
devices = 1

[device]
flop-per-cycle = 20.0
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
encoder-layers = 2
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


def lone_stack(hosts, folder, clusters, rounds):
    """Write what the machines have, each in a folder of its own; returns their programs, not started."""
    pairs = generator.generate(90, "train", 0)
    write_text(folder / "server", "test", generator.generate(4, "test", 1))
    (folder / "server" / "tokenizer").mkdir()
    vocabulary = train_tokenizer((text for pair in pairs for text in pair), 300, False)
    (folder / "server" / "tokenizer" / "tokenizer.json").write_text(vocabulary.to_json(), encoding="utf-8")
    (folder / "server" / "scenario.toml").write_text(SCENARIO.format(clusters=clusters), encoding="utf-8")
    (folder / "server" / "run.toml").write_text(CONFIG.format(rounds=rounds), encoding="utf-8")
    data = [folder / f"data-{cluster}" for cluster in range(clusters)]
    for cluster, own in enumerate(data):
        write_text(own, f"train-{cluster}", pairs[cluster::clusters][:24])
    return Stack(hosts, folder, data, own_devices=1)
