"""The real rounds of ``adaptation.py --shaped``: machines in network namespaces, whose rates the kernel limits.

Every machine is a process of its own in a namespace of its own. It follows the runtime's action lists over TLS, as
machines of a cluster do; its link is limited by ``tc tbf``, and its computing and each link's delay are waited for in
software. The planner sees the reports that a control unit gives, with all that processes, TLS and the machine add.

Needs root, and the program ``tc``. Run as ``python shaped_adaptation.py NAME`` it is one of the machines: a JSON object
on a line of its input is a round, and so is the answer.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import adaptation
import torch
from adaptation import Truth, idle, rounds_of, summary, without

from client_pipeline.partition.micro_batches import StepId
from client_pipeline.partition.plan import micro_batch_sizes
from client_pipeline.runtime.device import StepReport
from client_pipeline.runtime.meeting_point import MeetingPoint
from client_pipeline.runtime.node_tls import NodeTls
from client_pipeline.runtime.pacing import Pace, StagePace
from client_pipeline.runtime.pipeline import StepOutcome
from client_pipeline.runtime.round_times import round_times
from client_pipeline.runtime.stage import DoneAction, StepOrder, run_actions
from client_pipeline.runtime.tls_transport import TlsTransport
from client_pipeline.runtime.transport import BACKWARD, FORWARD, GroupAddress
from strategies.dssda.instance import Instance
from strategies.estimation.measured_network import MeasuredNetwork, declared_times
from strategies.planning.planner import Decision

# Rounds of some seconds: a tenth of the computing of the synthetic part, a twentieth of the rate's time.
_SHORTER = {
    "forward-gflop = 0.5": "forward-gflop = 0.05",
    "backward-gflop = 1.0": "backward-gflop = 0.1",
    "overhead-s = 0.05": "overhead-s = 0.005",
    "bandwidth-mhz = 2.0": "bandwidth-mhz = 4.0",
    "local-steps = 4": "local-steps = 2",
    # What is to be moved must fit rounds of seconds, too.
    "memory-gb = 3.0": "memory-gb = 0.03",
    "memory-gb = 0.375": "memory-gb = 0.00375",
}
WIDTH = 100
"""D of the tensors; their length gives them the declared bits."""
OVERHEAD = 1.045
"""Bytes on the wire over a tensor's: frames, TCP and TLS."""
BEFORE, AFTER = 6, 8
"""Rounds before and after a step."""
PATIENCE_S = 120.0


def slower_links(round_: int) -> Truth:
    """Let the rate of all machines fall to a sixth after round 30."""
    return Truth(link=[6.0 if round_ > 30 else 1.0] * len(adaptation.TRUE_SPEED))


def shaped_drift(round_: int) -> Truth:
    """Let the fastest device become slower by 2 % a round after round 30, for 20 rounds."""
    truth = Truth()
    truth.teb[0] *= 1.02 ** min(max(round_ - 30, 0), 20)
    return truth


def away_for_a_while(round_: int) -> Truth:
    """Let device 1 be away in the rounds 31 to 36."""
    return Truth(away=frozenset({1} if 30 < round_ <= 36 else ()))


STORIES: dict[str, tuple[adaptation.Story, int, tuple[int, ...]]] = {
    "steady": (adaptation.steady, 200, ()),
    "a device three times slower": (adaptation.slower_device, BEFORE + AFTER, (30,)),
    "a device three times faster": (adaptation.faster_device, BEFORE + AFTER, (30,)),
    "all rates at a sixth": (slower_links, BEFORE + AFTER, (30,)),
    "a drift of 2 % a round": (shaped_drift, BEFORE + 20, ()),
    "a device comes and goes": (away_for_a_while, BEFORE + 12, (30, 36)),
}


