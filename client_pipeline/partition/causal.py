"""Decoder-only language models: the first blocks are the TEBs, the last ones and the output layer are the server's.

``server_layers`` in the specification says how many blocks the server has, besides the closing norm and the output
layer. Causal masks and rotary embeddings are built on each stage from the padding mask and the length.
Their TEBs take a :class:`~client_pipeline.partition.token_slices.TokenSlice` in the place of the mask, too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from client_pipeline.partition.hugging_face import SERVER_LAYERS, config_from_spec
from client_pipeline.partition.parts import IGNORED_LABEL, MaskForm
from client_pipeline.partition.spec import CAUSAL_LM, ModelSpec
from client_pipeline.partition.token_slices import TokenSlice
from client_pipeline.partition.vocabulary_loss import vocabulary_loss

HEADS = (CAUSAL_LM,)


def library_config(spec: ModelSpec) -> Any:
    """Build the library's configuration of a causal model.

    Raises
    ------
    ValueError
        If the head is another one, or no block would be left for the devices.
    """
    config = config_from_spec(spec, HEADS)
    server = spec.config.get(SERVER_LAYERS, 0)
    if not isinstance(server, int) or not 0 <= server < config.num_hidden_layers:
        raise ValueError(
            f"model.server-layers: expected 0 to {config.num_hidden_layers - 1}, as the model has "
            f"{config.num_hidden_layers} blocks, found {server!r}"
        )
    return config


def num_blocks(spec: ModelSpec) -> int:
    """L: the blocks that are not the server's."""
    return int(library_config(spec).num_hidden_layers - spec.config.get(SERVER_LAYERS, 0))


def width(spec: ModelSpec) -> int:
    """D."""
    return int(library_config(spec).hidden_size)


def mask_form(mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
    """Bool mask [B, 1, T, T], causal and without padding; None, which is causal too, when nothing is padded."""
    del dtype
    if bool(mask_BT.all()):
        return None
    return causal_mask(mask_BT.shape[1], mask_BT.device) & mask_BT[:, None, None, :]


def causal_mask(length: int, device: torch.device, window: int | None = None, first: int = 0) -> Tensor:
    """Bool mask [1, 1, T - first, T]: itself and what came before, the last ``window`` positions of that.

    Its rows are the positions from ``first`` on.
    """
    position = torch.arange(length, device=device)
    distance = position[first:, None] - position[None, :]
    allowed = distance >= 0
    return (allowed if window is None else allowed & (distance < window))[None, None]


def slice_mask(part: TokenSlice, window: int | None = None) -> Tensor:
    """Bool mask [B or 1, 1, t, end]: the slice's rows of the whole micro-batch's mask, up to its last token."""
    seen = part.mask_BT[:, : part.end]
    near = causal_mask(part.end, seen.device, window, part.first)
    return near if bool(seen.all()) else near & seen[:, None, None, :]


class CausalHead(nn.Module):
    """The last blocks, the closing norm and the output layer."""

    def __init__(self, blocks: nn.ModuleList, norm: nn.Module, output: nn.Module, tied: dict[str, str]) -> None:
        super().__init__()
        self.blocks = blocks
        self.norm = norm
        self.lm_head = output
        self.tied = tied

    def hidden(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """States after the closing norm, [B, T, D]."""
        mask = mask_form(mask_BT, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask)
        return cast(Tensor, self.norm(x_BTD))

    def logits(self, x_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        """Scores over the vocabulary at every position, [B, T, V]."""
        return cast(Tensor, self.lm_head(self.hidden(x_BTD, mask_BT)))

    def forward(self, x_BTD: Tensor, mask_BT: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Sum of the cross-entropies of each label, given what came before it.

        Labels stand where their tokens do, as in the library, and are shifted here. Nothing comes before the first.
        """
        labels_BT = targets["labels"]
        if labels_BT.shape != mask_BT.shape:
            raise ValueError(f"labels: expected shape {list(mask_BT.shape)}, found {list(labels_BT.shape)}")
        if bool((labels_BT[:, 0] != IGNORED_LABEL).any()):
            raise ValueError(f"labels: expected {IGNORED_LABEL} at the first position, which has no loss and no weight")
        states_BTD = self.hidden(x_BTD, mask_BT)[:, :-1]
        labels = labels_BT[:, 1:]
        # Only positions with a loss reach the output layer.
        real = labels != IGNORED_LABEL
        return vocabulary_loss(states_BTD[real], self.lm_head, labels[real])
