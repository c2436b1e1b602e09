"""Hostile frames against the decoder's running service, and a hostile service against a control unit, in little memory.

Good streams are taken and something is made wrong: shapes, types, values, weights, fields, offsets, order, tokens.
Most go into the service's entry point as gRPC calls it; some through a real channel; and some are answers to a real
control unit's end. The process may not grow by more than twice the frame limit (RLIMIT_AS, set once all is loaded;
stacks of later threads apart), and of each input is checked:

* it is refused with a status and a printable reason, or answered; nothing else is raised, no memory ran out;
* no token is in a reason, and nobody is admitted with another one;
* the decoder changed if and only if a whole step was confirmed, whose weight its labels can have.

    python benchmarks/fuzz.py                                   a table
    python benchmarks/fuzz.py --number 1000000 --seed 3 --json  one object on standard output

It exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

STACK_BYTES = 2**20
LATER_THREADS = 32
"""gRPC starts more threads when those it has wait for a processor: their stacks are allowed beside the growth."""
# One arena, small stacks, large blocks of their own: what is reserved and not used counts to RLIMIT_AS, too.
if os.environ.get("MALLOC_ARENA_MAX") != "1":
    os.environ |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv])

import grpc
import torch
import torch.nn.functional as F
from hostile_frames import EXAMPLES, LENGTH, VOCABULARY, WIDTH, Draft, Entry, good_step, mutated
from hostile_server import HostileServer, attack_control_unit
from torch import Tensor, nn

from client_pipeline.families import transformer
from client_pipeline.families.families import build_parts
from client_pipeline.link.address import METHOD, SERVICE
from client_pipeline.link.frames import PROTOCOL_VERSION, decode
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from strategies.decoder import limits as stream_limits
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.step_limits import StepLimits
from strategies.decoder.trainer import DecoderTrainer

FRAME_LIMIT = 16 * 2**20
SPEC = transformer.spec(
    vocab_size=VOCABULARY, width=WIDTH, num_heads=2, feed_forward=16, encoder_layers=1, decoder_layers=1, dropout=0.1
)
"""The limits are its, whatever computes."""
ADAM = OptimizerConfig(name="adamw", lr=0.01)
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Never UNKNOWN or INTERNAL: that is what an exception in the service looks like."""

Send = Callable[[Iterator[bytes]], "Outcome"]
Outcome = tuple[list[bytes], grpc.StatusCode, str]


class LinearHead(nn.Module):
    """Scores of the mean activation: next to no work, so that the time goes into what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies over the labels."""
        mean_BD = (hidden_BTD * mask_BT[..., None]).sum(1) / hidden_BTD.shape[1]
        labels_BU = targets["labels"].reshape(len(hidden_BTD), -1)
        scores_BUV = self.linear(mean_BD)[:, None].expand(-1, labels_BU.shape[1], -1)
        return F.cross_entropy(scores_BUV.flatten(0, 1), labels_BU.flatten(), reduction="sum")


class Aborted(Exception):  # noqa: N818
    """Error of gRPC's ``abort``."""


