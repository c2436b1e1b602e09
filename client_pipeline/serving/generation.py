"""The transformers library's ``generate`` over a model whose TEBs are elsewhere.

A request is one call of ``generate``: its forward pass asks the engine for a step, and beams reorder the keys and
values on the devices. Tokens are drawn by a generator of the request's own: to the scores, after temperature, top-k and
top-p, it adds Gumbel noise, and the largest is taken; that has the distribution of drawing from their softmax.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from client_pipeline.families.kept_keys import CACHE_NAMES, NumKept
from client_pipeline.serving.engine import Engine

_CACHE = next(name for name in CACHE_NAMES if name in CausalLMOutputWithPast.__dataclass_fields__)
_STEP_S = 3600.0
"""Longest wait for a step: the devices' own limits are shorter [s]."""


class RemoteKeys(NumKept):
    """Keys and values that the engine's devices have of one request."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(0)
        self.engine = engine
        self.request = uuid.uuid4().hex
        self.order: Tensor | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows in this order, with the next step."""
        self.order = beam_idx if self.order is None else self.order[beam_idx]

    def step(self, new_RT: Tensor, mask_RK: Tensor, last: int = 1) -> Tensor:
        """Return scores [R, last, V] of the successors of the last new tokens."""
        order, self.order = self.order, None
        scores = self.engine.ask(self.request, new_RT, mask_RK, order, last).result(_STEP_S)
        self.length += new_RT.shape[1]
        return scores

    def close(self) -> None:
        """Forget the request."""
        self.engine.end(self.request)


class AnsweringModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A language model of which this process has nothing but its configuration.

    Parameters
    ----------
    config : the library's
    on_scores : told of the scores [R, V] of each step, as the model has them
    """

    main_input_name = "input_ids"
    # It has no attention: whichever the configuration names will do.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True

    def __init__(self, config: Any, on_scores: Callable[[Tensor], None] = lambda scores: None) -> None:
        super().__init__(copy.deepcopy(config))
        # The library asks the parameters for device and type.
        self.place = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
        self._on_scores = on_scores

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **given: Any) -> CausalLMOutputWithPast:
        """Pass new tokens [R, T] through the pipeline; the cache is a :class:`RemoteKeys`."""
        keys: RemoteKeys = next(given[name] for name in CACHE_NAMES if given.get(name) is not None)
        if attention_mask is None:
            attention_mask = torch.ones(len(input_ids), keys.length + input_ids.shape[1])
        scores = keys.step(input_ids, attention_mask)
        self._on_scores(scores[:, -1])
        return CausalLMOutputWithPast(logits=scores, **{_CACHE: keys})

    def write(self, engine: Engine, ids_RT: Tensor, mask_RT: Tensor, **options: Any) -> Tensor:
        """Write behind prompts that end together; ``options`` are those of ``generate``."""
        keys = RemoteKeys(engine)
        try:
            return self.generate(input_ids=ids_RT, attention_mask=mask_RT.long(), **{_CACHE: keys}, **options)
        finally:
            keys.close()


class GumbelNoise(LogitsProcessor):  # type: ignore[misc]
    """Make the largest score a draw from the softmax of all; goes last.

    Parameters
    ----------
    seed : of the request
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [R, V] with noise."""
        noise = torch.empty_like(scores).exponential_(generator=self._generator)
        return scores - noise.log()
