"""A SuperLink for one run in simulation, and the environment of the programs that it starts.

``flwr run`` alone uses whatever SuperLink is up on this machine, with its environment and its working directory, leaves
it up afterwards, and installs the app's dependencies anew for every run. So each run starts a ``flower-superlink`` of
its own on a loopback port; that starts Flower's SuperExec, and the SuperExec Flower's simulation program.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import sysconfig
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from client_pipeline.runtime.ray.private_ray import RAY_SETTINGS, private_environment, without_secrets
from client_pipeline.runtime.ray.ray_folder import folder_for_ray, short_folder
from flower_app.launch.inherited_environment import past_proxies, usable_environment, without_proxies
from flower_app.launch.launcher import LaunchOrder
from flower_app.launch.processes import MARK, RunProcesses
from flower_app.runs.run_logs import SIMULATION_LOG, SUPERLINK_LOG

SUPERLINK, SIMULATION = "flower-superlink", "flwr-simulation"
CONNECTION = "own"
"""Name of the SuperLink in the run's own Flower configuration."""
_ANSWER_S = 60.0
"""Time for the SuperLink to say how a run ended [s]."""
_TASK_POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}
"""Interval at which the SuperExec asks for work [s]."""


class PrivateSuperLink:
    """The programs of one run in simulation, apart from all other SuperLinks of the machine."""

    def __init__(self, order: LaunchOrder, ray_folder: Path) -> None:
        self._order = order
        home, self._work = order.flower / "home", order.flower / "work"
        self._work.mkdir(parents=True, exist_ok=True)
        self._environment = launch_environment(home, ray_folder)
        host, port = "127.0.0.1", _reserved_port()
        self._address = f"{host}:{port}"
        write_connection(home, CONNECTION, self._address)
        self.processes = RunProcesses(self._environment[MARK])
        options = ["--insecure", "--simulation", "--isolation", "subprocess", "--host", host, "--port", str(port)]
        self.server = start_program(SUPERLINK, options, self.superlink_log, self._environment, self._work)
        self.submission: subprocess.Popen[bytes] | None = None
        """``flwr run``, which passes the run's log on; None before the SuperLink answers."""

    @property
    def simulation_log(self) -> Path:
        """Output of server app and client apps, as far as the SuperLink passed it on."""
        return self._order.logs / SIMULATION_LOG

    @property
    def superlink_log(self) -> Path:
        """Output of the SuperLink."""
        return self._order.logs / SUPERLINK_LOG

    def submit_when_healthy(self) -> None:
        """Hand the app to the SuperLink as soon as it answers."""
        if self.submission is None and is_healthy(self._address):
            # A client asks for one CPU. Ray gets as many CPUs as clients train at once, whatever the number of cores.
            federation = {
                "num-supernodes": self._order.num_clusters,
                "client-resources-num-cpus": 1,
                "init-args-num-cpus": self._order.clients_at_once or self._order.num_clusters,
            }
            settings = " ".join(f"{key}={value}" for key, value in federation.items())
            arguments = ["run", str(self._order.app), CONNECTION, "--run-config", str(self._order.run_config)]
            arguments += ["--federation-config", settings, "--stream"]
            environment = without_proxies(self._environment)
            self.submission = start_program("flwr", arguments, self.simulation_log, environment, self._work)

    def close(self) -> None:
        """End the SuperLink and all processes that it brought about."""
        remaining = self.processes.end()
        for child in (self.server, self.submission):
            if child is not None and child.pid not in remaining:
                child.wait()

    def run_status(self) -> str:
        """Return Flower's status of the run; empty where the SuperLink does not answer."""
        answer = flwr_json(without_proxies(self._environment), _ANSWER_S, "list", CONNECTION, work=self._work)
        return next((str(run.get("status")) for run in answer.get("runs", ())), "")


@contextlib.contextmanager
def private_superlink(order: LaunchOrder) -> Iterator[PrivateSuperLink]:
    """Start the programs of a run, and end all that came out of them."""
    with folder_for_ray(short_folder()) as folder, contextlib.closing(PrivateSuperLink(order, folder)) as superlink:
        yield superlink