class IdleStage:
    """Computes nothing: what its machine would need is waited for."""

    def forward(self, step: StepId, micro_batch: int, x: torch.Tensor, mask: torch.Tensor, *, splits: bool) -> Any:
        """Pass the input on."""
        return x

    def backward(self, step: StepId, micro_batch: int, gradient: torch.Tensor, mask: torch.Tensor) -> Any:
        """Pass the gradient back."""
        return gradient

    def backward_weights(self, micro_batch: int) -> None:
        """Nothing to do."""


class DelayedTransport:
    """A transport whose tensors leave later, each by the link's delay."""

    def __init__(self, transport: TlsTransport, delay_s: float) -> None:
        self._transport, self._delay_s = transport, delay_s
        self.rank, self.size, self.generation = transport.rank, transport.size, transport.generation
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sent = threading.Semaphore(0)
        self._num_waiting = 0
        self.receive, self.close = transport.receive, transport.close
        threading.Thread(target=self._send, daemon=True).start()

    def send(self, *order: Any) -> None:
        """Send after the delay; returns at once."""
        self._num_waiting += 1
        self._orders.put((time.monotonic() + self._delay_s, order))

    def flush(self) -> None:
        """Wait until the peers have read all that was sent."""
        for _ in range(self._num_waiting):
            self._sent.acquire()
        self._num_waiting = 0
        self._transport.flush()

    def _send(self) -> None:
        while True:
            due, order = self._orders.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            self._transport.send(*order)
            self._sent.release()


def machine(name: str) -> None:
    """Be one machine: a round for each line of the input."""
    torch.set_num_threads(1)
    meeting: MeetingPoint | None = None
    group: DelayedTransport | None = None
    for line in sys.stdin:
        order = json.loads(line)
        tls = NodeTls(**{key: Path(path) for key, path in order["tls"].items()})
        if name == "cu" and meeting is None:
            meeting = MeetingPoint(order["address"]["host"], tls, PATIENCE_S)
        if "port" in order:
            answer: Any = {"port": meeting.port if meeting else 0}
        elif "try_s" in order:
            began = time.perf_counter()
            time.sleep(order["try_s"])
            answer = time.perf_counter() - began
        else:
            # Only now: a neighbour may still have waited for this machine to have read everything.
            if group is not None:
                group.close()
            address = GroupAddress(**order["address"])
            group = DelayedTransport(TlsTransport(address, order["rank"], tls), order["delay_s"])
            steps = [_step_order(order, step) for step in range(order["steps"])]
            if name == "cu":
                answer = [_lead(group, step) for step in steps]
            else:
                answer = [[list(a) for a in run_actions(IdleStage(), group, s)] for s in steps]  # type: ignore[arg-type]
        print(json.dumps(answer), flush=True)


def _step_order(order: dict[str, Any], step: int) -> StepOrder:
    return StepOrder(
        step=StepId(seed=0, round=1, step=step + 1, cluster=0),
        schedule=order["schedule"],
        sizes=order["sizes"],
        mask_BT=torch.ones(sum(order["sizes"]), order["length"], dtype=torch.bool),
        width=WIDTH,
        pace=Pace([StagePace(**stage) for stage in order["stages"]], 0.0),
    )


def _lead(group: DelayedTransport, order: StepOrder) -> dict[str, Any]:
    """One step of the control unit, whose decoder answers at once."""
    began, last = time.time(), group.size - 1
    shapes = order.shapes()
    outputs = [group.receive(shape, last, FORWARD, i) for i, shape in enumerate(shapes)]
    gradients = [group.receive(shape, 1, BACKWARD, i) for i, shape in enumerate(shapes)]
    for i, shape in enumerate(shapes):
        group.send(torch.randn(shape), 1, FORWARD, i)
    exchange = []
    for i, output in enumerate(outputs):
        asked = time.time()
        tensor = output.wait()
        exchange.append((asked, time.time(), time.time()))
        group.send(tensor, last, BACKWARD, i)
    for gradient in gradients:
        gradient.wait()
    group.flush()
    return {"exchange": exchange, "seconds": time.time() - began}


