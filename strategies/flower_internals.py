"""Parts of Flower that its public packages do not export, behind one door.

``from strategies.flower_internals import ControlHttpClient`` imports the name from its place in the installed release,
when it is asked for: a client process loads nothing of the server's. :data:`INTERNALS` says what each is needed for and
what would make it superfluous; :func:`missing_internals` names each that a release has moved.

Public are ``flwr.app``, ``flwr.serverapp`` with ``flwr.serverapp.strategy``, ``flwr.clientapp`` with
``flwr.clientapp.mod``, and ``flwr.simulation``; they are imported directly.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from flwr.cli.build import build_fab_from_disk as build_fab_from_disk
    from flwr.proto.control_pb2 import (
        ListNodesRequest as ListNodesRequest,
        RegisterNodeRequest as RegisterNodeRequest,
        UnregisterNodeRequest as UnregisterNodeRequest,
    )
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest as PullAppMessagesRequest
    from flwr.supercore.control import ControlHttpClient as ControlHttpClient
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_body as get_object_body,
        get_object_head_values_from_object_content as get_object_head_values_from_object_content,
    )
    from flwr.supercore.inflatable.inflatable_protobuf_utils import (
        make_pull_object_fn_protobuf as make_pull_object_fn_protobuf,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        ObjectPullError as ObjectPullError,
        ObjectPushError as ObjectPushError,
        pull_objects as pull_objects,
    )
    from flwr.superlink.grid import HttpGrid as HttpGrid, InMemoryGrid as InMemoryGrid


class Internal(NamedTuple):
    """A name of Flower's that is not public."""

    module: str
    """Module that has the name."""
    needed_for: str
    instead: str
    """Public part that would make it superfluous."""


_BOUND = "a limit of bytes in Grid.pull_messages"

INTERNALS: dict[str, Internal] = {
    "HttpGrid": Internal(
        "flwr.superlink.grid",
        "replies fetched piece by piece with its client, which is its _runtime_client, and put together within a bound",
        _BOUND,
    ),
    "PullAppMessagesRequest": Internal("flwr.proto.runtime_pb2", "as for HttpGrid", _BOUND),
    "ConfirmMessageReceivedRequest": Internal("flwr.proto.message_pb2", "as for HttpGrid", _BOUND),
    "make_pull_object_fn_protobuf": Internal(
        "flwr.supercore.inflatable.inflatable_protobuf_utils", "as for HttpGrid", _BOUND
    ),
    "pull_objects": Internal("flwr.supercore.inflatable.inflatable_utils", "as for HttpGrid", _BOUND),
    "ObjectPullError": Internal(
        "flwr.supercore.inflatable.inflatable_utils", "a reply of which a piece is missing fails its order", _BOUND
    ),
    "get_object_head_values_from_object_content": Internal(
        "flwr.supercore.inflatable.inflatable_object", "the ids of an array's chunks, before they are joined", _BOUND
    ),
    "get_object_body": Internal(
        "flwr.supercore.inflatable.inflatable_object", "the order of an array's chunks, before they are joined", _BOUND
    ),
    "ObjectPushError": Internal(
        "flwr.supercore.inflatable.inflatable_utils",
        "an order that did not arrive whole is its node's failure alone",
        "a documented exception of Grid.push_messages",
    ),
    "InMemoryGrid": Internal(
        "flwr.superlink.grid",
        "knowing that a run is simulated, where no node comes later",
        "a public property of Grid",
    ),
    "build_fab_from_disk": Internal(
        "flwr.cli.build",
        "the digest of the bundle that flwr run submits",
        "a documented function, or a command that prints the digest",
    ),
    "ControlHttpClient": Internal(
        "flwr.supercore.control",
        "registering SuperNodes' keys on a SuperLink of this machine",
        "flwr supernode register without a configuration of its own",
    ),
    "ListNodesRequest": Internal("flwr.proto.control_pb2", "as for ControlHttpClient", "as for ControlHttpClient"),
    "RegisterNodeRequest": Internal("flwr.proto.control_pb2", "as for ControlHttpClient", "as for ControlHttpClient"),
    "UnregisterNodeRequest": Internal("flwr.proto.control_pb2", "as for ControlHttpClient", "as for ControlHttpClient"),
}
"""Each by its name, which is Flower's."""


def missing_internals() -> list[str]:
    """Describe each part that the installed release of flwr lacks at its place."""
    reasons = []
    for name in INTERNALS:
        try:
            _resolve(name)
        except ImportError as error:
            reasons.append(str(error))
    return reasons


def _resolve(name: str) -> Any:
    internal = INTERNALS[name]
    try:
        return getattr(import_module(internal.module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"flwr {version('flwr')} has no {internal.module}.{name} ({error}); CollaPipe needs it for: "
            f"{internal.needed_for}; install a flwr that pyproject.toml names"
        ) from error


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module 'strategies.flower_internals' has no attribute {name!r}")
    return _resolve(name)
