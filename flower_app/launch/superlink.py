"""A SuperLink of our own, for one run.

``flwr run`` alone would use whatever SuperLink is up on this machine: its environment, its working directory and the
packages in there; and would leave it up afterwards. It would also install the app's dependencies anew for every run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from client_pipeline.link.hosts import split_address
from client_pipeline.runtime.memory import ONE_HEAP
from client_pipeline.runtime.private_ray import ADDRESS_FILE, RAY_FOLDER, private_environment, without_secrets
from client_pipeline.runtime.worker_forks import FORKS_SOCKET
from flower_app.launch import simulation_superlink
from flower_app.launch.launcher import LaunchOrder
from flower_app.launch.processes import MARK, RunProcesses
from flower_app.launch.ray_folders import RayFolder, short_folder
from flower_app.launch.simulation_superlink import SUPERLINK, SimulationOrder
from flower_app.launch.submit import GO
from flower_app.training.simulated_actors import NEEDED_MODULES

OWN_CONNECTION = "own"

_START_S = 240.0
_TASK_POLL_S = 0.1
"""How often a simulation's SuperExec asks for work until its run has started [s]; a deployment's is told of it."""
_TASK_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
_ANSWER_S = 60.0
"""How long the SuperLink may take to say how a run ended [s]."""
_TAKEN = re.compile(rb"address already in use", re.IGNORECASE)


class PrivateSuperLink:
    """Runs one Flower app in simulation, apart from all other SuperLinks of the machine.

    Parameters
    ----------
    folder : made; holds the SuperLink's home and its working directory
    logs : folder for what the programs say
    """

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder = folder
        self.logs = logs
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)
        self.address = f"127.0.0.1:{_free_port()}"
        self.ray_folder = RayFolder(short_folder())
        self.environment = launch_environment(self.home, self.ray_folder.path)
        self.environment[FORKS_SOCKET] = str(self.ray_folder.path / "forks")
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{OWN_CONNECTION}"\n\n'
            f'[superlink.{OWN_CONNECTION}]\naddress = "{self.address}"\ninsecure = true\n',
            encoding="utf-8",
        )
        self._log_size = self.superlink_log.stat().st_size if self.superlink_log.exists() else 0
        self.server: subprocess.Popen[bytes] | None = None
        self.submission: subprocess.Popen[bytes] | None = None
        self.ray_head: subprocess.Popen[bytes] | None = None
        self.processes: RunProcesses | None = None
        self._word: int | None = None
        """The end of a pipe at whose other end somebody waits before the app begins."""

    @property
    def simulation_log(self) -> Path:
        """What server app and client apps printed, as far as the SuperLink passed it on."""
        return self.logs / "simulation.log"

    @property
    def superlink_log(self) -> Path:
        """What the SuperLink printed."""
        return self.logs / "superlink.log"

    @property
    def lost_its_port(self) -> bool:
        """Whether the SuperLink ended because somebody took its port after it was chosen."""
        if self.server is None or not self.server.poll():
            return False
        return _TAKEN.search(self.superlink_log.read_bytes()[self._log_size :]) is not None

    @property
    def lost_its_ray(self) -> bool:
        """Whether the Ray that was started beside the SuperLink, and that the simulation has joined, has ended."""
        if self.ray_head is None or self.ray_head.poll() is None:
            return False
        address = Path(self.environment[ADDRESS_FILE])
        return address.is_file() and address.stat().st_size > 0

    def start(self, order: LaunchOrder) -> None:
        """Start all programs: Ray where the app's simulation joins it, the SuperLink, and who hands it the app.

        The app itself does not begin before :meth:`let_begin`. Descriptors are inherited by the guard of the processes.
        """
        host, port = split_address("SuperLink", self.address)
        options = ["--insecure", "--simulation", "--isolation", "subprocess", "--host", host, "--port", str(port)]
        self.processes = RunProcesses(self.environment[MARK])
        if order.joins_ray:
            self._start_ray(order)
        heard, self._word = os.pipe()
        try:
            # Elsewhere the app begins as soon as it is submitted, and who submits it waits for the word.
            is_program_of_ours = sys.platform == "linux"
            if is_program_of_ours:
                self.server = self._start_simulation_superlink(order, options, heard)
            else:
                self.server = self._popen([str(program_path(SUPERLINK)), *options], self.superlink_log)
            self.processes.add(self.server.pid)
            self._start_submission(order, None if is_program_of_ours else heard)
        finally:
            os.close(heard)

    def _start_simulation_superlink(
        self, order: LaunchOrder, options: Sequence[str], heard: int
    ) -> subprocess.Popen[bytes]:
        """Start the SuperLink's program, and with it the check that the order asks for."""
        with contextlib.ExitStack() as handed_over:
            answer = words = None
            if order.check is not None and not order.check.is_over:
                answer = handed_over.enter_context(order.check.hand_over()).fileno()
                # Where this process's words go; it may have none.
                with contextlib.suppress(OSError):
                    words = os.dup(2)
                    handed_over.callback(os.close, words)
            simulation = SimulationOrder(
                folder=str(self.work),
                modules=list(order.worker_imports),
                config=str(order.run_config),
                word=heard,
                check=answer,
                check_words=words,
            )
            program = [sys.executable, "-m", simulation_superlink.__name__, json.dumps(asdict(simulation))]
            inherited_fds = [fd for fd in (self.ray_folder.lock, heard, answer, words) if fd is not None]
            # In the app's folder, for the module must be found without an installation too.
            return self._popen([*program, *options], self.superlink_log, import_root(), inherited_fds)

    def let_begin(self) -> None:
        """Have the app begin, once it has been handed to the SuperLink."""
        assert self._word is not None
        word, self._word = self._word, None
        with contextlib.suppress(BrokenPipeError), os.fdopen(word, "wb") as pipe:
            pipe.write(GO)

    def _start_submission(self, order: LaunchOrder, heard: int | None) -> None:
        """Start ``flwr run``, which waits for the SuperLink, and for the launcher's word if it can hear it."""
        assert self.server is not None
        # A client asks for one CPU, and Ray believes in as many as train at once, whatever cores the machine has.
        federation = {
            "num-supernodes": order.num_clusters,
            "client-resources-num-cpus": 1,
            "init-args-num-cpus": _num_cpus(order),
        }
        settings = " ".join(f"{key}={value}" for key, value in federation.items())
        arguments = [str(order.app), OWN_CONNECTION, "--run-config", str(order.run_config)]
        arguments += ["--federation-config", settings]
        ids = [str(os.getpid()), str(self.server.pid), "" if heard is None else str(heard)]
        submit = [sys.executable, "-m", "flower_app.launch.submit", self.address, str(_START_S), *ids]
        inherited_fds = [*order.inherited_fds, self.ray_folder.lock, *([] if heard is None else [heard])]
        # In the app's folder, for the module must be found without an installation too.
        self.submission = self._popen(
            [*submit, *arguments, "--stream"], self.simulation_log, import_root(), inherited_fds
        )

    def _start_ray(self, order: LaunchOrder) -> None:
        """Start Ray and the shared actors while the SuperLink comes."""
        assert self.processes is not None
        folder = str(import_root())
        self.environment |= {ADDRESS_FILE: str(self.ray_folder.path / "address"), RAY_FOLDER: folder}
        ray_order = {
            "num_cpus": _num_cpus(order),
            "file": self.environment[ADDRESS_FILE],
            "actors": list(order.shared_actors),
            "idle_s": order.actor_idle_s,
            "modules": NEEDED_MODULES,
            "imports": list(order.worker_imports),
        }
        command = [sys.executable, "-m", "client_pipeline.runtime.ray_head", json.dumps(ray_order)]
        environment = dict(self.environment)
        # What is installed all find; before the standard library it should not stand.
        if folder not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
        # What the actors print is the simulation's.
        self.ray_head = self._popen(command, self.simulation_log, import_root(), [self.ray_folder.lock], environment)
        self.processes.add(self.ray_head.pid)

    def close(self) -> None:
        """End the SuperLink and all that came out of it."""
        if self._word is not None:
            os.close(self._word)
            self._word = None
        if self.processes is not None:
            left = self.processes.end()
            for child in (self.server, self.submission, self.ray_head):
                if child is not None and child.pid not in left:
                    child.wait()
        self.ray_folder.close()

    def run_was_stopped(self) -> bool:
        """Whether ``flwr stop`` has ended the run; false where the SuperLink does not tell."""
        command = [str(program_path("flwr")), "list", OWN_CONNECTION, "--format", "json"]
        try:
            answer = subprocess.run(
                command,
                cwd=self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ANSWER_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
        return '"finished:stopped"' in answer.stdout

    def pass_log_on(self, seconds: float) -> None:
        """Wait until the simulation has ended by itself and its log is complete, or for ``seconds``.

        Who is asked to end meanwhile has finished: only the log is shorter.
        """
        assert self.submission is not None
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            self.submission.wait(seconds)

    def _popen(
        self,
        command: list[str],
        log: Path,
        cwd: Path | None = None,
        inherited_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=cwd or self.work,
                env=environment or self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C at the terminal is ours to handle.
                start_new_session=True,
                pass_fds=inherited_fds,
            )


def launch_environment(home: Path, ray_folder: Path, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of the SuperLink, and so of all that it starts.

    Parameters
    ----------
    home : ``FLWR_HOME``
    ray_folder : where Ray keeps sockets and logs; private, lest it joins a cluster that somebody started
    inherited : what to start from; ``os.environ`` if None
    """
    environment = without_secrets(flower_environment(home, inherited))
    return (
        environment
        | private_environment()
        # The parts of a run wait for each other: no use in Ray's being polite with some of them.
        | {"RAY_TMPDIR": str(ray_folder), "RAY_worker_niceness": environment.get("RAY_worker_niceness", "0")}
        | {name: environment.get(name, value) for name, value in ONE_HEAP.items()}
        | {_TASK_POLL: str(_TASK_POLL_S)}
    )


def flower_environment(home: Path, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of Flower's and Ray's programs: ours alone are installed, and none of them calls home.

    Parameters
    ----------
    home : ``FLWR_HOME``
    inherited : what to start from; ``os.environ`` if None
    """
    environment = dict(os.environ if inherited is None else inherited)
    for name in ("RAY_ADDRESS", ADDRESS_FILE, RAY_FOLDER, FORKS_SOCKET):
        environment.pop(name, None)
    scripts = sysconfig.get_path("scripts")
    environment["PATH"] = os.pathsep.join(filter(None, (scripts, environment.get("PATH", ""))))
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = ",".join(filter(None, (environment.get(name, ""), "127.0.0.1,localhost")))
    environment |= {
        MARK: uuid.uuid4().hex,
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Workers started ahead would only take the processor from those needed.
        "RAY_prestart_worker_first_driver": "0",
        # Actors of ours ask Ray for no accelerator, and it would hide those that runtime.accelerator may name.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    return environment


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


def import_root() -> Path:
    """The folder that our packages are imported from."""
    return Path(__file__).resolve().parents[2]


def _num_cpus(order: LaunchOrder) -> int:
    """Processors that a simulation's Ray believes in: one for each client that it runs at the same time."""
    return order.clusters_at_once or order.num_clusters


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
