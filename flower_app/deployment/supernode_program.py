"""Flower's SuperNode with a veto: it runs no app but that of its own release, and those that its owner allows.

It also waits where Flower's own ends: as long as the SuperLink takes it for connected, whose predecessor has died.

``python -m flower_app.deployment.supernode_program ALLOWED OPTIONS`` runs ``flower-supernode OPTIONS``. ``ALLOWED`` are
digests of further apps (:func:`~flower_app.deployment.app_digest.app_digest`), separated by commas, or empty. The check
is the SuperNode's own, before any code of the app has been imported: code that the server sends cannot leave it out.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message

from client_pipeline.quick_imports import quick_imports
from flower_app.deployment.app_digest import app_digest, release_digest
from flower_app.deployment.bell import Bell
from flower_app.deployment.superexec_program import load_superexec
from flower_app.launch.waiting_program import SUPEREXEC, WaitingProgram
from strategies.flower_internals import (
    ApiErrorCode,
    ErrorCode,
    Fab,
    FlowerError,
    Run,
    TaskType,
    get_all_nested_objects,
    get_object_tree,
    log,
    no_object_id_recompute,
)
from strategies.grid.piece_waits import look_again_soon

_INFO, _ERROR = 20, 40
_LOOK_S, _LOOKS = 0.5, 60
"""Time between two looks for a message [s], and how many until Flower has its turn: it would look every 3 s alone."""
_IDLE_S, _IDLE_LOOK_S = 60.0, 2.0
"""Without a message for so long a control unit looks less often: each look takes ten milliseconds of the server's."""
_ADMITTED_S, _AGAIN_S = 90.0, 2.0
"""How long, and how often, a SuperNode asks to be admitted that the SuperLink takes for connected [s]: it waits for
its predecessor's heartbeats for a minute, of which it hears nothing where a machine has lost its power."""

Connection = tuple[Any, ...]
"""What Flower's SuperNode calls the server by: node id, receive, send, get_run, get_fab, pull_object, push_object,
confirm_message_received."""


class Veto:
    """Decides once for each run whether its app may run here, and keeps the app that was looked at.

    Parameters
    ----------
    release : digest of the app that is installed here
    allowed : digests of other apps that the owner of this node allows
    """

    def __init__(self, release: str, allowed: frozenset[str] = frozenset()) -> None:
        self._release = release
        self._allowed = allowed | {release}
        self._apps: dict[int, Fab] = {}
        self._refusals: dict[int, str] = {}

    def refusal(self, run_id: int, get_run: Callable[[int], Run], get_fab: Callable[[str, int], Fab]) -> str:
        """Why this node does not run a run's app; empty if it does."""
        if run_id in self._apps:
            return ""
        if run_id not in self._refusals:
            run = get_run(run_id)
            app = get_fab(run.fab_hash, run_id)
            if not (reason := self._reason(run, app)):
                self._apps = {run_id: app}
                return ""
            self._refusals = {run_id: reason}
        return self._refusals[run_id]

    def app(self, run_id: int) -> Fab:
        """The app that was looked at, of a run that is not refused."""
        return self._apps[run_id]

    def _reason(self, run: Run, app: Fab) -> str:
        if run.primary_task_type == TaskType.AGENT_APP:
            return "this control unit runs only client apps, and this run is an agent app"
        if hashlib.sha256(app.content).hexdigest() != run.fab_hash:
            return "this control unit was sent an app other than the run's"
        try:
            digest = app_digest(app.content)
        except ValueError as error:
            return f"this control unit does not run this app: {error}"
        if digest in self._allowed:
            return ""
        return (
            f"this control unit does not run this app, whose digest is {digest}: it runs its own release's, "
            f"{self._release}; install the same release on the server and all control units, or, if you have read that "
            f"app's code, start the control unit with collapipe up cu --allow-app {digest}"
        )


