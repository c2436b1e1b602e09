"""The messages between server and control units, beyond Flower's own: their names and their parsing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from client_pipeline.link.stream import DecoderAddress
from client_pipeline.partition.plan import ClusterPlan

ARRAYS, CONFIG, METRICS, REPORT = "arrays", "config", "metrics", "report"
ROUND_KEY = "server-round"
WEIGHT_KEY = "num-examples"
LOSS_KEY = "loss"
SETUP = "query.setup"
"""Message type of the exchange before round 1."""

_PLAN, _DECODER = "plan", "decoder"


def to_arrays(weights: Mapping[str, Tensor]) -> ArrayRecord:
    """Pack weights by global name."""
    return ArrayRecord({name: value.detach().cpu() for name, value in weights.items()})


def to_tensors(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Unpack weights; whatever floating type the strategy made of them is kept."""
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}


def train_config(round_: int, plan: ClusterPlan, decoder: DecoderAddress) -> ConfigRecord:
    """What CollaPipe tells a control unit each round, beside the weights."""
    return ConfigRecord({ROUND_KEY: round_, _PLAN: json.dumps(plan.to_dict()), _DECODER: json.dumps(decoder.to_dict())})


def read_train_config(config: ConfigRecord) -> tuple[int, ClusterPlan | None, DecoderAddress | None]:
    """Read round, plan and decoder address; a stock strategy gives the round alone."""
    plan = ClusterPlan.from_dict(json.loads(cast(str, config[_PLAN]))) if _PLAN in config else None
    decoder = DecoderAddress.from_dict(json.loads(cast(str, config[_DECODER]))) if _DECODER in config else None
    return int(cast(int, config[ROUND_KEY])), plan, decoder


def reply_content(
    weights: Mapping[str, Tensor], *, weight: int, loss: float, steps: int, wall_s: float, report: dict[str, Any]
) -> RecordDict:
    """Pack a control unit's answer: one ArrayRecord, one MetricRecord (always the same keys), one ConfigRecord."""
    metrics = MetricRecord({WEIGHT_KEY: weight, LOSS_KEY: loss, "steps": steps, "wall-s": wall_s})
    return RecordDict(
        {ARRAYS: to_arrays(weights), METRICS: metrics, REPORT: ConfigRecord({"json": json.dumps(report)})}
    )


def read_report(message: Message) -> dict[str, Any]:
    """Return the report of a control unit's answer; empty if it has none."""
    if message.has_error() or REPORT not in message.content:
        return {}
    return dict(json.loads(str(message.content[REPORT]["json"])))


def read_metric(message: Message, key: str) -> float:
    """Return one scalar of the answer's only MetricRecord."""
    record = next(iter(message.content.metric_records.values()))
    return float(cast(float, record[key]))
