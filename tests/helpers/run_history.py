"""History of a deployed run, and machines of it that are lost for a while."""

import contextlib
import json
import socket
import statistics
import struct
import time
from pathlib import Path

from flower_app.deployment.deployed_run import DECODER_PORT
from flower_app.runs.run_directory import read_waiting
from helpers.deployed_stack import PATIENCE_S

GONE = (
    "its stream broke off",
    "sent no heartbeat",
    "signed off",
    "was started again",
    "did not join",
    "its node is not connected",
)
"""Reasons by which the server may learn that a machine has died."""
MOST_ROUNDS = 20
"""A cluster that has not trained in so many rounds since its return never will."""
HEARTBEAT_S = 30.0
"""The longest time between two heartbeats of a SuperNode, failed attempts included [s]."""


def is_connected(stack, name):
    """Tell whether a machine has an open connection to the decoder."""
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
        self.is_whole = not line["faults"] and not self.absent
        """True if nothing happened in the round."""


class Absence:
    """A cluster whose machine is lost.

    Parameters
    ----------
    cluster : index of it
    round : number of the round under way
    normal_s : what a round took before [s]
    due : when the machine is to come back [s, monotonic]
    come_back : has it come back
    is_there : whether its SuperNode is there again
    """

    def __init__(self, cluster, round, normal_s, due, come_back, is_there):
        self.cluster, self.round, self.normal_s, self.due = cluster, round, normal_s, due
        self.come_back, self.is_there = come_back, is_there
        self.lost_at = time.monotonic()
        self.cut_at = self.waited_s = None
        """Time at which its stream to the decoder was cut [s, Unix time]; then the wait of the others."""
        self.returning = False
        self.back_at = None
        """Time at which its SuperNode was there again [s, monotonic]."""

    @property
    def trained(self):
        """True if it was lost in its training: the decoder had welcomed it, and waited for it."""
        return self.cut_at is not None

    def look(self, wait):
        """Have the machine come back when it is time, and note when it has, and the others' wait for it."""
        if wait is not None and self.cut_at is None and "broke off" in wait.reason:
            self.cut_at = wait.since
        if wait is None and self.trained and self.waited_s is None:
            self.waited_s = time.time() - self.cut_at
        if not self.returning and time.monotonic() >= self.due:
            self.returning = True
            self.come_back()
        if self.returning and self.back_at is None and self.is_there():
            self.back_at = time.monotonic()
            print(f"{self.back_at:.1f} cluster {self.cluster} is back")