class Call:
    """Context that gRPC hands to the service's entry point beside the frames."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.code, self.details = grpc.StatusCode.OK, ""
        self.active = True
        self.callbacks: list[Callable[[], None]] = []

    def peer(self) -> str:
        """Return the address."""
        return self._peer

    def peer_identities(self) -> None:
        """No certificate."""

    def is_active(self) -> bool:
        """Tell whether the call goes on."""
        return self.active

    def cancel(self) -> None:
        """End it."""
        self.active = False

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call ``callback`` when it has ended."""
        self.callbacks.append(callback)
        return self.active

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End it with a status."""
        self.code, self.details = code, details
        raise Aborted


class Target:
    """The service, its open round, and what it has learned."""

    def __init__(self, service: DecoderService, channel: grpc.Channel, rng: random.Random) -> None:
        self.service = service
        self.exchange = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        self.rng = rng
        self.round = 0
        self.weights: list[Tensor] = []
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.open()

    def open(self) -> None:
        """Begin a round of one cluster and one or two steps."""
        self.round += 1
        self.service.trainer.settle_sync("step" if self.round % 2 else "round")
        self.token = self.service.open_round(self.round, [0], 2)[0].token
        self.weights = [p.detach().clone() for p in self.service.trainer.head.parameters()]

    def direct(self, frames: Iterator[bytes]) -> Outcome:
        """Call the service's entry point, as gRPC's thread does."""
        call, answers = Call(f"ipv4:10.{self.round >> 16 & 255}.{self.round >> 8 & 255}.{self.round & 255}:1"), []
        try:
            answers.extend(self.service._serve(frames, call))  # type: ignore[arg-type]
        except Aborted:
            pass
        except BaseException as error:
            call.code, call.details = grpc.StatusCode.UNKNOWN, repr(error)
        call.active = False
        for callback in call.callbacks:
            callback()
        return answers, call.code, call.details

    def remote(self, frames: Iterator[bytes]) -> Outcome:
        """Send the frames over a real channel; both of its ends are in this process, so that large ones are cut."""
        call, answers = self.exchange((frame[: 2**20] for frame in frames), timeout=60), []
        try:
            answers.extend(call)
        except grpc.RpcError as error:
            return answers, error.code(), error.details()
        return answers, grpc.StatusCode.OK, ""

    def hello(self, token: str) -> Draft:
        """Build a right hello, if the token is."""
        return Draft({"kind": "hello", "version": PROTOCOL_VERSION, "token": token, "round": self.round, "cluster": 0})

    def attack(self, send: Send) -> None:
        """Send one hostile stream, or two of which one resumes the other, and look what came of it."""
        rng = self.rng
        steps = [good_step(rng, self.round, step) for step in range(1, rng.choice((2, 2, 2, 3)))]
        frames = [frame for step in steps for frame in step] + [Draft({"kind": "bye"})]
        if rng.random() < 0.5:
            frames = frames[:1]  # what is wrong comes first: nothing is computed
        tokens = {self.token}
        if rng.random() < 0.1:
            # Mostly the hello: nobody comes in but with the token as it is.
            hello = mutated(rng, [self.hello(rng.choice((self.token, self.token[:-1], self.token.swapcase())))])
            self._send(send, [*hello, *frames], tokens)
        elif rng.random() < 0.2:
            place = rng.randrange(len(frames))
            answers = self._send(send, [self.hello(self.token), *frames[:place]], tokens)
            resume = str(decode(answers[0]).header["resume"]) if answers else "x"
            tokens.add(resume)
            again = rng.choice((0, 0, place))
            hello = self.hello(rng.choice((resume, resume, resume, self.token, resume[::-1])))
            self._send(send, [hello, *mutated(rng, frames[again:])], tokens)
        else:
            self._send(send, [self.hello(self.token), *mutated(rng, frames)], tokens)
        self.look()

    def _send(self, send: Send, drafts: list[Draft], tokens: set[str]) -> list[bytes]:
        # One after the other, as they come from a network: only the frame that is read is in memory.
        answers, code, details = send(draft.to_bytes() for draft in drafts)
        kinds = [decode(answer, FRAME_LIMIT).kind for answer in answers]
        self.counts.update(kinds)
        self.counts[code.name] += 1
        self.expect(code in ANSWERS, f"{code}: {details}", drafts)
        self.expect(len(details) < 1000 and details.isprintable(), f"reason {details!r}", drafts)
        self.expect("alloc" not in details and "memory" not in details, f"memory: {details}", drafts)
        self.expect(not any(token in details for token in tokens), f"a token is in {details!r}", drafts)
        right = drafts and token_of(drafts[0]) in tokens
        self.expect(right or not answers, "admitted without the token", drafts)
        return answers

    def look(self) -> None:
        """Close the round: what was learned is what was confirmed."""
        summary = self.service.finish_round().clusters[0]
        changed = any(
            not torch.equal(old, new.detach())
            for old, new in zip(self.weights, self.service.trainer.head.parameters(), strict=True)
        )
        # In mode round a cluster that left is in no average.
        learned = summary.steps > 0 and (self.service.trainer.decoder_sync == "step" or summary.departure is None)
        self.counts["steps"] += summary.steps
        self.expect(changed == learned, f"changed {changed}, steps {summary.steps}, left {summary.departure}", [])
        self.expect(summary.weight <= summary.steps * EXAMPLES * LENGTH, f"weight {summary.weight}", [])
        finite = not changed or all(bool(p.isfinite().all()) for p in self.service.trainer.head.parameters())
        self.expect(finite, "weights are not finite", [])
        self.open()

    def control_unit(self, server: HostileServer) -> None:
        """Let a hostile server answer a control unit's end, and look what it made of that."""
        drafts, result, wrong = attack_control_unit(server, self.rng, FRAME_LIMIT)
        self.counts[f"control unit: {result}"] += 1
        self.expect(not wrong, wrong, drafts)

    def expect(self, condition: Any, text: str, drafts: list[Draft]) -> None:
        """Note what should not be."""
        if not condition and len(self.failures) < 20:
            described = [(d.text or str(d.header)[:200], {n: e.shape for n, e in d.tensors.items()}) for d in drafts]
            self.failures.append(f"round {self.round}: {text[:300]}; {described}")


def token_of(draft: Draft) -> Any:
    """Return a hello's header, by a second reader."""
    try:
        header = draft.header if draft.text is None else json.loads(draft.text)
    except (ValueError, RecursionError):
        return None
    return header.get("token") if isinstance(header, dict) and isinstance(header.get("token"), str) else None


