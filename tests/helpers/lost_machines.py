"""A small deployment whose control units are their own devices: text, scenario, configuration."""

from flower_app.tasks import generator
from flower_app.tasks.tokenizer import train_tokenizer
from helpers.deployed_stack import CONFIG, Stack, write_text

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


def lone_stack(hosts, folder, clusters, rounds):
    """Write what the machines have, each in a folder of its own; returns their programs, not started."""
    pairs = generator.generate(90, "train", 0)
    write_text(folder / "server", "test", generator.generate(4, "test", 1))
    (folder / "server" / "tokenizer").mkdir()
    vocabulary = train_tokenizer((text for pair in pairs for text in pair), 300, False)
    (folder / "server" / "tokenizer" / "tokenizer.json").write_text(vocabulary.to_json(), encoding="utf-8")
    (folder / "server" / "scenario.toml").write_text(SCENARIO.format(clusters=clusters), encoding="utf-8")
    (folder / "server" / "run.toml").write_text(CONFIG.format(rounds=rounds, layers=2), encoding="utf-8")
    data = [folder / f"data-{cluster}" for cluster in range(clusters)]
    for cluster, own in enumerate(data):
        write_text(own, f"train-{cluster}", pairs[cluster::clusters][:24])
    return Stack(hosts, folder, data, own_devices=1)
