"""Frozen weights and a run that goes on: adapters belong to the very weights that they were trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from client_pipeline.partition.base_weights import BaseWeights, FrozenBase


def frozen_digest(frozen: Mapping[str, torch.Tensor], resumed: Mapping[str, Any] | None, source: str) -> str:
    """Return the SHA-256 of a run's frozen weights in hexadecimal; empty if there are none.

    Parameters
    ----------
    frozen : by name
    resumed : a checkpoint's state, of which ``frozen`` is what this function gave when the run began; None: it begins
    source : where the weights come from, for the message

    Raises
    ------
    ValueError
        If the run began with other weights.
    """
    digest = _digest(frozen) if frozen else ""
    expected = digest if resumed is None else resumed.get("frozen", "")
    if expected != digest:
        raise ValueError(
            f"resume: the frozen weights are not those that the run began with (SHA-256 {digest[:12]}, expected "
            f"{expected[:12]}): {source or 'the model'} has changed; put it back, or start the run anew"
        )
    return digest


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    if isinstance(weights, BaseWeights):
        # Of their files' digests: nobody reads a whole model for it.
        return hashlib.sha256(json.dumps([weights.files, dict(weights.places)]).encode()).hexdigest()
    if isinstance(weights, FrozenBase):
        return hashlib.sha256(weights.to_json().encode()).hexdigest()
    hashed = hashlib.sha256()
    for name, value in sorted(weights.items()):
        hashed.update(name.encode())
        hashed.update(value.contiguous().numpy().tobytes())
    return hashed.hexdigest()
