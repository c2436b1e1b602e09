"""Test machines on which commands are typed one by one, and a small training for them."""

import re

from helpers.deployed_stack import COLLAPIPE, ENVIRONMENT, PATIENCE_S, SCENARIO, last_words
from helpers.hosts import Loopback
from helpers.patience import eventually

ONE_CLUSTER = SCENARIO.format(clusters=1, devices=2, flop_per_cycle="[20.0, 14.0]")
CONFIG = """
name = "joined"
scenario = "scenario.toml"
num-rounds = 1
local-steps = 2
batch-size = 8
evaluate-every = 0
policy = "uniform"

[data]
num-examples = 200
evaluation-examples = 10
vocab-size = 400

[model]
width = 16
num-heads = 2
feed-forward = 32
encoder-layers = 2
decoder-layers = 1

[decoder]
join-timeout = 300.0

[runtime]
timeout = 300.0
"""


class Machines:
    """Programs on bare machines, and what they have said."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.programs = hosts, folder, {}
        self.is_loopback = isinstance(hosts, Loopback)

    def start(self, name, *arguments):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        command = (*COLLAPIPE, *arguments)
        self.programs[name] = self.hosts.start(name, *command, log=self.log(name), cwd=folder, env=ENVIRONMENT)

    def run(self, name, *arguments):
        done = self.hosts.run(name, *COLLAPIPE, *arguments, cwd=self.folder / name, env=ENVIRONMENT)
        assert done.returncode == 0, f"{done.stderr}\n{self.said()}"
        return done

    def log(self, name):
        return self.folder / f"{name}.log"

    def words(self, name):
        return self.log(name).read_text(errors="replace")

    def wait_for(self, name, pattern, since=0):
        def match():
            match = re.search(pattern, self.words(name)[since:])
            assert match or self.programs[name].poll() is None, f"{name} ended: {self.said()}"
            return match

        return eventually(
            match, PATIENCE_S, lambda: f"{name}: no {pattern!r} in: {self.words(name)[-3000:]}", poll_s=0.1
        )

    def said(self):
        return last_words(self.folder)

    def own(self, name, **ports):
        """Options that move a machine's ports and address where all machines are one."""
        if not self.is_loopback:
            return []
        offset = self.hosts.ports(name)
        moved = [part for option, port in ports.items() for part in (f"--{option}".replace("_", "-"), port + offset)]
        return moved if name == "server" else [*moved, "--host", self.hosts.address(name)]