@contextmanager
def vetoed(connection: AbstractContextManager[Connection], veto: Veto, bell: Bell) -> Iterator[Connection]:
    """A connection that hands on the messages of allowed runs alone; others are answered with an error.

    ``bell`` is rung for each that is handed on, when Flower has made a task of it.
    """
    with connection as connection_values:
        node_id, receive, send, get_run, get_fab, pull_object, push_object, confirm = connection_values

        idle_since, is_announced = time.monotonic(), True

        def receive_allowed() -> Any:
            nonlocal idle_since, is_announced
            received_message = _soon(receive, idle_since)
            if received_message is None:
                return None
            idle_since = time.monotonic()
            message = received_message[0]
            reason = veto.refusal(message.metadata.run_id, get_run, get_fab)
            if not reason:
                is_announced = False
                return received_message
            log(_ERROR, "run %s is refused: %s", message.metadata.run_id, reason)
            confirm(message.metadata.run_id, message.metadata.message_id)
            _answer(message, reason, send, push_object)
            return None

        def checked_app(fab_hash: str, run_id: int) -> Fab:
            # Not asked for again: a server could answer otherwise the second time.
            del fab_hash
            return veto.app(run_id)

        def pull_announced(run_id: int, object_id: str) -> bytes:
            nonlocal is_announced
            # Its task is there before its pieces are.
            if not is_announced:
                is_announced = True
                bell.ring()
            return bytes(pull_object(run_id, object_id))

        yield node_id, receive_allowed, send, get_run, checked_app, pull_announced, push_object, confirm


def admitted(activate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Have a SuperNode wait until the SuperLink does not wait for its predecessor any more.

    Flower's own ends, and would be started again: seconds of a processor, every few seconds for a minute.

    Parameters
    ----------
    activate : of Flower's client: takes it and the request
    """

    def activate_when_free(client: Any, request: Any) -> Any:
        deadline, is_told = time.monotonic() + _ADMITTED_S, False
        while True:
            try:
                return activate(client, request)
            except Exception as error:
                if not _is_taken(error) or time.monotonic() > deadline:
                    raise
            if not is_told:
                log(
                    _INFO,
                    "the SuperLink takes this control unit for connected, and admits it when heartbeats were missed, "
                    "within a minute; asking every %g s",
                    _AGAIN_S,
                )
                is_told = True
            time.sleep(_AGAIN_S)

    return activate_when_free


def _is_taken(error: Exception) -> bool:
    """Whether the SuperLink has answered that it takes this node for connected."""
    text = getattr(getattr(error, "response", None), "text", "")
    answer = FlowerError.from_json(text) if text else None
    return answer is not None and answer.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED


def _soon(receive: Callable[[], Any], idle_since: float) -> Any:
    """Look for a message until one is there, or Flower is to have its turn."""
    for _ in range(_LOOKS):
        if (received_message := receive()) is not None:
            return received_message
        time.sleep(_LOOK_S if time.monotonic() - idle_since < _IDLE_S else _IDLE_LOOK_S)
    return None


def _answer(
    message: Message, reason: str, send: Callable[..., tuple[set[str], str]], push_object: Callable[..., None]
) -> None:
    reply = Message(Error(ErrorCode.INVALID_FAB, reason), reply_to=message)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        wanted, session = send(reply, get_object_tree(reply), 0.0)
    for name in wanted:
        push_object(message.metadata.run_id, session, name, parts[name])


def main() -> None:
    """Run ``flower-supernode``; the first argument are digests of apps that are allowed."""
    allowed_digests = frozenset(filter(None, sys.argv.pop(1).split(",")))
    release, work, answers = release_digest(), Bell(), Bell()
    with quick_imports():
        from strategies.flower_internals import FleetHttpClient, flower_superexec, flower_supernode, supernode_module
    # Before Flower starts a thread.
    superexec = WaitingProgram(SUPEREXEC, partial(load_superexec, flower_superexec, release, work, answers))

    flower: Any = supernode_module
    client: Any = FleetHttpClient

    connect = getattr(flower, "http_request_response", None)
    if connect is None:
        sys.exit("supernode_program: this release of flwr connects its SuperNode differently; install flwr 1.41")
    veto = Veto(release, allowed_digests)
    print(f"apps that may run here: {', '.join([release, *sorted(allowed_digests)])}", flush=True)
    flower.http_request_response = lambda *arguments, **named: vetoed(connect(*arguments, **named), veto, work)
    client.ActivateNode = admitted(client.ActivateNode)
    flower.subprocess = SimpleNamespace(Popen=superexec.start)
    # It looks for the answer twice a second, and at once when it has been left here.
    flower.time = SimpleNamespace(sleep=answers.wait)
    look_again_soon(flower, "pull_objects")
    flower_supernode()


if __name__ == "__main__":
    main()
