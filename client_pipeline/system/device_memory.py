"""What a device needs at its peak under a plan: weights, states, and the activations that its schedule keeps.

gamma_0 times the TEBs (C7) is the part that grows with them, for a batch of which GPipe keeps everything. A device has
some memory beside it, however many TEBs it holds: what one pass needs for a moment, the gradients that its receives
wait for, and its outputs. Under a plan all of that is known to the byte, but for the allocator's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TebMemory:
    """What TEBs of a model need on a device [byte]; ``sample`` is of one sample of the planned length."""

    held_bytes: float
    """One TEB at rest: its weights as they are held, gradients and optimizer states of those that are trained."""
    saved_sample_bytes: float
    """One TEB, kept from a forward pass for the backward one."""
    activation_sample_bytes: float
    """What goes from segment to segment."""
    pass_bytes: float
    """One pass, for a moment, however many samples it has: a matrix brought back, a gradient to be added."""
    pass_sample_bytes: float
    """One pass, for a moment."""

    def block_memory(self, batch_size: int) -> float:
        """gamma_0 [byte]: one TEB that keeps the activations of a batch, as GPipe does."""
        return self.held_bytes + batch_size * self.saved_sample_bytes

    def device_memory(self, batch_size: int) -> float:
        """Most that a device needs beside its TEBs under any plan [byte]: under that of one micro-batch."""
        return self.pass_bytes + batch_size * (self.pass_sample_bytes + 2 * self.activation_sample_bytes)

    def stage_peak(self, num_blocks: int, num_held: int, sizes: Sequence[int]) -> float:
        """Peak of one stage [byte].

        Parameters
        ----------
        num_blocks : TEBs of the stage
        num_held : micro-batches that it holds at once, :func:`client_pipeline.runtime.schedules.held_micro_batches`
        sizes : samples of each micro-batch, the largest first
        """
        stored_bytes = sum(sizes[:num_held]) * (num_blocks * self.saved_sample_bytes + self.activation_sample_bytes)
        moment_bytes = self.pass_bytes + sizes[0] * self.pass_sample_bytes
        # All receives of gradients are posted before the step begins.
        posted_bytes = sum(sizes) * self.activation_sample_bytes
        return num_blocks * self.held_bytes + stored_bytes + moment_bytes + posted_bytes
