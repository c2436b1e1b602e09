"""Time of encryption within a cluster: TLS beside gloo, and Ray with and without, in turns.

Two network namespaces on this machine, on a link with or without a limit of its rate, need root. The control unit and a
device send tensors there and back over both transports, one after the other, so that other work on the machine touches
both alike; then two Rays, one of them encrypted, are called in turns.

    python benchmarks/cluster_encryption.py [--trials 15] [--rate-mbit 0] [--ray] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.hosts import Namespaces

PLAIN, ENCRYPTED = "plain", "TLS"
SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
"""Sizes of a tensor [byte]."""
BURST = 4
"""Tensors that follow each other, as micro-batches do."""
PATIENCE_S = 300.0
_UNLIMITED_MBIT = 100_000


def exchange(role: str, folder: Path, host: str, trials: int) -> list[dict[str, Any]]:
    """Be one end of both transports; the control unit's end measures."""
    import torch

    from client_pipeline.runtime.transport.meeting_point import MeetingPoint
    from client_pipeline.runtime.transport.node_tls import NodeTls
    from client_pipeline.runtime.transport.tls_transport import TlsTransport
    from client_pipeline.runtime.transport.transport import (
        BACKWARD,
        FORWARD,
        GlooTransport,
        GroupAddress,
        Transport,
        open_store,
    )

    torch.set_num_threads(1)
    leads = role == "cu"
    tls = NodeTls(certificate=folder / f"{role}.pem", key=folder / f"{role}.key", authority=folder / "cluster.pem")
    places = folder / "places.json"
    if leads:
        meeting, store = MeetingPoint(host, tls, PATIENCE_S), open_store(host, PATIENCE_S)
        places.with_suffix(".new").write_text(json.dumps([host, meeting.port, store.port]))
        places.with_suffix(".new").replace(places)
    while not places.exists():
        time.sleep(0.05)
    head, *ports = json.loads(places.read_text())
    addresses = [
        GroupAddress(host=head, port=port, generation=1, size=2, timeout_s=PATIENCE_S, secure=secure)
        for port, secure in zip(ports, (True, False), strict=True)
    ]
    transports: dict[str, Transport] = {
        ENCRYPTED: TlsTransport(addresses[0], 0 if leads else 1, tls),
        PLAIN: GlooTransport(addresses[1], 0 if leads else 1, store if leads else None),
    }
    rows = []
    for size in SIZES:
        tensor = torch.randn(size // 4)
        seconds: dict[str, list[float]] = {name: [] for name in transports}
        for trial in range(trials + 1):
            for name in (ENCRYPTED, PLAIN) if trial % 2 else (PLAIN, ENCRYPTED):
                transport = transports[name]
                arrives, leaves = (BACKWARD, FORWARD) if leads else (FORWARD, BACKWARD)
                posted = [transport.receive((size // 4,), 1 - transport.rank, arrives, i) for i in range(BURST)]
                start = time.perf_counter()
                for i in range(BURST):
                    transport.send(tensor if leads else posted[i].wait(), 1 - transport.rank, leaves, i)
                if leads:
                    for receive in posted:
                        receive.wait()
                transport.flush()
                if trial:
                    seconds[name].append(time.perf_counter() - start)
        rows.append({"what": f"{BURST} tensors there and back", "bytes": size, **compared(seconds)})
    for transport in transports.values():
        transport.close()
    return rows


def compared(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Medians of both, and of the ratio of what was measured one right after the other."""
    ratios = [tls / plain for plain, tls in zip(seconds[PLAIN], seconds[ENCRYPTED], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "plain_s": statistics.median(seconds[PLAIN]),
        "tls_s": statistics.median(seconds[ENCRYPTED]),
        "ratio": statistics.median(ratios),
        "ratio_low": quartiles[0],
        "ratio_high": quartiles[2],
    }


RAY_DRIVER = """
import sys, time
import numpy, ray
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], log_to_driver=False, logging_level="ERROR")
@ray.remote(num_cpus=0, resources={"collapipe-device-0": 0.01})
class Echo:
    def echo(self, x): return x
actor = Echo.remote()
ray.get(actor.echo.remote(0))
print("ready", flush=True)
for line in sys.stdin:
    size, repeats = map(int, line.split())
    x = numpy.random.default_rng(0).random(size // 8) if size else 0
    start = time.perf_counter()
    for _ in range(repeats):
        ray.get(actor.echo.remote(x))
    print((time.perf_counter() - start) / repeats, flush=True)
"""


def compare_rays(hosts: Namespaces, folder: Path, trials: int) -> list[dict[str, Any]]:
    """Two Rays of two machines each; an actor on the other machine is called."""
    from client_pipeline.runtime.ray.ray_folder import short_folder
    from client_pipeline.runtime.transport.node_tls import NodeTls
    from flower_app.deployment.ray_node import RayNode, ray_environment

    (folder / "token").write_text("0" * 64)
    temps, drivers = [], {}
    try:
        for number, name in enumerate((PLAIN, ENCRYPTED)):
            first_port = 7000 + 200 * number
            head = f"{hosts.address('cu')}:{first_port}"
            environments = {}
            for role in ("cu", "d0"):
                tls = NodeTls(
                    certificate=folder / f"{role}.pem", key=folder / f"{role}.key", authority=folder / "cluster.pem"
                )
                environments[role] = ray_environment(os.environ, folder / "token", tls if number else None)
                temps.append(Path(tempfile.mkdtemp(prefix="collapipe-", dir=short_folder())))
                node = RayNode(
                    host=hosts.address(role),
                    head=head if role == "d0" else "",
                    devices=[0] if role == "d0" else [],
                    first_port=first_port,
                    object_store_mb=200,
                    temp=temps[-1],
                )
                start_node(hosts, role, node.command(), environments[role], folder / f"ray-{name}-{role}.log")
            drivers[name] = subprocess.Popen(
                hosts.command("cu", sys.executable, "-c", RAY_DRIVER, head, hosts.address("cu")),
                env=environments["cu"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            assert drivers[name].stdout.readline() == "ready\n"
        rows = []
        for what, size, repeats in (("call of an actor", 0, 20), ("object there and back", 4 * 2**20, 2)):
            seconds: dict[str, list[float]] = {name: [] for name in drivers}
            for trial in range(trials + 1):
                for name in (ENCRYPTED, PLAIN) if trial % 2 else (PLAIN, ENCRYPTED):
                    drivers[name].stdin.write(f"{size} {repeats}\n")
                    measured = float(drivers[name].stdout.readline())
                    if trial:
                        seconds[name].append(measured)
            rows.append({"what": f"Ray: {what}", "bytes": size, **compared(seconds)})
        return rows
    finally:
        for driver in drivers.values():
            driver.stdin.close()
            driver.wait(60)
        for child in list(reversed(hosts.running)):
            hosts.end(child)
            hosts.running.remove(child)
        for temp in temps:
            shutil.rmtree(temp, ignore_errors=True)


def start_node(hosts: Namespaces, role: str, command: list[str], environment: dict[str, str], log: Path) -> None:
    """Start a Ray node; on a busy machine it may need more than one attempt."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        child, began = hosts.start(role, *command, log=log, env=environment), time.monotonic()
        while child.poll() is None and time.monotonic() - began < 60.0:
            if "Ray runtime started" in log.read_text(errors="replace"):
                return
            time.sleep(0.5)
        hosts.end(child)
        hosts.running.remove(child)
        assert time.monotonic() < deadline, log.read_text()[-2000:]


def make_certificates(hosts: Namespaces, folder: Path) -> None:
    """A cluster's authority, and its two machines' certificates."""
    from cryptography.hazmat.primitives.asymmetric import ec

    from flower_app.deployment.certificate_authority import Authority, key_pem, write_public, write_secret

    authority = Authority.create()
    write_public(folder / "cluster.pem", authority.pem)
    for name in hosts.names:
        key = ec.generate_private_key(ec.SECP256R1())
        write_public(folder / f"{name}.pem", authority.sign_node(key.public_key(), hosts.address(name), 1))
        write_secret(folder / f"{name}.key", key_pem(key))


def compare(trials: int, rate_mbit: int, with_ray: bool) -> list[dict[str, Any]]:
    """All rows for one rate of the link; 0: as fast as the machine."""
    with tempfile.TemporaryDirectory() as name, Namespaces(["cu", "d0"], rate_mbit or _UNLIMITED_MBIT) as hosts:
        folder = Path(name)
        make_certificates(hosts, folder)
        command = (sys.executable, __file__, "--trials", trials, "--folder", folder, "--role")
        hosts.start("d0", *command, "d0", "--host", hosts.address("d0"), log=folder / "d0.log")
        done = hosts.run("cu", *command, "cu", "--host", hosts.address("cu"), timeout=1800)
        assert done.returncode == 0, f"{done.stderr}\n{(folder / 'd0.log').read_text()}"
        rows = json.loads(done.stdout)
        if with_ray:
            rows += compare_rays(hosts, folder, trials)
    return [{"rate_mbit": rate_mbit, **row} for row in rows]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--rate-mbit", type=int, nargs="+", default=[0, 200])
    parser.add_argument("--ray", action="store_true", help="Ray's calls and objects, too")
    parser.add_argument("--role", default="", help="for the benchmark's own programs")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the benchmark's own programs")
    parser.add_argument("--host", default="", help="for the benchmark's own programs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.role:
        print(json.dumps(exchange(options.role, options.folder, options.host, options.trials)))
        return
    rows = [row for rate in options.rate_mbit for row in compare(options.trials, rate, options.ray)]
    if options.json:
        print(json.dumps({"load": os.getloadavg()[0], "rows": rows}, indent=1))
        return
    print(f"load {os.getloadavg()[0]:.0f}; TLS over plain: median of pairs, and their quartiles")
    print("| link | what | bytes | plain | TLS | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        link = f"{row['rate_mbit']} Mbit/s" if row["rate_mbit"] else "unlimited"
        ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
        times = f"{1e3 * row['plain_s']:.1f} ms | {1e3 * row['tls_s']:.1f} ms"
        print(f"| {link} | {row['what']} | {row['bytes']:,} | {times} | {ratio} |")


if __name__ == "__main__":
    main()
