"""An encoder through the engine: all tokens of a source in one step, of which the devices keep nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from client_pipeline.partition.parts import ModelParts
from client_pipeline.serving.engine import Engine, Stages
from client_pipeline.serving.generation import RemoteKeys


class _SourceEmbedding:
    """The embedding, as the engine asks for it."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    def step(self, ids_RT: Tensor, mask_RT: Tensor) -> Tensor:
        """Embed whole sources, [R, T, D]."""
        embedded: Tensor = self._embedding({"input_ids": ids_RT, "attention_mask": mask_RT})
        return embedded


class _NoHead:
    """Stands where a head does: the last TEB's states are the answer."""

    def step(self, x_RTD: Tensor, mask_RT: Tensor, keys: Any, last: int) -> Tensor:
        """Return the states of all tokens."""
        del mask_RT, keys, last
        return x_RTD


def encoder_engine(parts: ModelParts, stages: Stages, say: Callable[[str], None] = lambda line: None) -> Engine:
    """Return the engine of an encoder whose TEBs are elsewhere; the arguments are those of :class:`Engine`."""
    return Engine(_SourceEmbedding(parts.embedding), _NoHead(), stages, say)


def encoded(engine: Engine, ids: Sequence[int]) -> Tensor:
    """Return the last TEB's states of a source, [1, T, D]."""
    ids_RT, request = torch.tensor([list(ids)]), RemoteKeys(engine)
    try:
        return request.step(ids_RT, torch.ones_like(ids_RT), last=len(ids))
    finally:
        request.close()