def huge_on_paper(target: Target) -> None:
    """Send what once took gigabytes: frames of some hundred bytes, and weights of 400,000."""
    rng, empty = target.rng, Entry("BOOL", [2**30, 0, 1], b"")
    frame = good_step(rng, target.round)[0]
    long = 400_000 // 8
    labels = Entry("I64", [8, long], (3).to_bytes(8, "little") * (8 * long))
    weights = {"weight": float(8 * long), "total_weight": float(8 * long), "num_micro_batches": 1}
    attacks = [
        Draft(frame.header, {**frame.tensors, "mask": empty}),
        Draft(frame.header, {**frame.tensors, "hidden": Entry("F32", [2**31, 0, WIDTH], b"")}),
        Draft(frame.header, {**frame.tensors, "target.labels": Entry("I64", [2**40, 0], b"")}),
        Draft(
            frame.header | weights,
            {
                "target.labels": labels,
                "hidden": Entry("F32", [8, 1, WIDTH], bytes(32 * WIDTH)),
                "mask": Entry("BOOL", [8, 1], b"\1" * 8),
            },
        ),
    ]
    for draft in attacks:
        header = {**draft.header, "round": target.round}
        answers = target._send(
            target.direct, [target.hello(target.token), Draft(header, draft.tensors)], {target.token}
        )
        target.expect(len(answers) <= 1, "it was answered", [draft])
        target.look()


def status_bytes(key: str) -> int:
    """Read one line of what the kernel says of this process [byte]."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def honest_round(target: Target, service: DecoderService) -> None:
    """Train a step over a real stream, as if nothing had been."""
    service.finish_round()
    target.round += 1
    address = service.open_round(target.round, [0], 1)[0]
    labels = torch.full((2, 3), 3)
    with DecoderStream.open(address) as stream:
        stream.begin_step(StepId(seed=1, round=target.round, step=1, cluster=0), 1, 6.0)
        stream.send(0, torch.ones(2, 4, WIDTH), torch.ones(2, 4, dtype=torch.bool), {"labels": labels})
        stream.receive()
        stream.end_step(1.0)
    target.expect(service.finish_round().clusters[0].steps == 1, "an honest step did not count", [])
    target.open()


def run(number: int, seed: int, head: nn.Module) -> dict[str, Any]:
    """Try ``number`` inputs on a service with ``head`` for a decoder; returns the figures."""
    torch.set_num_threads(1)
    logging.getLogger("flwr.collapipe.decoder").setLevel(logging.ERROR)  # a line for each input
    stream_limits.WRONG_HELLOS = 10**9  # one peer sends thousands over the real channel; the limit has its own tests
    trainer = DecoderTrainer(HeadTrainer(head, ADAM, unit=1), "step", 20.0, 20.0)
    limits = StepLimits.of(SPEC, EXAMPLES, LENGTH)
    service = DecoderService(DecoderConfig(max_frame_bytes=FRAME_LIMIT), trainer, 1, limits=limits)
    service.start()
    server = HostileServer()
    start, tried = time.perf_counter(), Counter[str]()
    try:
        with grpc.insecure_channel(service.advertised) as channel:
            target = Target(service, channel, random.Random(seed))
            for _ in range(3):
                honest_round(target, service)
                target.control_unit(server)
            size, peak = status_bytes("VmSize"), status_bytes("VmRSS")
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")  # the largest resident size is counted from here on
            limit_bytes = size + 2 * FRAME_LIMIT + LATER_THREADS * STACK_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
            huge_on_paper(target)
            for i in range(number):
                kind = "control unit" if i % 50 == 0 else "channel" if i % 20 == 1 else "direct"
                tried[kind] += 1
                if kind == "control unit":
                    target.control_unit(server)
                else:
                    target.attack(target.remote if kind == "channel" else target.direct)
                if target.failures:
                    break
            growth = status_bytes("VmHWM") - peak
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            honest_round(target, service)
            deadline = time.monotonic() + 20
            while service.reception.num_streams and time.monotonic() < deadline:
                time.sleep(0.01)
            target.expect(not service.reception.num_streams, "streams are left", [])
            target.expect(growth <= 2 * FRAME_LIMIT, f"the process grew by {growth} bytes", [])
    finally:
        server.stop()
        service.stop()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seed": seed,
        "inputs": sum(tried.values()),
        "tried": dict(tried),
        "outcomes": dict(sorted(target.counts.items())),
        "frame_limit_bytes": FRAME_LIMIT,
        "growth_bytes": growth,
        "threads": threading.active_count(),
        "wall_s": round(time.perf_counter() - start, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "failures": target.failures,
    }


def main() -> int:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100_000, help="inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transformer", action="store_true", help="a Transformer's decoder; takes three times as long")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    head = build_parts(SPEC, seed=1).head if arguments.transformer else LinearHead()
    figures = run(arguments.number, arguments.seed, head)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            for key, part in value.items() if isinstance(value, dict) else [("", value)]:
                print(f"{name:18} {key:28} {part}")
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
