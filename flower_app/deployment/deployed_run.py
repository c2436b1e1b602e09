"""``collapipe run --superlink``: a training on real machines, started and followed on the edge server."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_pipeline.link.hosts import split_address
from flower_app.config.sources import find_config, read_config, read_sets
from flower_app.console import say
from flower_app.deployment.credentials import ServerFiles
from flower_app.deployment.edge_server import (
    EDGE_CONNECTION,
    SUPERLINK_PORT,
    control_address,
    is_healthy,
    write_connection,
)
from flower_app.deployment.named_connection import named_connection
from flower_app.launch.launcher import LaunchOrder, Outcome, last_error
from flower_app.launch.processes import interruptible, is_stopped
from flower_app.launch.stopped_process import StoppedProcess
from flower_app.launch.superlink import flower_environment, program_path
from flower_app.runs.run_directory import FAILED, FINISHED, INTERRUPTED, read_summary, write_summary
from flower_app.runs.run_lock import server_process
from strategies.registry import COLLAPIPE

DECODER_PORT = 9443
JOIN_TIMEOUT_S = 300.0
"""How long the CUs of a round wait for each other: on weak machines a client app takes long to import."""
_COMMAND_S = 180.0
_LAST_WORDS_S = 5.0
_STOP_S = 60.0
_STOPPED_S = 30.0
"""A server app asks the SuperLink every few seconds."""
_RECONNECT_S = 5.0
_WITHOUT_CONTACT_S = 600.0
"""How long the SuperLink may not answer until a run is no longer followed: longer than its machine takes to start
again."""


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
        """Check that it answers.

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
        """``KEY=VALUE`` of the decoder's service and of the planner, for keys that neither file nor ``--set`` gives."""
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

        Raises
        ------
        KeyboardInterrupt
            On Ctrl-C, SIGTERM and SIGHUP, after the run was stopped.
        """
        order.logs.mkdir(exist_ok=True)
        home = order.flower / "home"
        write_connection(home, self.control, self.certs.ca)
        flwr = _Flwr(flower_environment(home), order.logs / "run.log")
        run_id = ""
        try:
            with interruptible():
                run_id = flwr.submit(order.app, order.run_config)
                outcome = _follow(flwr, run_id, order)
        except KeyboardInterrupt:
            try:
                if run_id:
                    _stop(flwr, run_id, order.run_dir)
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
        answer = self._json("run", str(app), EDGE_CONNECTION, "--run-config", str(run_config))
        if not answer.get("success"):
            raise ValueError(
                f"--superlink: the SuperLink did not take the run: {answer.get('error-message') or answer}"
            )
        return str(answer["run-id"])

    def ended(self, run_id: str) -> str:
        """How a run has ended; empty while it goes on.

        Raises
        ------
        ConnectionError
            If nobody tells.
        """
        answer = self._json("ls", EDGE_CONNECTION, "--run-id", run_id)
        if not answer.get("runs"):
            raise ConnectionError(answer.get("error-message") or f"it answers {answer}")
        run = answer["runs"][0]
        status = str(run.get("status", ""))
        return f"{status} {run.get('status-details', '')}".strip() if status.startswith("finished") else ""

    def stop(self, run_id: str) -> str:
        """End a run; returns why it was not, or nothing."""
        answer = self._json("stop", run_id, EDGE_CONNECTION)
        return "" if answer.get("success") else str(answer.get("error-message") or answer)

    def follow_log(self, run_id: str) -> subprocess.Popen[bytes]:
        """Write what the run prints to the log; ends with the run."""
        with self.log.open("wb") as file:
            return subprocess.Popen(
                [str(program_path("flwr")), "log", run_id, EDGE_CONNECTION, "--stream"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _json(self, *arguments: str) -> dict[str, Any]:
        try:
            process = subprocess.run(
                [str(program_path("flwr")), *arguments, "--format", "json"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return {"error-message": f"flwr {arguments[0]}: no answer within {_COMMAND_S:g} s"}
        # Notes for people may stand before the object.
        json_text = re.search(r"^\{.*", process.stdout, re.DOTALL | re.MULTILINE)
        try:
            if json_text is None:
                return {"error-message": (process.stdout + process.stderr).strip()}
            return dict(json.loads(json_text[0]))
        except ValueError:
            return {"error-message": process.stdout.strip()}


def _follow(flwr: _Flwr, run_id: str, order: LaunchOrder) -> Outcome:
    """Poll until there is a summary, the SuperLink says that the run ended without one, or it stays silent."""
    log, silent_since = flwr.follow_log(run_id), None
    # It waits for the heartbeats of the server app twice as long as they come.
    pause = StoppedProcess("server app", "after about a minute the SuperLink ends the run", order.say)
    try:
        while True:
            order.watch()
            if outcome := order.outcome():
                return outcome
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
                        return _no_contact(order.run_dir, error)
                    time.sleep(_RECONNECT_S)
                else:
                    if end_status:
                        return _last_words(flwr, order, end_status)
                    if silent_since is not None:
                        say("the SuperLink answers again")
                    time.sleep(_RECONNECT_S)
                    log, silent_since = flwr.follow_log(run_id), None
            time.sleep(order.poll_s)
    finally:
        _end(log)


def _stop(flwr: _Flwr, run_id: str, run_dir: Path) -> None:
    """End a run, and wait for the server app to hear of it: what it writes last must not fall into a resumed run."""
    if refused := flwr.stop(run_id):
        say(f"warning: the SuperLink did not receive the request to stop the run, which may go on: {refused}")
        return
    deadline = time.monotonic() + _STOPPED_S
    while read_summary(run_dir) is None and time.monotonic() < deadline:
        time.sleep(0.1)


def _end(log: subprocess.Popen[bytes]) -> None:
    log.terminate()
    try:
        log.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        log.kill()


def _no_contact(run_dir: Path, error: ConnectionError) -> Outcome:
    return Outcome(
        FAILED,
        f"the SuperLink has not answered for {_WITHOUT_CONTACT_S / 60:g} minutes: {error}; the run may go on without "
        f"this command; start the SuperLink again (collapipe up edge-server), and if no more rounds appear in "
        f"{run_dir}, resume it: collapipe run --resume {run_dir.name} --superlink ...",
    )


def _how_to_go_on(run_dir: Path) -> str:
    """What to do about a server app that stands still: it holds the run directory as long as it is there."""
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
    deadline = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline:
        if outcome := order.outcome():
            return outcome
        time.sleep(0.1)
    reason = last_error(flwr.log) or f"see {flwr.log}"
    return Outcome(
        FAILED,
        f"the run ended ({end_status}) without a result in {order.run_dir}: {reason}; run the command on the edge "
        "server itself: the run's results are written there",
    )
