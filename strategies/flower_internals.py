"""The parts of Flower that are not public and that CollaPipe uses all the same: one door for all of them.

``from strategies.flower_internals import log`` imports ``log`` from where it lies in the installed release, and nothing
else: a name is looked up when it is asked for, so that a client process loads none of the server's. :data:`INTERNALS`
says of each what it is needed for, and what would make it superfluous. A release of flwr that has moved one is found by
:func:`missing_internals`, and by whoever asks for the name.

Public are ``flwr.app``, ``flwr.serverapp`` with ``flwr.serverapp.strategy``, ``flwr.clientapp`` with
``flwr.clientapp.mod``, and ``flwr.simulation``; they are imported directly.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from flwr.app.message import make_message as make_message
    from flwr.cli.build import build_fab_from_disk as build_fab_from_disk
    from flwr.client.mod import secaggplus_mod as secaggplus_mod
    from flwr.clientapp.typing import ClientAppCallable as ClientAppCallable, Mod as Mod
    from flwr.common import (
        Code as Code,
        FitIns as FitIns,
        FitRes as FitRes,
        Parameters as Parameters,
        parameters_to_ndarrays as parameters_to_ndarrays,
    )
    from flwr.common.constant import SUPERLINK_NODE_ID as SUPERLINK_NODE_ID, ErrorCode as ErrorCode, SType as SType
    from flwr.common.secure_aggregation.secaggplus_constants import (
        RECORD_KEY_CONFIGS as RECORD_KEY_CONFIGS,
        Key as Key,
        Stage as Stage,
    )
    from flwr.proto.control_pb2 import (
        ListNodesRequest as ListNodesRequest,
        RegisterNodeRequest as RegisterNodeRequest,
        UnregisterNodeRequest as UnregisterNodeRequest,
    )
    from flwr.proto.node_pb2 import NodeInfo as NodeInfo
    from flwr.server.workflow import SecAggPlusWorkflow as SecAggPlusWorkflow
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState as WorkflowState
    from flwr.serverapp.strategy.dp_adaptive_clipping import (
        DifferentialPrivacyAdaptiveBase as DifferentialPrivacyAdaptiveBase,
    )
    from flwr.serverapp.strategy.dp_fixed_clipping import (
        DifferentialPrivacyFixedClippingBase as DifferentialPrivacyFixedClippingBase,
    )
    from flwr.serverapp.strategy.fedopt import FedOpt as FedOpt
    from flwr.supercore import log as log
    from flwr.supercore.cli.flower_superexec import flower_superexec as flower_superexec
    from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE as SYSTEM_MESSAGE_TYPE, TaskType as TaskType
    from flwr.supercore.control import ControlHttpClient as ControlHttpClient
    from flwr.supercore.date import now as now
    from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM as KEY_CLIPPING_NORM, KEY_NORM_BIT as KEY_NORM_BIT
    from flwr.supercore.fab import Fab as Fab
    from flwr.supercore.http_logging import get_uvicorn_log_config as get_uvicorn_log_config
    from flwr.supercore.inflatable import inflatable_utils as inflatable_utils
    from flwr.supercore.inflatable.inflatable_object import (
        InflatableObject as InflatableObject,
        get_all_nested_objects as get_all_nested_objects,
        get_object_body as get_object_body,
        get_object_children_ids_from_object_content as get_object_children_ids_from_object_content,
        get_object_tree as get_object_tree,
        no_object_id_recompute as no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError
    from flwr.supercore.logger import console_handler as console_handler
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key as bytes_to_public_key
    from flwr.supercore.run import Run as Run
    from flwr.superlink.grid import InMemoryGrid as InMemoryGrid
    from flwr.superlink.main import create_app as create_app
    from flwr.supernode.cli.flower_supernode import flower_supernode as flower_supernode
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp as flwr_clientapp


class Internal(NamedTuple):
    """Something of Flower's that is not public."""

    module: str
    """Where it lies in flwr 1.41."""
    attribute: str | None
    """Its name there; None: the module itself."""
    needed_for: str
    instead: str
    """What would replace it."""


