"""The messages between server and control units, beyond Flower's own: their names and their parsing.

Flower's client imports it: torch is imported where tensors are wanted alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from client_pipeline.link.address import DecoderAddress
from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit.round_order import HandOver, RoundOrder
from client_pipeline.timetable.pacing import Pace
from strategies.npy_bytes import array_values, values_in_place

if TYPE_CHECKING:
    from torch import Tensor

ARRAYS, CONFIG, METRICS, REPORT = "arrays", "config", "metrics", "report"
ROUND_KEY = "server-round"
COUNTED_KEY = "updates-counted"
"""By cluster: the last round whose update of it is in the average."""
RUN_KEY = "run-name"
"""Name of the run's directory in a train message: a node that was started again finds its set-up by it."""
WEIGHT_KEY = "num-examples"
LOSS_KEY = "loss"
STEPS_KEY, WALL_KEY = "steps", "wall-s"
FAULTS_PREFIX = "faults: "
"""Beginning of the line of an error's text that has the round's faults."""
BASE_KEY = "base"
"""In the set-up: files and places of the frozen weights, as JSON; empty: they are sent."""
PULL_KEY = "pull-from"
"""In the set-up: where, and with which token, a node may pull those files, as JSON; it is good until round 1."""
HAND_OVER_KEY = "hand-over"
"""In a train message of a simulation with more clusters than client apps at once: a value of :class:`HandOver`."""
_UNDER_WAY = "under-way"
SETUP = "query.setup"
"""Message type of the exchange before round 1."""
SERVE = "query.serve"
"""Message type of a trained model that boxes are to answer with, and of the end of their answers."""

_PLAN, _DECODER, _PACE, _WAIVED = "plan", "decoder", "pace", "waived"


def to_arrays(weights: Mapping[str, Tensor] | Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Pack weights by global name."""
    return ArrayRecord({name: Array(_values(weight)) for name, weight in weights.items()})


def _values(weight: Tensor | NDArray[Any]) -> NDArray[Any]:
    return weight if isinstance(weight, np.ndarray) else weight.detach().cpu().numpy()


def to_numpy(arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Unpack weights where nothing is computed with them."""
    return {name: array_values(array) for name, array in arrays.items()}


def to_tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Unpack weights; whatever floating type the strategy made of them is kept."""
    import torch

    return {name: torch.from_numpy(array_values(array)) for name, array in arrays.items()}


def shared_tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Unpack weights without copies: tensors on the arrays' own bytes, to be read alone."""
    import torch

    with warnings.catch_warnings():
        # Bytes cannot be written; torch has no tensors that say so.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(values_in_place(array)) for name, array in arrays.items()}


def train_config(
    round_: int,
    plan: ClusterPlan,
    *,
    decoder: DecoderAddress | None = None,
    pace: Pace | None = None,
    waived: Sequence[str] = (),
) -> ConfigRecord:
    """Pack a planning strategy's order to a control unit for one round, without the weights."""
    settings: dict[str, Any] = {ROUND_KEY: round_, _PLAN: json.dumps(plan.to_dict())}
    if decoder is not None:
        settings[_DECODER] = json.dumps(decoder.to_dict())
    if pace is not None:
        settings[_PACE] = json.dumps(pace.to_dict())
    if waived:
        settings[_WAIVED] = list(waived)
    return ConfigRecord(settings)


def read_train_config(config: ConfigRecord, cluster: int) -> RoundOrder:
    """Read a cluster's order from a train message's configuration, without the weights.

    A stock strategy gives the round alone.
    """
    counted = cast(list[int], config.get(COUNTED_KEY, []))
    return RoundOrder(
        round=int(cast(int, config[ROUND_KEY])),
        plan=ClusterPlan.from_dict(json.loads(cast(str, config[_PLAN]))) if _PLAN in config else None,
        decoder=DecoderAddress.from_dict(json.loads(cast(str, config[_DECODER]))) if _DECODER in config else None,
        pace=Pace.from_dict(json.loads(cast(str, config[_PACE]))) if _PACE in config else None,
        counted=counted[cluster] if 0 <= cluster < len(counted) else 0,
        waived=tuple(cast(list[str], config.get(_WAIVED, []))),
        run=str(config.get(RUN_KEY, "")),
        hand_over=HandOver(str(config[HAND_OVER_KEY])) if HAND_OVER_KEY in config else None,
    )


def under_way() -> RecordDict:
    """Make the answer to an order whose round is not over yet."""
    return RecordDict({CONFIG: ConfigRecord({_UNDER_WAY: True})})


def is_under_way(message: Message) -> bool:
    """Return whether an answer says that the round is not over yet."""
    return not message.has_error() and _UNDER_WAY in message.content.config_records.get(CONFIG, {})


def reply_content(
    weights: Mapping[str, Tensor] | Mapping[str, NDArray[Any]],
    *,
    weight: int,
    loss: float,
    steps: int,
    wall_s: float,
    report: dict[str, Any],
) -> RecordDict:
    """Pack a control unit's answer: one ArrayRecord, one MetricRecord (always the same keys), one ConfigRecord."""
    metrics = MetricRecord({WEIGHT_KEY: weight, LOSS_KEY: loss, STEPS_KEY: steps, WALL_KEY: wall_s})
    return RecordDict(
        {ARRAYS: to_arrays(weights), METRICS: metrics, REPORT: ConfigRecord({"json": json.dumps(report)})}
    )


def failure_reason(reason: str, faults: Sequence[Mapping[str, Any]] = ()) -> str:
    """Pack why a control unit could not answer, and what went wrong before, into the text of a Flower error."""
    return f"{reason}\n{FAULTS_PREFIX}{json.dumps(list(faults))}" if faults else reason


def read_report(message: Message) -> dict[str, Any]:
    """Return the report of a control unit's answer; empty if it has none."""
    if message.has_error() or REPORT not in message.content:
        return {}
    return dict(json.loads(str(message.content[REPORT]["json"])))


def read_metric(message: Message, key: str) -> float:
    """Return one scalar of the answer's only MetricRecord."""
    record = next(iter(message.content.metric_records.values()))
    return float(cast(float, record[key]))


def sole_arrays(message: Message) -> ArrayRecord:
    """Return the answer's only ArrayRecord."""
    return next(iter(message.content.array_records.values()))
