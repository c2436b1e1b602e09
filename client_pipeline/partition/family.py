"""A model family as one class: what whoever adds one from outside derives from."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from client_pipeline.partition.parts import MaskForm, ModelParts
from client_pipeline.partition.spec import ModelSpec


class Family(ABC):
    """Says how the models of a family are cut; ``model.family = module:Class`` names it.

    ``spec.config`` has the sizes of the ``[model]`` table under their names (``width``, ``num_heads``,
    ``feed_forward``, ``encoder_layers``, ``decoder_layers``, ``dropout``, ``norm``, ``max_length``,
    ``label_smoothing``), ``vocab_size``, ``pad_id``, ``bos_id`` and ``eos_id`` of the tokenizer, and of a classifier
    ``num_labels`` and ``id2label``. Parts are built on whichever machine needs them, so each must follow from the
    specification alone.
    """

    HEADS: tuple[str, ...]
    """Its heads, of :data:`client_pipeline.partition.spec.HEADS`."""

    @abstractmethod
    def build_embedding(self, spec: ModelSpec) -> nn.Module:
        """Build what the control unit has: ``embedding(batch) -> x_BTD``."""

    @abstractmethod
    def build_block(self, spec: ModelSpec, index: int) -> nn.Module:
        """Build TEB ``index``: ``block(x_BTD, mask_form) -> x_BTD``, where the mask form may be None: no padding."""

    @abstractmethod
    def build_head(self, spec: ModelSpec) -> nn.Module:
        """Build what the server has: ``head(x_BTD, mask_BT, targets) -> sum of the losses``, and ``head.logits``.

        ``ClassifierHead`` of :mod:`client_pipeline.partition.encoder` and ``Seq2SeqHead`` of
        :mod:`client_pipeline.partition.seq2seq` are such heads.
        """

    def build_parts(self, spec: ModelSpec) -> ModelParts:
        """Build the whole model with fresh weights, drawn from torch's global generator."""
        return ModelParts(
            spec=spec,
            embedding=self.build_embedding(spec),
            blocks=nn.ModuleList(self.build_block(spec, index) for index in range(self.num_blocks(spec))),
            head=self.build_head(spec),
            mask_form=self.mask_form,
        )

    def mask_form(self, mask_BT: Tensor, dtype: torch.dtype) -> MaskForm:
        """Turn the padding mask into what the blocks take: bool [B, 1, 1, T]; None when nothing is padded."""
        del dtype
        return None if bool(mask_BT.all()) else mask_BT[:, None, None, :]

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Return what the head reads from the embedding: the head's own name and the embedding's of each matrix."""
        del spec
        return {}

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        return int(spec.config["encoder_layers"])

    def width(self, spec: ModelSpec) -> int:
        """Return D, the model width."""
        return int(spec.config["width"])
