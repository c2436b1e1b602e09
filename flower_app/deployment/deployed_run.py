"""``collapipe run --superlink``: a training on real machines, started and followed on the edge server."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from client_pipeline.documents import toml_table
from client_pipeline.link.hosts import HostPort, split_address
from client_pipeline.near_names import did_you_mean
from flower_app.config.sources import find_config, read_config, read_sets
from flower_app.console import say
from flower_app.deployment.certificate_authority import certificate_hosts, read_certificate
from flower_app.deployment.certificate_checks import check_certificate
from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.edge_server import (
    EDGE_CONNECTION,
    SUPERLINK_PORT,
    control_address,
)
from flower_app.deployment.findings import refuse_failed
from flower_app.launch.inherited_environment import without_proxies
from flower_app.launch.launcher import LaunchOrder, Outcome, last_error
from flower_app.launch.processes import interruptible, is_stopped
from flower_app.launch.stopped_process import StoppedProcess
from flower_app.launch.superlink import (
    flower_environment,
    flwr_json,
    is_healthy,
    start_program,
    write_connection,
)
from flower_app.runs.run_directory import FAILED, FINISHED, INTERRUPTED, read_summary, write_summary
from flower_app.runs.run_lock import server_process
from flower_app.runs.run_logs import RUN_LOG
from strategies.registry import COLLAPIPE

DECODER_PORT = 9443
JOIN_TIMEOUT_S = 300.0
"""Time for which the CUs of a round wait for each other: on weak machines a client app imports slowly [s]."""
_COMMAND_S = 180.0
_LAST_WORDS_S = 5.0
_STOP_S = 60.0
_STOPPED_S = 30.0
"""Time for a stopped server app to write its summary [s]; it asks the SuperLink every few seconds."""
_RECONNECT_S = 5.0
_WITHOUT_CONTACT_S = 600.0
"""Silence of the SuperLink after which a run is given up [s]; a restart of its machine takes less."""

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A SuperLink that runs, and the certificates of its machine."""

    address: str
    """``host:port`` that the control units reach."""
    control: str
    """``host:port`` on this machine that runs are started at."""
    certs: ServerFiles

    @classmethod
    def of(cls, superlink: str, certs: Path, control_port: int = 0) -> Deployment:
        """Check that the SuperLink answers, and return its deployment.

        Parameters
        ----------
        superlink : ``host`` or ``host:port``, or the name of a connection in Flower's configuration
        certs : the edge server's folder; a connection names its own
        control_port : 0: the one after the SuperLink's

        Raises
        ------
        ValueError, FileNotFoundError
            If it does not, or a certificate is missing.
        """
        named = named_connection(superlink)
        files = named.certs if named else ServerFiles(certs)
        place = named.address if named else split_address("--superlink", superlink, SUPERLINK_PORT)
        address = str(place)
        files.check()
        refuse_failed("--certs", check_certificate(files, place.bare_host))
        if not is_healthy(address, files.ca):
            raise ValueError(
                f"--superlink: no SuperLink with a certificate of {files.ca} answers at {address}; start it with "
                "collapipe up edge-server, or run collapipe doctor edge-server to find the cause"
            )
        control = named.control if named else control_address(place.port, control_port)
        if not is_healthy(control, files.ca):
            raise ValueError(
                f"--superlink: nothing answers at {control}, where the SuperLink of {address} takes runs; run the "
                "command on the edge server itself, with the --control-port of collapipe up edge-server"
            )
        return cls(address=address, control=control, certs=files)

    def settings(self, config: str | None, sets: Sequence[str]) -> list[str]:
        """Return ``KEY=VALUE`` of decoder service and planner, for keys that neither file nor ``--set`` gives."""
        host = split_address("--superlink", self.address).host
        settings = {
            "decoder.bind": f"{host}:{DECODER_PORT}",
            "decoder.tls-certificate": str(self.certs.certificate.resolve()),
            "decoder.tls-key": str(self.certs.key.resolve()),
            "decoder.tls-ca": str(self.certs.ca.resolve()),
            "decoder.join-timeout": str(JOIN_TIMEOUT_S),
        }
        if self.certs.revoked_certificates.is_file():
            settings["decoder.tls-crl"] = str(self.certs.revoked_certificates.resolve())
        in_file = read_config(find_config(config)) if config else {}
        given = set(read_sets(sets)) | set(in_file)
        strategy = (in_file | read_sets(sets)).get("strategy", COLLAPIPE)
        if strategy == COLLAPIPE and not {"plan"} & given:
            # Nobody knows what real machines take before they have trained.
            settings["costs"] = "measured"
        return [f"{key}={value}" for key, value in settings.items() if key not in given]

    def launch(self, order: LaunchOrder) -> Outcome:
        """Run a Flower app to its end; see :meth:`flower_app.launch.launcher.Launcher.launch`.

        The processes are the SuperLink's, so ``kept`` is of no use here; ``num_clusters`` is in the configuration.
        """
        order.logs.mkdir(exist_ok=True)
        home = order.flower / "home"
        write_connection(home, EDGE_CONNECTION, self.control, self.certs.ca)
        flwr = _Flwr(without_proxies(flower_environment(home)), order.logs / RUN_LOG)
        run_id = ""
        try:
            with interruptible():
                run_id = flwr.submit(order.app, order.run_config)
                outcome = _follow(flwr, run_id, order)
        except KeyboardInterrupt:
            try:
                if run_id and (refused := flwr.stop(run_id)):
                    say(
                        "warning: the SuperLink did not receive the request to stop the run, which may go on: "
                        f"{refused}"
                    )
                elif run_id:
                    # What the server app writes last must not fall into a resumed run.
                    deadline = time.monotonic() + _STOPPED_S
                    while read_summary(order.run_dir) is None and time.monotonic() < deadline:
                        time.sleep(0.1)
            finally:
                # It may have finished just before.
                if (summary := read_summary(order.run_dir)) is None or summary.get("status") != FINISHED:
                    write_summary(order.run_dir, INTERRUPTED, error="interrupted")
            raise
        return order.conclude(outcome)


