"""Limits on a cluster's frames, from the batches and the model, known before a round begins.

Shapes are compared before any computation, so that a frame of some hundred bytes costs no more memory than its own.
No cluster weighs more in Eq. (7) than its batch has positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.families.families import max_length
from client_pipeline.families.registry import family_named
from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.partition.packed_mask import PACKED
from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.partition.spec import ModelSpec
from strategies.decoder.member import Refusal


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Upper limits of one step of a cluster."""

    examples: int = 2**16
    """Examples of a step, over all its micro-batches; no step has more micro-batches, either."""
    length: int = 2**12
    """Positions of a sequence, source or target."""
    width: int | None = None
    """Width D, exactly; None: any that the decoder takes."""
    are_packed: bool = False
    """Sequences may have several examples each, which the mask numbers."""
    classes: int | None = None
    """Number of classes, above every label; None: any that the decoder takes."""

    @classmethod
    def of(cls, spec: ModelSpec, examples: int, longest: int, are_packed: bool = False) -> StepLimits:
        """Return the limits of a model trained on batches of so many examples, cut to ``longest`` tokens."""
        positions = max_length(spec)
        return cls(
            examples=examples,
            length=longest if positions is None else min(longest, positions),
            are_packed=are_packed,
            width=family_named(spec.family).width(spec),
            classes=family_named(spec.family).num_classes(spec),
        )

    @property
    def weight(self) -> int:
        """Largest weight of a step: every position of every example carries a loss."""
        return self.examples * self.length

    def check(self, wire: Tensor, mask_BT: Tensor, codec: ActivationCodec) -> None:
        """Refuse the activations and the mask of a micro-batch by their shapes and types.

        Parameters
        ----------
        wire : activations as they travel: float32 [B, T, D], or bytes [B, T, row] of ``codec``
        mask_BT : padding mask, or packed mask
        codec : how activations travel

        Raises
        ------
        Refusal
            With the name of the tensor, and the expected and found values.
        """
        self.check_wire("hidden", wire, codec)
        kind, of_mask = ("int16", PACKED) if self.are_packed else ("bool", torch.bool)
        if mask_BT.dtype != of_mask or mask_BT.shape != wire.shape[:2]:
            raise Refusal(f"mask: expected {kind} {list(wire.shape[:2])}, found {mask_BT.dtype} {list(mask_BT.shape)}")

    def check_wire(self, name: str, wire: Tensor, codec: ActivationCodec) -> None:
        """Refuse activations, or a gradient of states, by shape and type; arguments and errors are those above."""
        dtype = codec.wire(tuple(wire.shape))[1]
        if wire.ndim != 3 or wire.dtype != dtype or 0 in wire.shape:
            kind = "floats [B, T, D]" if codec.name == "none" else f"bytes [B, T, row] of the codec {codec.name}"
            raise Refusal(f"{name}: expected {kind}, found {wire.dtype} {list(wire.shape)}")
        batch, length, row = wire.shape
        if batch > self.examples or length > self.length:
            raise Refusal(
                f"{name}: expected at most {self.examples} examples of at most {self.length} positions "
                f"(batch-size, data.max-length), found {batch} of {length}"
            )
        if self.width is not None and row != (self.width if codec.name == "none" else codec.row_bytes(self.width)):
            raise Refusal(f"{name}: expected the model's width {self.width}, found {list(wire.shape)} of {wire.dtype}")

    def check_targets(self, targets: Mapping[str, Tensor], batch: int) -> None:
        """Refuse targets of so many examples by their names, shapes, types and values; errors are those above."""
        if targets.keys() != {"labels"}:
            raise Refusal(f"targets: expected target.labels alone, found {len(targets)} with other names")
        self._check_labels(targets["labels"], batch)

    def check_weights(self, weight: float, total_weight: float | None, num_micro_batches: int) -> None:
        """Refuse a micro-batch that announces more than a step may hold; only a step's first has ``total_weight``."""
        if max(weight, total_weight or 0.0) > self.weight:
            raise Refusal(
                f"weight: a step weighs at most {self.weight}, its examples times data.max-length; found {weight:g} of "
                f"{total_weight or weight:g}"
            )
        if num_micro_batches > self.examples:
            raise Refusal(f"a step has at most {self.examples} micro-batches, as examples, found {num_micro_batches}")

    def check_examples(self, examples: int) -> None:
        """Refuse a step whose micro-batches, so far, have too many examples."""
        if examples > self.examples:
            raise Refusal(f"a step has at most {self.examples} examples, found {examples}")

    def _check_labels(self, labels: Tensor, batch: int) -> None:
        if labels.dtype != torch.int64:
            raise Refusal(f"target.labels: expected int64 labels, found {labels.dtype}")
        if labels.ndim not in (1, 2) or len(labels) != batch or 0 in labels.shape:
            raise Refusal(f"target.labels: expected {batch} examples, found shape {list(labels.shape)}")
        if labels.ndim == 2 and labels.shape[1] > self.length:
            raise Refusal(
                f"target.labels: expected at most {self.length} positions (data.max-length), found {labels.shape[1]}"
            )
        low, high = (int(value) for value in labels.aminmax())
        if self.classes is not None and high >= self.classes:
            raise Refusal(f"target.labels: expected labels below {self.classes}, found {high}")
        if low < 0 and bool(((labels < 0) & (labels != IGNORED_LABEL)).any()):
            raise Refusal(f"target.labels: expected labels from 0 on, or {IGNORED_LABEL}, found {low}")
