"""Machines in network namespaces for ``adaptation.py --shaped``: the kernel limits their rates, software their speed.

Every machine is a process of its own in a namespace of its own. It follows the runtime's action lists over TLS, as
machines of a cluster do. What it sends is limited by ``tc htb``: all of it, and what goes to a neighbour over a link
that is slower. Its computing and each link's delay are waited for. The report is the one that a control unit gives.

Needs root, and the program ``tc``. Run as ``python shaped_machines.py NAME`` it is one of the machines: a JSON object
on a line of its input is a round, and so is the answer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
from adaptation_stories import TRUE_SPEED, Truth, idle, without

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.plan import ClusterPlan, micro_batch_sizes
from client_pipeline.runtime.control_unit.round_report import round_times
from client_pipeline.runtime.devices.device import StepReport
from client_pipeline.runtime.devices.step_outcome import StepOutcome
from client_pipeline.runtime.stage.stage import DoneAction, StepOrder, run_actions
from client_pipeline.runtime.transport.meeting_point import MeetingPoint
from client_pipeline.runtime.transport.node_tls import NodeTls
from client_pipeline.runtime.transport.tls_transport import TlsTransport
from client_pipeline.runtime.transport.transport import BACKWARD, FORWARD, GroupAddress
from client_pipeline.timetable.pacing import Pace, StagePace
from strategies.dssda.instance import Instance
from strategies.estimation.cluster_times import DEVICE, LINK, OUTLET
from strategies.estimation.measured_network import MeasuredNetwork, declared_times

WIDTH = 100
"""D of the tensors; their length gives them the declared bits."""
OVERHEAD = 1.045
"""Bytes on the wire over a tensor's: frames, TCP and TLS."""
NOISE = 0.03
"""Relative standard deviation of each device's speed and each link's delay from round to round, where there is any."""
BURST = "16kb"
PATIENCE_S = 120.0
CONTROL_UNIT = "cu"


class IdleStage:
    """Computes nothing: what its machine would need is waited for."""

    def forward(self, step: StepId, micro_batch: int, x: torch.Tensor, mask: torch.Tensor, *, splits: bool) -> Any:
        """Pass the input on."""
        return x

    def backward(self, step: StepId, micro_batch: int, gradient: torch.Tensor, mask: torch.Tensor) -> Any:
        """Pass the gradient back."""
        return gradient

    def backward_weights(self, micro_batch: int) -> None:
        """Do nothing."""


