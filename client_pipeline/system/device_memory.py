"""Peak memory of a device under a plan: weights, states, and the activations that its schedule keeps.

gamma_0 times the TEBs (C7) is the part that grows with them, for a batch of which GPipe keeps everything. A device has
some memory beside it, however many TEBs it holds: what one pass needs for a moment, the gradients that its receives
wait for, and its outputs. Under a plan all of that is known to the byte, but for the allocator's own.

A device that recomputes keeps the inputs of its micro-batches, and the activations of one of them for a moment: while
that one is computed again, in its backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class HeldMicroBatches(NamedTuple):
    """Micro-batches of which a stage holds something at one moment, by what they wait for."""

    forwarded: int
    """Their forward pass is done."""
    in_backward: int
    """The one whose backward pass runs: 0 or 1."""
    weights_left: int
    """Their weight gradients were put off."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class TebMemory:
    """Memory of a model's TEBs on a device [byte]; ``sample`` is of one sample of the planned length."""

    held_bytes: float
    """One TEB at rest: its weights as they are held, gradients and optimizer states of those that are trained."""
    saved_sample_bytes: float
    """One TEB, kept from a forward pass for the backward one."""
    activation_sample_bytes: float
    """Activations that go from segment to segment."""
    pass_bytes: float
    """One pass, for a moment, however many samples it has: a matrix brought back, a gradient to be added."""
    pass_sample_bytes: float
    """One pass, for a moment."""
    kept_keys_sample_bytes: float = 0.0
    """Keys and values that two token slices of one TEB keep beside ``saved_sample_bytes``."""
    later_keys_sample_bytes: float = 0.0
    """Keys and values of one TEB, as token slices keep them for later ones; in the attention they may be more, where
    queries share heads."""
    waiting_share: float = 1.0
    """Share of ``saved_sample_bytes`` that waits for weight gradients that were put off."""
    recompute: bool = False
    """True if devices keep inputs alone, and compute the rest again (``runtime.recompute``)."""

    def block_memory(self, batch_size: int) -> float:
        """gamma_0 [byte]: one TEB that keeps the activations of a batch, as GPipe does.

        With recomputation, too: a batch in one micro-batch is computed again as a whole.
        """
        return self.held_bytes + batch_size * self.saved_sample_bytes

    def device_memory(self, batch_size: int) -> float:
        """Most that a device needs beside its TEBs under any plan [byte]: under that of one micro-batch."""
        return self.pass_bytes + batch_size * (self.pass_sample_bytes + 2 * self.activation_sample_bytes)

    def least_device_memory(self, batch_size: int, smallest: int) -> float:
        """Least that a device needs beside its TEBs [byte]: with one micro-batch of ``smallest`` samples at a time."""
        of_pass = smallest * (self.pass_sample_bytes + self.activation_sample_bytes)
        return self.pass_bytes + of_pass + batch_size * self.activation_sample_bytes

    def stage_held(
        self, num_blocks: int, moments: Sequence[HeldMicroBatches], sizes: Sequence[int], num_slices: int
    ) -> float:
        """Planned peak of what a stage counts as held, ``Stage.held_bytes`` [byte].

        Parameters
        ----------
        num_blocks : TEBs of the stage
        moments : of its schedule, :func:`client_pipeline.timetable.schedules.held_at_backward`
        sizes : samples of each micro-batch, the largest first
        num_slices : Q
        """
        saved = num_blocks * (self.saved_sample_bytes + self.kept_keys_sample_bytes * extra_keys(num_slices))
        if self.recompute:
            of_earlier = (num_slices - 1) / num_slices
            forwarded = self.activation_sample_bytes + num_blocks * of_earlier * self.later_keys_sample_bytes
            # Its last slice alone is there with all that it keeps, and has the keys of those before in its attention:
            # two slices keep half of these and half of what is for later ones.
            in_attention = 2 * self.kept_keys_sample_bytes - self.later_keys_sample_bytes
            again = num_blocks * (self.saved_sample_bytes / num_slices + of_earlier * in_attention)
            in_backward = forwarded - self.activation_sample_bytes / num_slices + again
        else:
            forwarded = in_backward = saved
        # Of a micro-batch that waits for its weight gradients nobody needs keys and values.
        sample_bytes = (forwarded, in_backward, num_blocks * self.waiting_share * self.saved_sample_bytes)
        stored_bytes = max(_stored_bytes(moment, sample_bytes, sizes) for moment in moments)
        return num_blocks * self.held_bytes + stored_bytes

    def stage_peak(
        self, num_blocks: int, moments: Sequence[HeldMicroBatches], sizes: Sequence[int], num_slices: int = 1
    ) -> float:
        """Planned peak of a stage with all that its process needs for it [byte]; see :meth:`stage_held`."""
        num_outputs = 1 if self.recompute else max(moment.total for moment in moments)
        output_bytes = sum(sizes[:num_outputs]) * self.activation_sample_bytes
        moment_bytes = self.pass_bytes + sizes[0] * self.pass_sample_bytes
        # All receives of gradients are posted before the step begins.
        posted_bytes = sum(sizes) * self.activation_sample_bytes
        held_bytes = self.stage_held(num_blocks, moments, sizes, num_slices)
        return held_bytes + output_bytes + moment_bytes + posted_bytes


def _stored_bytes(moment: HeldMicroBatches, sample_bytes: tuple[float, float, float], sizes: Sequence[int]) -> float:
    """Bytes of a moment's micro-batches: those that wait came first, and the first are the largest."""
    total, first = 0.0, 0
    for of_sample, number in zip(sample_bytes[::-1], moment[::-1], strict=True):
        total += of_sample * sum(sizes[first : first + number])
        first += number
    return total


def extra_keys(num_slices: int) -> float:
    """Return the copies that Q slices keep of a micro-batch's keys and values beside the whole one.

    In the attentions (Q + 1) / 2 times; and once, but for the last slice, which nobody comes after. Once for Q = 2.
    """
    return (num_slices - 1) / 2 + (num_slices - 1) / num_slices