class ShapedCluster:
    """Namespaces, their links' rates, and a program on each."""

    def __init__(self, hosts: Any, folder: Path) -> None:
        from cluster_encryption import make_certificates

        self._hosts, self._folder = hosts, folder
        make_certificates(hosts, folder)
        self._programs = {name: self._start(name) for name in hosts.names}
        self._generation, self._rate_mbit = 0, 0.0
        self._away: frozenset[int] = frozenset()
        self._port = self._ask({"cu": self._order("cu") | {"port": 0}})["cu"]["port"]

    def train(self, decision: Decision, truth: Truth) -> dict[str, Any]:
        """Train one round; returns the report that a control unit would give."""
        declared, plan = decision.declared, decision.plans[0]
        faults = [{"kind": "joined", "device": k} for k in sorted(self._away - truth.away)]
        if lost := [k for k in plan.devices if k in truth.away]:
            plan = without(plan, lost)
            faults += [{"kind": "device", "device": k} for k in lost]
        self._away = truth.away
        times = shaped_times(declared, truth)
        self._limit(declared, times["link", 0][1])
        ring = [segment.device for segment in plan.segments()]
        sizes = micro_batch_sizes(declared.b, plan.m)
        share = declared.o_f / (declared.o_f + declared.o_b)
        stages = []
        for segment in plan.segments():
            fixed_s, sample_s = times["device", segment.device]
            passes = [len(segment.blocks) * (fixed_s + n * sample_s) for n in sizes]
            nothing = [0.0] * len(sizes)
            forward, backward = [share * s for s in passes], [(1 - share) * s for s in passes]
            stages.append(asdict(StagePace(forward, backward, nothing, nothing, nothing)))
        self._generation += 1
        round_order = {
            "address": asdict(
                GroupAddress(
                    host=self._hosts.address("cu"),
                    port=self._port,
                    generation=self._generation,
                    size=len(ring) + 1,
                    timeout_s=PATIENCE_S,
                    secure=True,
                )
            ),
            "steps": declared.steps,
            "schedule": plan.schedule,
            "sizes": sizes,
            "length": tensor_length(declared),
            "stages": stages,
            # Both directions of a link together are what is declared.
            "delay_s": times["link", 0][0] / 2,
        }
        names = ["cu", *(f"d{k}" for k in ring)]
        orders = {name: self._order(name) | round_order | {"rank": r} for r, name in enumerate(names)}
        # Machines without a TEB try one while the others train.
        spare = idle(plan, truth)
        for k in spare:
            fixed_s, sample_s = times["device", k]
            orders[f"d{k}"] = self._order(f"d{k}") | {"try_s": fixed_s + max(sizes) * sample_s}
        answers = self._ask(orders)
        outcomes = [
            StepOutcome(
                loss_sum=0.0,
                weight=1.0,
                devices={
                    k: StepReport(actions=[DoneAction(*a) for a in answers[f"d{k}"][step]], norm_sq=0.0) for k in ring
                },
                link_bytes=0,
                decoder_norm_sq=None,
                segments=plan.segments(),
                sizes=sizes,
                exchange=answers["cu"][step]["exchange"],
            )
            for step in range(declared.steps)
        ]
        return {
            "plan": plan.to_dict(),
            "faults": faults,
            "measured": round_times(outcomes) | {"spare": {str(k): [[max(sizes), 1, answers[f"d{k}"]]] for k in spare}},
            "train_s": sum(step["seconds"] for step in answers["cu"]),
            "paced_s": None,
            "exchange_s": None,
            "prepare_s": 0.1,
            "collect_s": 0.1,
            "moved_blocks": 0,
            "moved_bytes": 0,
        }

    def close(self) -> None:
        """End all programs."""
        for program in self._programs.values():
            assert program.stdin is not None
            program.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(20)
            program.kill()

    def _start(self, name: str) -> subprocess.Popen[str]:
        command = self._hosts.command(name, sys.executable, __file__, name)
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def _order(self, name: str) -> dict[str, Any]:
        tls = {"certificate": f"{name}.pem", "key": f"{name}.key", "authority": "cluster.pem"}
        return {
            "tls": {key: str(self._folder / file) for key, file in tls.items()},
            "address": {"host": self._hosts.address("cu")},
        }

    def _ask(self, orders: dict[str, dict[str, Any]]) -> dict[str, Any]:
        for name, order in orders.items():
            stdin = self._programs[name].stdin
            assert stdin is not None
            stdin.write(json.dumps(order) + "\n")
        answers = {}
        for name in orders:
            stdout = self._programs[name].stdout
            assert stdout is not None
            answers[name] = json.loads(stdout.readline())
        return answers

    def _limit(self, declared: Instance, sample_s: float) -> None:
        """Limit what every machine sends, so that a sample's activations and gradient take what they should."""
        rate_mbit = OVERHEAD * (declared.z_bits + declared.g_bits) / sample_s / 1e6
        if rate_mbit == self._rate_mbit:
            return
        self._rate_mbit = rate_mbit
        limit = ("rate", f"{rate_mbit:.3f}mbit", "burst", "16kb", "latency", "2s")
        for name in self._hosts.names:
            change = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)
            done = self._hosts.run(name, *change)
            assert done.returncode == 0, done.stderr