class _Flwr:
    """Flower's own commands."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.environment = dict(environment)
        self.log = log

    def submit(self, app: Path, run_config: Path) -> str:
        """Start a run; returns its id."""
        arguments = ("run", str(app), EDGE_CONNECTION, "--run-config", str(run_config))
        answer = flwr_json(self.environment, _COMMAND_S, *arguments)
        if not answer.get("success"):
            raise ValueError(
                f"--superlink: the SuperLink did not take the run: {answer.get('error-message') or answer}"
            )
        return str(answer["run-id"])

    def ended(self, run_id: str) -> str:
        """Return the end status of a run; empty while it goes on.

        Raises
        ------
        ConnectionError
            If the SuperLink does not answer.
        """
        answer = flwr_json(self.environment, _COMMAND_S, "ls", EDGE_CONNECTION, "--run-id", run_id)
        if not answer.get("runs"):
            raise ConnectionError(answer.get("error-message") or f"it answers {answer}")
        run = answer["runs"][0]
        status = str(run.get("status", ""))
        return f"{status} {run.get('status-details', '')}".strip() if status.startswith("finished") else ""

    def stop(self, run_id: str) -> str:
        """End a run; returns why it was not, or nothing."""
        answer = flwr_json(self.environment, _COMMAND_S, "stop", run_id, EDGE_CONNECTION)
        return "" if answer.get("success") else str(answer.get("error-message") or answer)

    def follow_log(self, run_id: str) -> subprocess.Popen[bytes]:
        """Write what the run prints, from its beginning, to the log; ends with the run."""
        self.log.unlink(missing_ok=True)
        return start_program("flwr", ["log", run_id, EDGE_CONNECTION, "--stream"], self.log, self.environment)


def _follow(flwr: _Flwr, run_id: str, order: LaunchOrder) -> Outcome:
    """Poll until there is a summary, the SuperLink says that the run ended without one, or it stays silent."""
    log = flwr.follow_log(run_id)
    silent_since: float | None = None
    # The SuperLink waits for the heartbeats of the server app twice as long as they come.
    pause = StoppedProcess("server app", "after about a minute the SuperLink ends the run", order.say)

    def end() -> Outcome | None:
        nonlocal log, silent_since
        if reason := pause.reason(server_process(order.run_dir)):
            return Outcome(FAILED, f"{reason}; {_how_to_go_on(order.run_dir)}")
        if log.poll() is not None:
            # The SuperLink was restarted, or the network was away for a moment.
            try:
                end_status = flwr.ended(run_id)
            except ConnectionError as error:
                if silent_since is None:
                    silent_since = time.monotonic()
                    say(f"warning: no contact with the SuperLink, trying again: {error}")
                if time.monotonic() - silent_since > _WITHOUT_CONTACT_S:
                    return Outcome(
                        FAILED,
                        f"the SuperLink has not answered for {_WITHOUT_CONTACT_S / 60:g} minutes: {error}; the run may "
                        "go on without this command; start the SuperLink again (collapipe up edge-server), and if no "
                        f"more rounds appear in {order.run_dir}, resume it: collapipe run --resume "
                        f"{order.run_dir.name} --superlink ...",
                    )
                time.sleep(_RECONNECT_S)
            else:
                if end_status:
                    return _last_words(flwr, order, end_status)
                if silent_since is not None:
                    say("the SuperLink answers again")
                time.sleep(_RECONNECT_S)
                log, silent_since = flwr.follow_log(run_id), None
        time.sleep(order.poll_s)
        return None

    try:
        return order.follow(end, pause)
    finally:
        log.terminate()
        try:
            log.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            log.kill()


def _how_to_go_on(run_dir: Path) -> str:
    """Return the remedy for a server app that stands still, and holds the run directory."""
    server = server_process(run_dir)
    end = f"`kill -KILL {server}` ends it, and then " if server else ""
    return f"{end}collapipe run --resume {run_dir.name} --superlink ... continues the run"


def _last_words(flwr: _Flwr, order: LaunchOrder, end_status: str) -> Outcome:
    if (server := server_process(order.run_dir)) and is_stopped(server):
        return Outcome(
            FAILED,
            f"the server app (process {server}) is stopped, and the SuperLink has ended its run ({end_status}); "
            + _how_to_go_on(order.run_dir),
        )
    if outcome := order.last_outcome(_LAST_WORDS_S):
        return outcome
    reason = last_error(flwr.log) or f"see {flwr.log}"
    return Outcome(
        FAILED,
        f"the run ended ({end_status}) without a result in {order.run_dir}: {reason}; run the command on the edge "
        "server itself: the run's results are written there",
    )


class NamedConnection(NamedTuple):
    """SuperLink by its name in Flower's configuration: ``[superlink.NAME]`` of ``~/.flwr/config.toml``.

    Its ``address`` is where runs are started (``flwr run . NAME`` uses the same), its ``root-certificates`` the
    ``ca.pem`` of the edge server's folder. The certificate beside it names the host that the control units reach.
    """

    address: HostPort
    """Address that the control units reach."""
    control: str
    """``host:port`` at which runs are started."""
    certs: ServerFiles


def named_connection(name: str) -> NamedConnection | None:
    """Look a name up in Flower's configuration; None where it is a host.

    Raises
    ------
    ValueError, FileNotFoundError
        For a connection that lacks something, or a word that is nearly the name of one.
    """
    file = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    connections = _connections(file)
    if name not in connections:
        if ":" not in name and "." not in name and (near := did_you_mean(name, connections)):
            raise ValueError(f"--superlink: {file} has no connection {name!r}, found {', '.join(connections)}{near}")
        return None
    key, connection = f"[superlink.{name}] of {file}", connections[name]
    certificate = connection.get("root-certificates")
    if not isinstance(connection.get("address"), str) or not isinstance(certificate, str):
        raise ValueError(
            f"--superlink: {key}: expected address and root-certificates, found {', '.join(connection) or 'nothing'}; "
            "a simulation needs no --superlink"
        )
    certs = ServerFiles((file.parent / certificate).expanduser().resolve().parent)
    certs.check()
    control = split_address(key, connection["address"])
    hosts = certificate_hosts(read_certificate(certs.certificate))
    # Unless --control-port says otherwise, control is on the port after that of the SuperNodes.
    host = next((host for host in hosts if host not in _LOCAL), next(iter(hosts), control.host))
    return NamedConnection(HostPort(host, control.port - 1), str(control), certs)


def _connections(file: Path) -> dict[str, dict[str, Any]]:
    try:
        connections = toml_table(file.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"--superlink: {file}: expected TOML: {error}") from error
    return {name: value for name, value in connections.items() if isinstance(value, dict)}
