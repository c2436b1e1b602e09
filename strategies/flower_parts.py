"""Which parts of Flower that are not public are used, and why; :mod:`strategies.flower_internals` imports them."""

from __future__ import annotations

from typing import NamedTuple


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
        "its SuperLink is served by us, with two ports, and its SuperExec a fork of it; both are patched in here",
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
        "foreign apps are refused by its connection to the SuperLink; how it starts a SuperExec, and waits for it",
        "as for get_all_nested_objects",
    ),
    "FleetHttpClient": Internal(
        "flwr.supernode.fleet_http_client",
        "FleetHttpClient",
        "a SuperNode that the SuperLink takes for connected asks again, instead of ending",
        "an option of flower-supernode that has it wait",
    ),
    "FlowerError": Internal(
        "flwr.supercore.error.base", "FlowerError", "as for FleetHttpClient", "as for FleetHttpClient"
    ),
    "ApiErrorCode": Internal(
        "flwr.supercore.error.base", "ApiErrorCode", "as for FleetHttpClient", "as for FleetHttpClient"
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
    "superexec_loop_module": Internal(
        "flwr.supercore.superexec.run_superexec",
        None,
        "how long it waits before it asks for work: it is told of some, and a simulation's has started all there is",
        "a request that is answered when there is some",
    ),
    "flwr_simulation": Internal(
        "flwr.simulation.app",
        "flwr_simulation",
        "the program of a simulation, which waits with its libraries until the SuperExec starts it",
        "as for flower_superexec",
    ),
    "simulation_module": Internal(
        "flwr.simulation.app",
        None,
        "where the simulation's app lies, and how it gets there",
        "a way to run an app as it lies in a folder",
    ),
    "flwr_clientapp": Internal(
        "flwr.supernode.cli.flwr_clientapp", "flwr_clientapp", "the program of a message", "as for flower_superexec"
    ),
    "run_clientapp_module": Internal(
        "flwr.supernode.runtime.run_clientapp",
        None,
        "how long it waits for a piece of its message, and who is told of its answer",
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
