"""Time of one exchange with the decoder: through the stream, and through a Flower message.

Both carry 1 MiB of float32 from one process to another on this machine and 1 MiB back, as one micro-batch's
activations and their gradient do. The decoder is a trivial head, so that the exchange is what is measured. The
stream is measured before and after the messages, so that both meet about the same load.

    python benchmarks/decoder_exchange.py            a table
    python benchmarks/decoder_exchange.py --json     {"stream_ms": .., "flower_ms": ..}, medians, on standard output
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import torch
from torch import Tensor, nn

from client_pipeline.runtime.ray.private_ray import prepare_private_ray

# Before Ray is loaded.
prepare_private_ray()

from client_pipeline.link.address import DecoderAddress
from client_pipeline.link.stream import DecoderStream
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.stage.decoder_update import HeadTrainer
from client_pipeline.runtime.stage.learning_rate import OptimizerConfig
from strategies.decoder.config import DecoderConfig
from strategies.decoder.service import DecoderService
from strategies.decoder.trainer import DecoderTrainer

SHAPE_BTD = (8, 256, 128)
"""1 MiB of float32."""
WARM_UP = 5


class TrivialHead(nn.Module):
    """One weight: its loss is the weighted sum of the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        return hidden_BTD.sum() * self.weight


def serve(pipe: Connection, num_steps: int) -> None:
    """Run the decoder's service, as the strategy's process does, until the other end hangs up."""
    torch.set_num_threads(1)
    trainer = HeadTrainer(TrivialHead(), OptimizerConfig(name="sgd", lr=1e-9), unit=1)
    service = DecoderService(DecoderConfig(), DecoderTrainer(trainer), num_clusters=1)
    service.start()
    try:
        pipe.send(service.open_round(1, [0], num_steps)[0])
        pipe.poll(600)  # until the other end closes it
    finally:
        service.stop()


def measure_stream(repetitions: int) -> list[float]:
    """Time ``repetitions`` round trips of one micro-batch [s]."""
    hidden = torch.randn(SHAPE_BTD)
    mask = torch.ones(SHAPE_BTD[:2], dtype=torch.bool)
    targets = {"labels": torch.zeros(SHAPE_BTD[:2], dtype=torch.int64)}
    weight, num_micro_batches = float(mask.numel()), WARM_UP + repetitions
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, 1), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(120):
            raise RuntimeError("the decoder's service did not start within 120 s")
        address: DecoderAddress = ours.recv()
        times = []
        with DecoderStream.open(address) as stream:
            stream.begin_step(StepId(seed=0, round=1, step=1, cluster=0), num_micro_batches, weight * num_micro_batches)
            for i in range(num_micro_batches):
                start = time.perf_counter()
                stream.send(i, hidden, mask, targets)
                gradient = stream.receive()
                times.append(time.perf_counter() - start)
                assert gradient.tensor.shape == hidden.shape
            stream.end_step(1.0)
    finally:
        ours.close()
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()
    return times[WARM_UP:]


def measure_flower(repetitions: int) -> list[float]:
    """Time ``repetitions`` messages from a server app to a client app in simulation, and their replies [s]."""
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    times: list[float] = []
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.query()
    def echo(message: Message, context: Context) -> Message:
        return Message(RecordDict({"gradient": message.content["activations"]}), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        while not (nodes := list(grid.get_node_ids())):
            time.sleep(0.1)
        hidden = np.random.default_rng(0).standard_normal(SHAPE_BTD, dtype=np.float32)
        for _ in range(WARM_UP + repetitions):
            start = time.perf_counter()
            content = RecordDict({"activations": ArrayRecord({"hidden": Array(hidden)})})
            message = Message(content, message_type="query", dst_node_id=nodes[0])
            (reply,) = grid.send_and_receive([message], timeout=60)
            gradient = reply.content["gradient"]["hidden"].numpy()
            times.append(time.perf_counter() - start)
            assert gradient.shape == hidden.shape

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app,
        client_app,
        num_supernodes=1,
        backend_config={"init_args": {"num_cpus": 1, "include_dashboard": False}, "client_resources": resources},
    )
    if len(times) != WARM_UP + repetitions:
        raise RuntimeError("the simulation ended early; its log is on standard error")
    return times[WARM_UP:]


@contextmanager
def standard_output_to_error() -> Iterator[None]:
    """Keep what libraries and their processes print away from standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the medians as one JSON object and nothing else")
    parser.add_argument("--repetitions", type=int, default=100, help="round trips through the stream")
    parser.add_argument("--messages", type=int, default=20, help="round trips through a Flower message")
    options = parser.parse_args()
    if min(options.repetitions, options.messages) < 2:
        parser.error(f"expected at least 2 repetitions and messages, found {options.repetitions}, {options.messages}")
    torch.set_num_threads(1)
    with standard_output_to_error():
        half = options.repetitions // 2
        stream = measure_stream(half)
        flower = measure_flower(options.messages)
        stream += measure_stream(options.repetitions - half)
    medians = {name: 1e3 * statistics.median(times) for name, times in (("stream", stream), ("flower", flower))}
    if options.json:
        print(json.dumps({f"{name}_ms": round(value, 3) for name, value in medians.items()}))
        return 0
    print("1 MiB of float32 there and 1 MiB back, two processes on this machine")
    print(f"{'':24}{'median':>10}{'90 %':>10}{'round trips':>14}")
    for name, label, times in (("stream", "decoder stream (gRPC)", stream), ("flower", "Flower message", flower)):
        slow = 1e3 * statistics.quantiles(times, n=10)[-1]
        print(f"{label:24}{medians[name]:>7.2f} ms{slow:>7.2f} ms{len(times):>14}")
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
