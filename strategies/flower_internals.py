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
from typing import TYPE_CHECKING, Any

from strategies.flower_parts import INTERNALS as INTERNALS

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
    from flwr.simulation.app import flwr_simulation as flwr_simulation
    from flwr.supercore import log as log
    from flwr.supercore.cli.flower_superexec import flower_superexec as flower_superexec
    from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE as SYSTEM_MESSAGE_TYPE, TaskType as TaskType
    from flwr.supercore.control import ControlHttpClient as ControlHttpClient
    from flwr.supercore.date import now as now
    from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM as KEY_CLIPPING_NORM, KEY_NORM_BIT as KEY_NORM_BIT
    from flwr.supercore.error.base import ApiErrorCode as ApiErrorCode, FlowerError as FlowerError
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
    from flwr.supernode.fleet_http_client import FleetHttpClient as FleetHttpClient


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
