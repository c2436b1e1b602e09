"""A control unit whose machine dies in the midst of a deployed run: the others go on, and it comes back."""

import contextlib
import json
import math
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from flower_app.deployment.deployed_run import DECODER_PORT
from helpers.deployed_stack import PATIENCE_S
from helpers.hosts import Namespaces, namespaces_missing
from helpers.lost_machines import lone_stack

pytestmark = pytest.mark.slow

CLUSTERS, ROUNDS = 3, 200
GONE = ("its stream broke off", "sent no heartbeat", "was started again", "did not join", "its node is not connected")
"""How the server may learn that a machine has died."""


@pytest.mark.timeout(1800)
def test_a_control_unit_whose_machine_dies_is_left_out_and_comes_back(tmp_path, history_checker):
    if reason := namespaces_missing():
        pytest.skip(reason)
    names = ["server", *(f"cu{cluster}" for cluster in range(CLUSTERS))]
    with Namespaces(names) as hosts:
        stack = lone_stack(hosts, tmp_path, CLUSTERS, ROUNDS)
        stack.start()
        run, run_dir = stack.begin(config=tmp_path / "server" / "run.toml")
        history = History(stack, run, run_dir)
        history.until(lambda: history.trained_by(1) and history.trained_by(2))

        # Both in the midst of a round: one machine starts again at once, the other after 25 s.
        history.until(lambda: connected(stack, "cu1") and connected(stack, "cu2"))
        lost = history.lose({1: 0.0, 2: 25.0})
        for cluster in (1, 2):
            history.check_went_on(cluster, lost)
            history.check_is_back(cluster)

        # Once more: one after 5 s, the other never.
        history.until(lambda: connected(stack, "cu1") and connected(stack, "cu2"))
        lost = history.lose({1: 5.0, 2: math.inf})
        history.check_is_back(1)
        history.check_went_on(2, lost)
        history.until(lambda: 2 not in history.rounds[-1].clusters and 1 in history.rounds[-1].clusters)

        run.send_signal(signal.SIGINT)
        run.wait(PATIENCE_S)
        hosts.running.remove(run)
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
        folders = {n: tmp_path / f"state-cu{n}/checkpoints/{run_dir.name}/cluster-{n}" for n in range(CLUSTERS)}
        sizes = {"clusters": CLUSTERS, "local-steps": 2, "batch-size": 8}
        assert history_checker.problems(history_checker.read(run_dir, folders, sizes)) == []
        # The terminal has said whom it waited for.
        terminal = stack.log("run").read_text()
        assert "waiting for cluster 1: its" in terminal and "waiting for cluster 2: its" in terminal, terminal


def connected(stack, name):
    """Whether a machine has an open connection to the decoder."""
    (server, *_) = stack.hosts.processes("server")
    far = f"{struct.unpack('<I', socket.inet_aton(stack.hosts.address(name)))[0]:08X}"
    # gRPC listens for both families: there an IPv4 address is the end of an IPv6 one.
    lines = [line for kind in ("tcp", "tcp6") for line in Path(f"/proc/{server}/net/{kind}").read_text().splitlines()]
    fields = [line.split() for line in lines if ":" in line]
    ours = [f for f in fields if f[1].endswith(f":{DECODER_PORT:04X}")]
    return any(f[2].partition(":")[0].endswith(far) and f[3] == "01" for f in ours)


class Round:
    """A round's line, and when the round began and ended [s, monotonic]."""

    def __init__(self, line, began, ended):
        self.number, self.began, self.ended = line["round"], began, ended
        self.clusters = {report["cluster"] for report in line["clusters"]}
        self.absent = {entry["cluster"]: entry["reason"] for entry in [*line["plan"]["left_out"], *line["failed"]]}


class Away:
    """A machine that was lost: when it is to start again [s, monotonic], and how much it had said before."""

    def __init__(self, due, said):
        self.due, self.said, self.started = due, said, False


class History:
    """What a run has done so far, as its directory shows it."""

    def __init__(self, stack, run, run_dir):
        self.stack, self.run, self.run_dir = stack, run, run_dir
        self.rounds, self.size, self.since = [], 0, time.monotonic()
        self.away = {}
        self.back = {}
        """When the SuperNodes that came back were connected [s, monotonic], by cluster."""

    def look(self):
        with contextlib.suppress(FileNotFoundError):
            lines = (self.run_dir / "rounds.jsonl").read_text().splitlines(keepends=True)
            now = time.monotonic()
            for line in lines[len(self.rounds) :]:
                if line.endswith("\n"):
                    self.rounds.append(Round(json.loads(line), self.since, now))
                    self.since = now
                    print(f"{now:.1f} round {self.rounds[-1].number}", self.rounds[-1].clusters, self.rounds[-1].absent)

    def until(self, enough):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.look()
            self.look_after_machines()
            if enough():
                return
            if self.run.poll() is not None:
                pytest.fail(f"the run has ended: {(self.run_dir / 'summary.json').read_text()}")
            assert time.monotonic() < deadline, f"nothing more within {PATIENCE_S} s: {self.stack.said()}"
            time.sleep(0.1)

    def trained_by(self, cluster):
        return any(cluster in round_.clusters for round_ in self.rounds)

    def lose(self, back_after_s):
        """End all processes of control units' machines at once, to be started again later [s, by cluster].

        Returns
        -------
        The number of the round under way.
        """
        self.look()
        for cluster, seconds in back_after_s.items():
            self.stack.cut_power(f"cu{cluster}")
            self.away[cluster] = Away(time.monotonic() + seconds, len(self.said_by(cluster)))
            self.back.pop(cluster, None)
        print(f"{time.monotonic():.1f} clusters {list(back_after_s)} are lost in round {len(self.rounds) + 1}")
        return len(self.rounds) + 1

    def said_by(self, cluster):
        return self.stack.log(f"cu{cluster}").read_text(errors="replace")

    def look_after_machines(self):
        """Start the machines that are due, and note whose SuperNode is connected."""
        for cluster, away in self.away.items():
            if not away.started and time.monotonic() >= away.due:
                away.started = True
                self.stack.start_cu(cluster)
            if away.started and cluster not in self.back and "SuperNode ID" in self.said_by(cluster)[away.said :]:
                self.back[cluster] = time.monotonic()
                print(f"{self.back[cluster]:.1f} cluster {cluster} is back")

    def check_went_on(self, cluster, lost):
        """The round in which a cluster was lost has ended without it and with the others."""
        self.until(lambda: len(self.rounds) > lost)
        rounds = [round_ for round_ in self.rounds if round_.number >= lost and cluster not in round_.clusters]
        assert rounds, f"cluster {cluster} was in every round from {lost} on"
        assert all(0 in round_.clusters for round_ in self.rounds)
        assert all(any(words in round_.absent[cluster] for words in GONE) for round_ in rounds), rounds[0].absent

    def check_is_back(self, cluster):
        """Of the rounds that began after its return, it has trained in the second at the latest."""
        self.until(lambda: cluster in self.back)
        back = self.back[cluster]
        self.until(lambda: sum(round_.began > back for round_ in self.rounds) >= 2)
        first, second = [round_ for round_ in self.rounds if round_.began > back][:2]
        assert cluster in first.clusters | second.clusters, (first.absent, second.absent)