class History:
    """History of a run, as its directory shows it.

    Parameters
    ----------
    stack : programs of the machines
    run : the command that follows the run
    run_dir : its directory
    patience_s : longest time without a round in which it counts as going on [s]
    """

    def __init__(self, stack, run, run_dir, patience_s=PATIENCE_S):
        self.stack, self.run, self.run_dir, self.patience_s = stack, run, run_dir, patience_s
        self.rounds, self.since = [], time.monotonic()
        self.absences = {}
        """The last one of each cluster."""

    def look(self):
        """Read the rounds that were added, and look after the machines that are away."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.run_dir / "rounds.jsonl").read_text().splitlines(keepends=True)
            now = time.monotonic()
            for line in lines[len(self.rounds) :]:
                if line.endswith("\n"):
                    self.rounds.append(Round(json.loads(line), self.since, now))
                    self.since = now
                    print(f"{now:.1f} round {self.rounds[-1].number}", self.rounds[-1].clusters, self.rounds[-1].absent)
        waits = read_waiting(self.run_dir)
        for cluster, absence in self.absences.items():
            absence.look(waits.get(str(cluster)))

    def until(self, enough):
        """Follow the run until it has done enough; fails if it has ended, or does nothing any more."""
        deadline, num_rounds = time.monotonic() + self.patience_s, len(self.rounds)
        while True:
            self.look()
            if enough():
                return
            if len(self.rounds) != num_rounds:
                deadline, num_rounds = time.monotonic() + self.patience_s, len(self.rounds)
            ended = self.run.poll() is not None
            assert not ended, f"the run has ended: {(self.run_dir / 'summary.json').read_text()}"
            assert time.monotonic() < deadline, f"nothing more within {self.patience_s} s: {self.stack.said()}"
            time.sleep(0.1)

    def until_trained_by(self, *clusters):
        """Follow the run until the newest round is one that these clusters have trained."""
        self.until(lambda: self.rounds and set(clusters) <= self.rounds[-1].clusters)

    def until_connected(self, *clusters):
        """Follow the run until these clusters are in the midst of a round."""
        self.until(lambda: all(is_connected(self.stack, f"cu{cluster}") for cluster in clusters))

    def lose(self, back_after_s):
        """End all processes of control units' machines at once, to be started again later [s, by cluster]."""
        self.look()
        for cluster, seconds in back_after_s.items():
            self.stack.cut_power(f"cu{cluster}")
            said = len(self._log_of(cluster))
            self._note(
                cluster,
                seconds,
                lambda cluster=cluster: self.stack.start_cu(cluster),
                lambda cluster=cluster, said=said: "SuperNode ID" in self._log_of(cluster)[said:],
            )

    def pull_network(self, cluster, seconds):
        """Pull the cable of a control unit's machine, whose processes live on, to be plugged in later [s]."""
        self.look()
        hosts, name = self.stack.hosts, f"cu{cluster}"
        hosts.connect(name, False)
        plugged_in = []

        def plug_in():
            hosts.connect(name, True)
            plugged_in.append(time.monotonic())

        # The server hears of it by the next heartbeat.
        self._note(cluster, seconds, plug_in, lambda: time.monotonic() >= plugged_in[0] + HEARTBEAT_S)

    def bring_back(self, cluster):
        """Have a machine come back now."""
        self.absences[cluster].due = 0.0

    def _note(self, cluster, seconds, come_back, is_there):
        # The first round starts everything.
        normal_s = statistics.median(round_.ended - round_.began for round_ in self.rounds[1:] or self.rounds)
        number, due = len(self.rounds) + 1, time.monotonic() + seconds
        self.absences[cluster] = Absence(cluster, number, normal_s, due, come_back, is_there)
        print(f"{time.monotonic():.1f} cluster {cluster} is lost in round {number}")

    def _log_of(self, cluster):
        return self.stack.log(f"cu{cluster}").read_text(errors="replace")

    def went_on(self, cluster):
        """Wait for the first round that ended without a cluster that was lost.

        Returns
        -------
        How long after the loss it ended [s], and the reason that it gives.
        """
        absence = self.absences[cluster]
        self.until(lambda: len(self.rounds) > absence.round)
        missed = [one for one in self.rounds if one.number >= absence.round and cluster not in one.clusters]
        assert missed, f"cluster {cluster} was in every round from {absence.round} on"
        reasons = [one.absent[cluster] for one in missed]
        assert all(any(words in reason for words in GONE) for reason in reasons), reasons
        return missed[0].ended - absence.lost_at, reasons[0]

    def rounds_until_back(self, cluster):
        """Wait for the first round that a cluster has trained after its return.

        Returns
        -------
        How many rounds had begun since its return, that round included; and that round.
        """
        absence = self.absences[cluster]
        self.until(lambda: absence.back_at is not None)

        def since_return():
            return [round_ for round_ in self.rounds if round_.began > absence.back_at]

        def trained():
            return [round_ for round_ in since_return() if cluster in round_.clusters]

        self.until(lambda: trained() or len(since_return()) >= MOST_ROUNDS)
        assert trained(), f"not in {MOST_ROUNDS} rounds: {[round_.absent[cluster] for round_ in since_return()]}"
        return since_return().index(trained()[0]) + 1, trained()[0]
