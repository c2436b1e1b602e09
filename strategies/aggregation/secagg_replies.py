"""What a cluster may answer in each stage of SecAgg+; whatever else it does is its own failure.

Flower's workflow takes answers as they come: one of another shape would end the round for all, and the run.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message

from strategies.flower_internals import RECORD_KEY_CONFIGS, Key, Stage, bytes_to_public_key
from strategies.records import METRICS, REPORT

STAGES = Stage.all()
_CURVE = "secp384r1"
"""Of Flower's keys; a client refuses to share a key with one of another curve."""


def unfit(reply: Message, stage: str, nodes: Collection[int], arrays: ArrayRecord) -> str | None:
    """Say what is wrong with an answer; None if nothing is.

    Parameters
    ----------
    reply : of a cluster, without an error
    stage : of the protocol
    nodes : all that were asked to take part
    arrays : what the round began with
    """
    if RECORD_KEY_CONFIGS not in reply.content.config_records:
        return f"{stage}: expected the record {RECORD_KEY_CONFIGS}"
    record = dict(reply.content.config_records[RECORD_KEY_CONFIGS])
    if stage == Stage.SETUP:
        return _unfit_keys(record)
    if stage == Stage.SHARE_KEYS:
        return _unfit_pairs(record, stage, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, nodes)
    if stage == Stage.UNMASK:
        return _unfit_pairs(record, stage, Key.NODE_ID_LIST, Key.SHARE_LIST, nodes)
    for name, records in ((METRICS, reply.content.metric_records), (REPORT, reply.content.config_records)):
        if name not in records:
            return f"{stage}: expected the record {name}"
    return _unfit_vector(record.get(Key.MASKED_PARAMETERS), [a.shape for a in arrays.values()])


def _unfit_keys(record: dict[str, Any]) -> str | None:
    try:
        for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
            if (curve := bytes_to_public_key(record[key]).curve.name) != _CURVE:
                return f"{Stage.SETUP}: expected public keys of {_CURVE}, found {curve}"
    except Exception as error:  # of whichever type the parser of keys has
        return f"{Stage.SETUP}: expected two public keys, found {type(error).__name__}"
    return None


def _unfit_pairs(
    record: dict[str, Any], stage: str, nodes_key: str, values_key: str, nodes: Collection[int]
) -> str | None:
    listed, values = record.get(nodes_key), record.get(values_key)
    if not isinstance(listed, list) or not isinstance(values, list) or len(listed) != len(values):
        return f"{stage}: expected as many {values_key} as {nodes_key}"
    if len(set(listed)) != len(listed) or not set(listed) <= set(nodes):
        return f"{stage}: expected each of the round's nodes once at most"
    if not all(isinstance(value, bytes) for value in values):
        return f"{stage}: expected {values_key} of bytes"
    return None


def _unfit_vector(vectors: Any, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Compare the arrays' bytes with what such arrays begin with: no header is believed."""
    stage = Stage.COLLECT_MASKED_VECTORS
    # The weight goes before, and has no dimension that could be left out.
    expected = [(1,), *(tuple(shape) or (1,) for shape in shapes)]
    if not isinstance(vectors, list) or len(vectors) != len(expected):
        return f"{stage}: expected {len(expected)} masked arrays"
    for data, shape in zip(vectors, expected, strict=True):
        size = 8 * int(np.prod(shape, dtype=np.int64))
        header = _header(shape)
        if not isinstance(data, bytes) or len(data) != len(header) + size or not data.startswith(header):
            return f"{stage}: expected a masked array of int64 {list(shape)}"
    return None


def _header(shape: tuple[int, ...]) -> bytes:
    """What numpy writes before the numbers of such an array."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": tuple(shape)})
    return file.getvalue()
