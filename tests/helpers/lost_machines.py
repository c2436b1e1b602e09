"""A small deployment whose control units are their own devices: text, scenario, configuration."""

from flower_app.tasks.generated import generator
from flower_app.tasks.tokenizer import train_tokenizer
from helpers.deployed_stack import CONFIG, SCENARIO, Stack, write_text


def lone_stack(hosts, folder, clusters, rounds):
    """Write what the machines have, each in a folder of its own; returns their programs, not started."""
    pairs = generator.generate(90, "train", 0)
    write_text(folder / "server", "test", generator.generate(4, "test", 1))
    (folder / "server" / "tokenizer").mkdir()
    vocabulary = train_tokenizer((text for pair in pairs for text in pair), 300, False)
    (folder / "server" / "tokenizer" / "tokenizer.json").write_text(vocabulary.to_json(), encoding="utf-8")
    (folder / "server" / "scenario.toml").write_text(
        SCENARIO.format(clusters=clusters, devices=1, flop_per_cycle="20.0"), encoding="utf-8"
    )
    (folder / "server" / "run.toml").write_text(CONFIG.format(rounds=rounds, layers=2), encoding="utf-8")
    data = [folder / f"data-{cluster}" for cluster in range(clusters)]
    for cluster, own in enumerate(data):
        write_text(own, f"train-{cluster}", pairs[cluster::clusters][:24])
    return Stack(hosts, folder, data, own_devices=1)