def launch_environment(home: Path, ray_folder: Path, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Make the environment of a simulation's programs.

    Parameters
    ----------
    home : ``FLWR_HOME``
    ray_folder : private folder of Ray's sockets and logs, which keeps it from joining a cluster of somebody else's; the
        processes of the run are found by it
    inherited : the environment to start from; ``os.environ`` if None
    """
    return {
        **RAY_SETTINGS,
        **flower_environment(home, inherited),
        **private_environment(),
        "RAY_TMPDIR": str(ray_folder),
        **_TASK_POLL,
        MARK: str(ray_folder),
    }


def flower_environment(home: Path, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Make the environment of Flower's and Ray's programs: those of this installation, without telemetry.

    Parameters
    ----------
    home : ``FLWR_HOME``
    inherited : the environment to start from; ``os.environ`` if None
    """
    environment = without_secrets(usable_environment(os.environ if inherited is None else inherited))
    environment.pop("RAY_ADDRESS", None)
    scripts = sysconfig.get_path("scripts")
    environment["PATH"] = os.pathsep.join(filter(None, (scripts, environment.get("PATH", ""))))
    environment = past_proxies(environment, "127.0.0.1", "localhost")
    environment |= {
        MARK: uuid.uuid4().hex,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if os.path.expanduser("~") == "~":
        # Libraries need a home, and this user has none.
        environment["HOME"] = str(home)
    return environment


def opener_for(ca: Path | None) -> urllib.request.OpenerDirector:
    """Open HTTP, or HTTPS under a certificate that our authority signed, past any proxy for the outer world."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if ca is not None:
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(ca))))
    return urllib.request.build_opener(*handlers)


def is_healthy(address: str, ca: Path | None = None) -> bool:
    """Return whether a program of Flower's answers, by HTTPS where ``ca`` is given."""
    url = f"{'http' if ca is None else 'https'}://{address}/health"
    with contextlib.suppress(OSError, http.client.HTTPException), opener_for(ca).open(url, timeout=2.0):
        return True
    return False


def write_connection(home: Path, name: str, address: str, ca: Path | None = None) -> None:
    """Tell Flower's commands where the SuperLink is; without ``ca`` it speaks plain text."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    trust = f'root-certificates = "{ca.resolve()}"' if ca else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\n{trust}\n', encoding="utf-8"
    )


def start_program(
    name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], work: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program of this environment, whose output is added to a log."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [str(program_path(name)), *arguments],
            cwd=work,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # The launcher handles Ctrl-C at the terminal.
            start_new_session=True,
        )


def flwr_json(
    environment: Mapping[str, str], timeout_s: float, *arguments: str, work: Path | None = None
) -> dict[str, Any]:
    """Return the JSON object that a command of Flower's prints; one with ``error-message`` where it prints none."""
    try:
        process = subprocess.run(
            [str(program_path("flwr")), *arguments, "--format", "json"],
            cwd=work,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return {"error-message": f"flwr {arguments[0]}: no answer within {timeout_s:g} s"}
    # Notes for people may stand before the object.
    json_text = re.search(r"^\{.*", process.stdout, re.DOTALL | re.MULTILINE)
    try:
        if json_text is None:
            return {"error-message": (process.stdout + process.stderr).strip()}
        return dict(json.loads(json_text[0]))
    except ValueError:
        return {"error-message": process.stdout.strip()}


def program_path(name: str) -> Path:
    """Find a program of this environment.

    Raises
    ------
    FileNotFoundError
        If it is not installed.
    """
    program = Path(sysconfig.get_path("scripts")) / name
    if not program.is_file():
        raise FileNotFoundError(f"{program}: no such program; install flwr[simulation] into this environment")
    return program


def _reserved_port() -> int:
    """Find a port of loopback that the system gives to nobody else for a minute.

    A connection that has just ended at a port keeps it from those who ask for any free one, and not from a server that
    asks for it by number.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            # The side that closes first keeps the port.
            server.accept()[0].close()
            client.recv(1)
    return port