def tensor_length(declared: Instance) -> int:
    """T for which a sample's activations have the declared bits."""
    return round(declared.z_bits / 32 / WIDTH)


def shaped_times(declared: Instance, truth: Truth) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds of TEBs, links and the way to the control unit, fixed and of a sample: all links have one rate."""
    believed = declared_times(declared, 0)
    link = believed["link", 0]
    times = {
        ("device", k): (truth.teb[k] * believed["device", k].fixed_s, truth.teb[k] * believed["device", k].sample_s)
        for k in range(len(truth.teb))
    }
    times |= {("link", k): (link.fixed_s, truth.link[k] * link.sample_s) for k in range(len(truth.teb))}
    return times | {("outlet", 0): times["link", 0]}


def shaped_network(declared: Instance, truth: Truth, time_scale: float | None = None) -> MeasuredNetwork:
    """Return a network that knows the true numbers."""
    del time_scale
    network = MeasuredNetwork(declared.num_clusters)
    for key, (fixed_s, sample_s) in shaped_times(declared, truth).items():
        network.clusters[0].believe(key, fixed_s, sample_s)
    network.clusters[0].away = set(truth.away)
    return network


@contextlib.contextmanager
def shaped_cluster() -> Iterator[ShapedCluster]:
    """Five devices and a control unit."""
    from helpers.hosts import Namespaces

    names = ["cu", *(f"d{k}" for k in range(len(adaptation.TRUE_SPEED)))]
    with tempfile.TemporaryDirectory() as folder, Namespaces(names) as hosts:
        cluster = ShapedCluster(hosts, Path(folder))
        try:
            yield cluster
        finally:
            cluster.close()


def shaped_rows(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run the stories: rows as those of the synthetic part."""
    for text, shorter in _SHORTER.items():
        assert text in adaptation.SCENARIO, text
        adaptation.SCENARIO = adaptation.SCENARIO.replace(text, shorter)
    adaptation.true_network = shaped_network
    rows = []
    with shaped_cluster() as cluster:
        for name, (story, num_rounds, steps) in STORIES.items():
            shift = 0 if story is adaptation.steady else 30 - BEFORE
            lines = []
            for line in rounds_of(lambda r, s=story, by=shift: s(r + by), num_rounds, cluster.train):  # type: ignore[misc]
                lines.append(line | {"round": line["round"] + shift})
                say(
                    f"{name}, round {line['round']}: predicted {line['predicted_s']:.2f} s, measured "
                    f"{line['measured_s']:.2f} s, regret {line['regret']:.1%} {'; '.join(line['reasons'])}"
                )
            rows.append(summary(name, steps, lines, met=4))
    return rows


if __name__ == "__main__":
    machine(sys.argv[1])