class DelayedTransport:
    """A transport whose tensors leave later, each by the delay of the link that it takes.

    Parameters
    ----------
    transport : sends them
    forward_s, backward_s : delay of what goes to the next stage, and to the one before [s]
    """

    def __init__(self, transport: TlsTransport, forward_s: float, backward_s: float) -> None:
        self._transport, self._delay_s = transport, {FORWARD: forward_s, BACKWARD: backward_s}
        self.rank, self.size, self.generation = transport.rank, transport.size, transport.generation
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sent = threading.Semaphore(0)
        self._num_waiting = 0
        self.receive, self.close = transport.receive, transport.close
        threading.Thread(target=self._send, daemon=True).start()

    def send(self, tensor: torch.Tensor, peer: int, direction: int, micro_batch: int) -> None:
        """Send after the delay; returns at once."""
        self._num_waiting += 1
        self._orders.put((time.monotonic() + self._delay_s[direction], (tensor, peer, direction, micro_batch)))

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
        tls = NodeTls(host=order["host"], **{key: Path(path) for key, path in order["tls"].items()})
        if name == CONTROL_UNIT and meeting is None:
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
            group = DelayedTransport(TlsTransport(address, order["rank"], tls), *order["delays_s"])
            steps = [_step_order(order, step) for step in range(order["steps"])]
            if name == CONTROL_UNIT:
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
        self._generation = 0
        self._limits: dict[str, str] = {}
        self._away: frozenset[int] = frozenset()
        self._port = 0

    def meet(self) -> None:
        """Wait until all programs are there."""
        orders = {name: self._order(name) | {"try_s": 0.0} for name in self._hosts.names}
        orders[CONTROL_UNIT] = self._order(CONTROL_UNIT) | {"port": 0}
        self._port = self._ask(orders)[CONTROL_UNIT]["port"]

    def train(
        self, declared: Instance, plan: ClusterPlan, truth: Truth, noise: np.random.Generator | None = None
    ) -> dict[str, Any]:
        """Train one round; returns the report that a control unit would give.

        Parameters
        ----------
        declared, plan, truth : of the round
        noise : of :data:`NOISE`, of devices and delays, for the whole round; and of each pass once more
        """
        faults = [{"kind": "joined", "device": k} for k in sorted(self._away - truth.away)]
        if lost := [k for k in plan.devices if k in truth.away]:
            plan = without(plan, lost)
            faults += [{"kind": "device", "device": k} for k in lost]
        self._away = truth.away
        times = shaped_times(declared, truth)
        ring = [segment.device for segment in plan.segments()]
        self._limit(declared, truth, ring)

        def noisy(seconds: float) -> float:
            return seconds if noise is None else seconds * float(np.exp(NOISE * noise.standard_normal()))

        factors = {key: noisy(1.0) for key in times}
        sizes = micro_batch_sizes(declared.b, plan.m)
        share = declared.o_f / (declared.o_f + declared.o_b)
        stages = []
        for segment in plan.segments():
            fixed_s, sample_s = times[DEVICE, segment.device]
            teb_s = factors[DEVICE, segment.device] * len(segment.blocks)
            forward, backward = (
                [noisy(part * teb_s * (fixed_s + n * sample_s)) for n in sizes] for part in (share, 1 - share)
            )
            nothing = [0.0] * len(sizes)
            stages.append(asdict(StagePace(forward, backward, nothing, nothing, nothing)))
        self._generation += 1
        address = GroupAddress(
            host=self._hosts.address(CONTROL_UNIT),
            port=self._port,
            generation=self._generation,
            size=len(ring) + 1,
            timeout_s=PATIENCE_S,
            secure=True,
        )
        round_order = {
            "address": asdict(address),
            "steps": declared.steps,
            "schedule": plan.schedule,
            "sizes": sizes,
            "length": tensor_length(declared),
            "stages": stages,
        }
        # Before each member of the ring, and back to the first. Both directions together are what is declared.
        keys = [(LINK, ring[0]), *((LINK, k) for k in ring[:-1]), (OUTLET, 0)]
        delays_s = [factors[key] * times[key][0] / 2 for key in keys]
        names = [CONTROL_UNIT, *(f"d{k}" for k in ring)]
        orders = {
            name: self._order(name) | round_order | {"rank": rank, "delays_s": [delays_s[rank], delays_s[rank - 1]]}
            for rank, name in enumerate(names)
        }
        # Machines without a TEB try one while the others train.
        spare = idle(plan, truth)
        for k in spare:
            fixed_s, sample_s = times[DEVICE, k]
            try_s = factors[DEVICE, k] * (fixed_s + max(sizes) * sample_s)
            orders[f"d{k}"] = self._order(f"d{k}") | {"try_s": try_s}
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
                exchange=answers[CONTROL_UNIT][step]["exchange"],
            )
            for step in range(declared.steps)
        ]
        return {
            "plan": plan.to_dict(),
            "faults": faults,
            "measured": round_times(outcomes) | {"spare": {str(k): [[max(sizes), 1, answers[f"d{k}"]]] for k in spare}},
            "train_s": sum(step["seconds"] for step in answers[CONTROL_UNIT]),
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
        # A machine of its own would not wait for what else this one computes.
        command = self._hosts.command(name, "chrt", "--rr", "1", sys.executable, __file__, name)
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def _order(self, name: str) -> dict[str, Any]:
        tls = {"certificate": f"{name}.pem", "key": f"{name}.key", "authority": "cluster.pem"}
        return {
            "host": self._hosts.address(name),
            "tls": {key: str(self._folder / file) for key, file in tls.items()},
            "address": {"host": self._hosts.address(CONTROL_UNIT)},
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

    def _limit(self, declared: Instance, truth: Truth, ring: list[int]) -> None:
        """Limit what every machine sends, so that a sample's activations and gradient take what they should."""
        fastest = min(truth.link)
        sample_s = shaped_times(declared, truth)[OUTLET, 0][1]
        rate_mbit = OVERHEAD * (declared.z_bits + declared.g_bits) / sample_s / 1e6
        slower: dict[str, dict[str, float]] = {name: {} for name in self._hosts.names}
        for k, after in itertools.pairwise(ring):
            if truth.link[k] > fastest:
                slower[f"d{k}"][f"d{after}"] = slower[f"d{after}"][f"d{k}"] = rate_mbit * fastest / truth.link[k]
        for name, rates in slower.items():
            script = self._script(rate_mbit, rates)
            if script != self._limits.get(name):
                self._limits[name] = script
                done = self._hosts.run(name, "tc", "-batch", "-", input=script)
                assert done.returncode == 0, done.stderr

    def _script(self, rate_mbit: float, slower: dict[str, float]) -> str:
        """Return the lines for ``tc`` that limit all that a machine sends, and what it sends to some others."""

        def add(parent: str, number: int, least_mbit: float, most_mbit: float) -> str:
            rates = f"rate {least_mbit:.3f}mbit ceil {most_mbit:.3f}mbit burst {BURST} cburst {BURST}"
            return f"class add dev eth0 parent {parent} classid 1:{number} htb {rates} quantum 1514"

        # A qdisc is replaced, with its classes, by one of another kind alone.
        lines = ["qdisc replace dev eth0 root pfifo", "qdisc replace dev eth0 root handle 1: htb default 2"]
        lines += [add("1:", 1, rate_mbit, rate_mbit), add("1:1", 2, rate_mbit - sum(slower.values()), rate_mbit)]
        for number, (peer, mbit) in enumerate(sorted(slower.items()), 3):
            to_peer = f"u32 match ip dst {self._hosts.address(peer)}/32"
            lines.append(add("1:1", number, mbit, mbit))
            lines.append(f"filter add dev eth0 parent 1: protocol ip {to_peer} flowid 1:{number}")
        return "\n".join(lines) + "\n"


def tensor_length(declared: Instance) -> int:
    """T for which a sample's activations have the declared bits."""
    return round(declared.z_bits / 32 / WIDTH)


def shaped_times(declared: Instance, truth: Truth) -> dict[tuple[str, int], tuple[float, float]]:
    """Seconds of TEBs, links and the way to the control unit, which has the rate of the fastest link.

    Each fixed, and of a sample.
    """
    believed = declared_times(declared, 0)
    link = believed[LINK, 0]
    times = {
        (DEVICE, k): (factor * believed[DEVICE, k].fixed_s, factor * believed[DEVICE, k].sample_s)
        for k, factor in enumerate(truth.teb)
    }
    times |= {(LINK, k): (link.fixed_s, factor * link.sample_s) for k, factor in enumerate(truth.link)}
    return times | {(OUTLET, 0): (link.fixed_s, min(truth.link) * link.sample_s)}


def shaped_network(declared: Instance, truth: Truth) -> MeasuredNetwork:
    """Return a network that knows the true numbers."""
    network = MeasuredNetwork(declared.num_clusters)
    for key, (fixed_s, sample_s) in shaped_times(declared, truth).items():
        network.clusters[0].believe(key, fixed_s, sample_s)
    network.clusters[0].away = set(truth.away)
    return network


@contextlib.contextmanager
def shaped_cluster() -> Iterator[ShapedCluster]:
    """Five devices and a control unit."""
    from helpers.hosts import Namespaces

    names = [CONTROL_UNIT, *(f"d{k}" for k in range(len(TRUE_SPEED)))]
    with tempfile.TemporaryDirectory() as folder, Namespaces(names) as hosts:
        cluster = ShapedCluster(hosts, Path(folder))
        try:
            yield cluster
        finally:
            cluster.close()


if __name__ == "__main__":
    machine(sys.argv[1])