INTERNALS: dict[str, Internal] = {
    # Records and messages.
    "make_message": Internal(
        "flwr.app.message",
        "make_message",
        "an error that the grid answers in a node's place, with metadata of its own",
        "a public constructor of a reply without its order",
    ),
    "ErrorCode": Internal(
        "flwr.common.constant",
        "ErrorCode",
        "the codes of an error that a node or the SuperLink answers",
        "an enum beside flwr.app.Error",
    ),
    "SUPERLINK_NODE_ID": Internal(
        "flwr.common.constant",
        "SUPERLINK_NODE_ID",
        "the sender of an error that no node has sent",
        "as for make_message",
    ),
    "SType": Internal(
        "flwr.common.constant",
        "SType",
        "how an array's bytes are to be read, checked before they are",
        "a public constant beside flwr.app.Array",
    ),
    "SYSTEM_MESSAGE_TYPE": Internal(
        "flwr.supercore.constant", "SYSTEM_MESSAGE_TYPE", "the type of an error's message", "as for make_message"
    ),
    "now": Internal(
        "flwr.supercore.date", "now", "the time of an error's message, in Flower's zone", "as for make_message"
    ),
    "log": Internal(
        "flwr.supercore",
        "log",
        "lines that stand among those of the server app and the client app",
        'logging.getLogger("flwr"), whose handlers are Flower\'s own',
    ),
    # Objects on their way.
    "ObjectPushError": Internal(
        "flwr.supercore.inflatable.inflatable_utils",
        "ObjectPushError",
        "an order that did not arrive whole is its node's failure alone",
        "an exception of Grid.push_messages that is documented",
    ),
    "inflatable_utils": Internal(
        "flwr.supercore.inflatable.inflatable_utils",
        None,
        "its registry of classes: arrays are put together by one of ours, with a bound",
        "a limit of bytes in Grid.pull_messages",
    ),
    "InflatableObject": Internal(
        "flwr.supercore.inflatable.inflatable_object",
        "InflatableObject",
        "the pieces of an array, as they have come",
        "as for inflatable_utils",
    ),
    "get_object_body": Internal(
        "flwr.supercore.inflatable.inflatable_object",
        "get_object_body",
        "the numbers of an array's pieces, before these are joined",
        "as for inflatable_utils",
    ),
    "get_object_children_ids_from_object_content": Internal(
        "flwr.supercore.inflatable.inflatable_object",
        "get_object_children_ids_from_object_content",
        "the ids of an array's pieces",
        "as for inflatable_utils",
    ),
    "get_all_nested_objects": Internal(
        "flwr.supercore.inflatable.inflatable_object",
        "get_all_nested_objects",
        "a SuperNode that answers without starting the app",
        "a hook of the SuperNode that may refuse an app",
    ),
    "get_object_tree": Internal(
        "flwr.supercore.inflatable.inflatable_object",
        "get_object_tree",
        "as for get_all_nested_objects",
        "as for get_all_nested_objects",
    ),
    "no_object_id_recompute": Internal(
        "flwr.supercore.inflatable.inflatable_object",
        "no_object_id_recompute",
        "as for get_all_nested_objects",
        "as for get_all_nested_objects",
    ),
    # Nodes, runs and apps.
    "NodeInfo": Internal(
        "flwr.proto.node_pb2",
        "NodeInfo",
        "what Grid.get_nodes returns: since when a SuperNode runs",
        "a public type of Grid.get_nodes",
    ),
    "Run": Internal(
        "flwr.supercore.run",
        "Run",
        "the type of Grid.run, which a grid around another one has, too",
        "a public type of Grid.run",
    ),
    "InMemoryGrid": Internal(
        "flwr.superlink.grid",
        "InMemoryGrid",
        "whether a run is simulated, where nodes cannot come later",
        "a public property of Grid",
    ),
    "SimulationThreads": Internal(
        "flwr.server.superlink.fleet.vce.vce_api",
        "ThreadPoolExecutor",
        "as many client apps of a simulation at once as it has workers for: its threads are cores + 4, at most 32",
        "a thread for each of the simulation's workers",
    ),
    "SimulationWorkers": Internal(
        "flwr.simulation.ray_transport.ray_actor",
        "BasicActorPool",
        "several clients of a simulation in one worker: a process for each costs 200 MB and two seconds of a core",
        "a number of clients that a worker of the simulation runs at once",
    ),
    "SimulationBackend": Internal(
        "flwr.server.superlink.fleet.vce.backend.raybackend",
        "RayBackend",
        "a simulation in the Ray that the launcher has started beside the SuperLink, which saves seconds",
        "the address of a Ray in the configuration of a federation",
    ),
    "Fab": Internal(
        "flwr.supercore.fab", "Fab", "the app bundle that a SuperNode is asked to run", "as for get_all_nested_objects"
    ),
    "TaskType": Internal(
        "flwr.supercore.constant", "TaskType", "whether a client app is to run", "as for get_all_nested_objects"
    ),
    "build_fab_from_disk": Internal(
        "flwr.cli.build",
        "build_fab_from_disk",
        "the digest of the bundle that flwr run submits",
        "a documented function, or a command that prints the digest",
    ),
    # Processes of Flower.
    "flower_cli": Internal(
        "flwr.cli.app",
        "app",
        "flwr run within a process that watches over it",
        "a documented function that submits a run",
    ),
    "flower_superlink_module": Internal(
        "flwr.superlink.cli.flower_superlink",
        None,
        "its SuperLink is served by us, with two ports; both are patched into this module",
        "an option for a separate address of the Fleet API",
    ),
    "create_app": Internal(
        "flwr.superlink.main", "create_app", "as for flower_superlink_module", "as for flower_superlink_module"
    ),
    "get_uvicorn_log_config": Internal(
        "flwr.supercore.http_logging",
        "get_uvicorn_log_config",
        "log lines of the SuperLink that look as Flower's own do",
        "as for flower_superlink_module",
    ),
    "console_handler": Internal(
        "flwr.supercore.logger", "console_handler", "the level of these lines", "as for flower_superlink_module"
    ),
    "supernode_module": Internal(
        "flwr.supernode.start_client_internal",
        None,
        "its connection to the SuperLink is wrapped, so that foreign apps are refused",
        "as for get_all_nested_objects",
    ),
    "flower_supernode": Internal(
        "flwr.supernode.cli.flower_supernode",
        "flower_supernode",
        "the command flower-supernode, after that",
        "as for get_all_nested_objects",
    ),
    "flower_superexec": Internal(
        "flwr.supercore.cli.flower_superexec",
        "flower_superexec",
        "the command flower-superexec, beside the process that client apps are forks of",
        "an executor of Flower's that keeps the libraries of client apps imported",
    ),
    "subprocess_executor_module": Internal(
        "flwr.supercore.superexec.executor.subprocess_executor",
        None,
        "how it starts a client app's process",
        "as for flower_superexec",
    ),
    "flwr_clientapp": Internal(
        "flwr.supernode.cli.flwr_clientapp", "flwr_clientapp", "the program of a message", "as for flower_superexec"
    ),
    "run_clientapp_module": Internal(
        "flwr.supernode.runtime.run_clientapp",
        None,
        "how long it waits for a piece of its message",
        "an option of Flower's, as PULL_INITIAL_BACKOFF is none",
    ),
    "ControlHttpClient": Internal(
        "flwr.supercore.control",
        "ControlHttpClient",
        "registering SuperNodes' keys on a SuperLink of this machine",
        "flwr supernode register, if it took keys without a configuration of its own",
    ),
    "ListNodesRequest": Internal(
        "flwr.proto.control_pb2", "ListNodesRequest", "as for ControlHttpClient", "as for ControlHttpClient"
    ),
    "RegisterNodeRequest": Internal(
        "flwr.proto.control_pb2", "RegisterNodeRequest", "as for ControlHttpClient", "as for ControlHttpClient"
    ),
    "UnregisterNodeRequest": Internal(
        "flwr.proto.control_pb2", "UnregisterNodeRequest", "as for ControlHttpClient", "as for ControlHttpClient"
    ),
    # Strategies and mods.
    "FedOpt": Internal(
        "flwr.serverapp.strategy.fedopt",
        "FedOpt",
        "the memory of the adaptive strategies, for checkpoints",
        "state that a strategy gives and takes back",
    ),
    "DifferentialPrivacyAdaptiveBase": Internal(
        "flwr.serverapp.strategy.dp_adaptive_clipping",
        "DifferentialPrivacyAdaptiveBase",
        "the clip of the adaptive mechanisms, for messages and checkpoints",
        "state that a strategy gives and takes back",
    ),
    "DifferentialPrivacyFixedClippingBase": Internal(
        "flwr.serverapp.strategy.dp_fixed_clipping",
        "DifferentialPrivacyFixedClippingBase",
        "the clip of the fixed mechanisms, for messages",
        "the wrappers' own configure_train, if it worked within another strategy",
    ),
    "KEY_CLIPPING_NORM": Internal(
        "flwr.supercore.differential_privacy",
        "KEY_CLIPPING_NORM",
        "the key by which Flower's mods are told the clip",
        "a public constant beside the mods",
    ),
    "KEY_NORM_BIT": Internal(
        "flwr.supercore.differential_privacy",
        "KEY_NORM_BIT",
        "the key by which they answer",
        "a public constant beside the mods",
    ),
    "ClientAppCallable": Internal(
        "flwr.clientapp.typing", "ClientAppCallable", "the type of what a mod calls", "the same name in flwr.clientapp"
    ),
    "Mod": Internal("flwr.clientapp.typing", "Mod", "the type of a mod", "the same name in flwr.clientapp"),
    # Secure aggregation.
    "secaggplus_mod": Internal(
        "flwr.client.mod", "secaggplus_mod", "SecAgg+ at the clients", "the same mod for messages with ArrayRecords"
    ),
    "secaggplus_mod_module": Internal(
        "flwr.client.mod.secure_aggregation.secaggplus_mod",
        None,
        "its masks are replaced: its own have 32 bits",
        "masks of the whole seed in Flower",
    ),
    "secaggplus_workflow_module": Internal(
        "flwr.server.workflow.secure_aggregation.secaggplus_workflow",
        None,
        "the same at the server",
        "masks of the whole seed in Flower",
    ),
    "SecAggPlusWorkflow": Internal(
        "flwr.server.workflow", "SecAggPlusWorkflow", "SecAgg+ at the server", "a public strategy or grid for it"
    ),
    "WorkflowState": Internal(
        "flwr.server.workflow.secure_aggregation.secaggplus_workflow",
        "WorkflowState",
        "what its four stages share",
        "as for SecAggPlusWorkflow",
    ),
    "RECORD_KEY_CONFIGS": Internal(
        "flwr.common.secure_aggregation.secaggplus_constants",
        "RECORD_KEY_CONFIGS",
        "what clients answer in each stage, checked before the workflow sees it",
        "as for SecAggPlusWorkflow",
    ),
    "Key": Internal(
        "flwr.common.secure_aggregation.secaggplus_constants",
        "Key",
        "as for RECORD_KEY_CONFIGS",
        "as for SecAggPlusWorkflow",
    ),
    "Stage": Internal(
        "flwr.common.secure_aggregation.secaggplus_constants",
        "Stage",
        "as for RECORD_KEY_CONFIGS",
        "as for SecAggPlusWorkflow",
    ),
    "bytes_to_public_key": Internal(
        "flwr.supercore.primitives.asymmetric",
        "bytes_to_public_key",
        "as for RECORD_KEY_CONFIGS",
        "as for SecAggPlusWorkflow",
    ),
    "Code": Internal("flwr.common", "Code", "the older records that the workflow reads", "as for SecAggPlusWorkflow"),
    "FitIns": Internal("flwr.common", "FitIns", "as for Code", "as for SecAggPlusWorkflow"),
    "FitRes": Internal("flwr.common", "FitRes", "as for Code", "as for SecAggPlusWorkflow"),
    "Parameters": Internal("flwr.common", "Parameters", "as for Code", "as for SecAggPlusWorkflow"),
    "parameters_to_ndarrays": Internal(
        "flwr.common", "parameters_to_ndarrays", "as for Code", "as for SecAggPlusWorkflow"
    ),
}
"""By the name that it has here."""


def missing_internals() -> list[str]:
    """Say of each part that the installed release of flwr lacks where it was expected; none with flwr 1.41."""
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
        module = import_module(internal.module)
        return module if internal.attribute is None else getattr(module, internal.attribute)
    except (ImportError, AttributeError) as error:
        place = internal.module if internal.attribute is None else f"{internal.module}.{internal.attribute}"
        raise ImportError(
            f"flwr {version('flwr')} has no {place} ({error}); CollaPipe needs it for: {internal.needed_for}; install "
            "flwr 1.41"
        ) from error


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module 'strategies.flower_internals' has no attribute {name!r}")
    return _resolve(name)
