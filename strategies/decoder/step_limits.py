"""What a cluster's frames may hold, from what is known of batches and model before a round begins.

Shapes are compared before anything is computed of them: a frame of some hundred bytes cannot cost more memory than
its own, and no cluster weighs more in Eq. (7) than its batch has positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from client_pipeline.link.activation_codec import ActivationCodec
from client_pipeline.partition.families import adapter, max_length, num_classes
from client_pipeline.partition.parts import IGNORED_LABEL
from client_pipeline.partition.spec import ModelSpec
from strategies.decoder.member import Refusal


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Most that one step of a cluster holds."""

    examples: int = 2**16
    """Examples of a step, over all its micro-batches; no step has more micro-batches, either."""
    length: int = 2**12
    """Positions of a sequence, source or target."""
    width: int | None = None
    """D, exactly; None: whatever the decoder takes."""
    classes: int | None = None
    """Labels are below it; None: whatever the decoder takes."""

    @classmethod
    def of(cls, spec: ModelSpec, examples: int, longest: int) -> StepLimits:
        """Return the limits of a model trained on batches of so many examples, cut to ``longest`` tokens."""
        positions = max_length(spec)
        return cls(
            examples=examples,
            length=longest if positions is None else min(longest, positions),
            width=adapter(spec.family).width(spec),
            classes=num_classes(spec),
        )

    @property
    def weight(self) -> int:
        """Most that a step may weigh: as if every position of every example carried a loss."""
        return self.examples * self.length

    def check(self, wire: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor], codec: ActivationCodec) -> None:
        """Refuse a micro-batch by its shapes, types and labels.

        Parameters
        ----------
        wire : activations as they travel: float32 [B, T, D], or bytes [B, T, row] of ``codec``
        mask_BT : padding mask
        targets : by name
        codec : how activations travel

        Raises
        ------
        Refusal
            Naming the tensor, what was expected and what was found.
        """
        dtype = codec.wire(tuple(wire.shape))[1]
        if wire.ndim != 3 or wire.dtype != dtype or 0 in wire.shape:
            kind = "floats [B, T, D]" if codec.name == "none" else f"bytes [B, T, row] of the codec {codec.name}"
            raise Refusal(f"hidden: expected {kind}, found {wire.dtype} {list(wire.shape)}")
        batch, length, row = wire.shape
        if batch > self.examples or length > self.length:
            raise Refusal(
                f"hidden: expected at most {self.examples} examples of at most {self.length} positions "
                f"(batch-size, data.max-length), found {batch} of {length}"
            )
        if self.width is not None and row != (self.width if codec.name == "none" else codec.row_bytes(self.width)):
            raise Refusal(f"hidden: expected the model's width {self.width}, found {list(wire.shape)} of {wire.dtype}")
        if mask_BT.dtype != torch.bool or mask_BT.shape != wire.shape[:2]:
            raise Refusal(f"mask: expected bool {[batch, length]}, found {mask_BT.dtype} {list(mask_BT.shape)}")
        if targets.keys() != {"labels"}:
            raise Refusal(f"targets: expected target.labels alone, found {len(targets)} with other names")
        self._check_labels(targets["labels"], batch)

    def check_weights(self, weight: float, total_weight: float | None, num_micro_batches: int) -> None:
        """Refuse a micro-batch that announces more than a step may be; ``total_weight`` is None but on its first."""
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
