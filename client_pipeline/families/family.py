"""A model family as one class: the base of those of this package and of those from outside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from client_pipeline.partition.parts import MaskForm, ModelParts, padding_mask
from client_pipeline.partition.spec import CLASSIFIERS, ModelSpec
from client_pipeline.weights.unfilled import NoStorage


class Family(ABC):
    """Says how the models of a family are cut; ``model.family = module:Class`` names it.

    ``spec.config`` has the sizes of the ``[model]`` table under their names (``width``, ``num_heads``,
    ``feed_forward``, ``encoder_layers``, ``decoder_layers``, ``dropout``, ``norm``, ``max_length``,
    ``label_smoothing``), ``vocab_size``, ``pad_id``, ``bos_id`` and ``eos_id`` of the tokenizer, and of a classifier
    ``num_labels`` and ``id2label``. Each machine builds the parts that it needs, so each part must follow from the
    specification alone.
    """

    HEADS: tuple[str, ...]
    """Its heads, of :data:`client_pipeline.partition.spec.HEADS`; the first is the default."""

    @abstractmethod
    def build_embedding(self, spec: ModelSpec) -> nn.Module:
        """Build the control unit's part: ``embedding(batch) -> x_BTD``."""

    @abstractmethod
    def build_block(self, spec: ModelSpec, index: int) -> nn.Module:
        """Build TEB ``index``: ``block(x_BTD, mask_form) -> x_BTD``, where the mask form may be None: no padding."""

    @abstractmethod
    def build_head(self, spec: ModelSpec) -> nn.Module:
        """Build the server's part: ``head(x_BTD, mask_BT, targets) -> sum of the losses``, and ``head.logits``.

        ``ClassifierHead`` of :mod:`client_pipeline.families.encoder` and ``Seq2SeqHead`` of
        :mod:`client_pipeline.families.seq2seq` are such heads.
        """

    def build_part(self, spec: ModelSpec, name: str) -> nn.Module:
        """Build the part of a name: ``embedding``, ``blocks.<i>`` or ``head``."""
        kind, _, index = name.partition(".")
        if kind == "blocks":
            return self.build_block(spec, int(index))
        return self.build_embedding(spec) if kind == "embedding" else self.build_head(spec)

    def unfilled_part(self, spec: ModelSpec, name: str) -> nn.Module:
        """Build a part whose weights have shapes alone; :func:`client_pipeline.weights.unfilled.adopt` fills it."""
        with NoStorage():
            return self.build_part(spec, name)

    def unfilled_model(self, spec: ModelSpec) -> ModelParts:
        """Build the whole model, whose weights have shapes alone."""
        blocks = nn.ModuleList(self.unfilled_part(spec, f"blocks.{index}") for index in range(self.num_blocks(spec)))
        embedding, head = self.unfilled_part(spec, "embedding"), self.unfilled_part(spec, "head")
        return ModelParts(spec, embedding, blocks, head, self.mask_form)

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
        """Turn the padding mask into the blocks' second argument: bool [B, 1, 1, T]; None when nothing is padded."""
        del dtype
        return padding_mask(mask_BT)

    def tied(self, spec: ModelSpec) -> dict[str, str]:
        """Return the matrices that the head reads from the embedding: the head's name and the embedding's of each."""
        del spec
        return {}

    def num_blocks(self, spec: ModelSpec) -> int:
        """Return L, the number of TEBs."""
        return int(spec.config["encoder_layers"])

    def width(self, spec: ModelSpec) -> int:
        """Return D, the model width."""
        return int(spec.config["width"])

    def carried_examples(self, spec: ModelSpec) -> int:
        """Return the number of examples that travel beside a micro-batch's own, for all TEBs to read; mostly 0."""
        del spec
        return 0

    def max_length(self, spec: ModelSpec) -> int | None:
        """Return the longest sequence that a model has positions for; None: any length."""
        return int(spec.config["max_length"])

    def num_classes(self, spec: ModelSpec) -> int:
        """Return the number of labels that a model tells apart: tokens that it writes, or classes."""
        return int(spec.config["num_labels" if spec.head in CLASSIFIERS else "vocab_size"])

    def settings(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the configuration with its defaults."""
        return spec.config
