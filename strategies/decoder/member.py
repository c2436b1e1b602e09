"""One cluster in a round of the decoder: what it sends, where it is, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Size, Tensor

from client_pipeline.link.tied import TiedRows
from client_pipeline.partition.micro_batches import StepId
from client_pipeline.partition.parts import target_weight

MOST_BEGINNINGS = 64
"""A step is begun again for each device that is lost in it; without end it would keep the decoder computing."""


class Refusal(ValueError):
    """What a CU asked cannot be done; the message says why and goes back to the CU."""


class NotFiniteRefusal(Refusal):
    """What a CU sent, or what came of it, holds NaN or Inf."""


class Superseded(Exception):  # noqa: N818
    """A stream acts for a cluster that has opened another one since."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Activations and targets of one micro-batch, as a cluster sent them."""

    step: StepId
    micro_batch: int
    """From 0."""
    num_micro_batches: int
    """m of this step."""
    weight: float
    """Target tokens or samples in it."""
    total_weight: float | None
    """W_n of the whole step; on its first micro-batch only."""
    hidden_BTD: Tensor
    mask_BT: Tensor
    targets: Mapping[str, Tensor]
    attempt: int = 0
    """How often the cluster has begun the step before."""


@dataclass(frozen=True, kw_only=True)
class ClusterSummary:
    """What one cluster contributed to the decoder in a round."""

    steps: int
    """Steps that counted."""
    weight: float
    """Sum of their total weights W_n."""
    loss: float
    """Mean loss per target over these steps; NaN without any."""
    departure: str | None
    """Why it left before its goodbye; None if it did not."""


class StepProgress:
    """What has come of a cluster's step in progress, in its present attempt."""

    def __init__(self, shapes: Mapping[str, Size]) -> None:
        self.rows = TiedRows(shapes)
        """Of the tied matrices that the step computes with."""
        self.next_micro_batch = 0
        self.num_micro_batches = 0
        """m; 0 before the first micro-batch."""
        self.weight = 0.0
        """W_n, as the first micro-batch announced it."""
        self.seen_weight = 0.0
        """Of the micro-batches so far."""
        self.loss_sum = 0.0

    def count(self, batch: MicroBatch, total_weight: float, loss_sum: float) -> None:
        """Note a micro-batch that the decoder has computed."""
        self.weight = total_weight
        self.num_micro_batches = batch.num_micro_batches
        self.next_micro_batch += 1
        self.seen_weight += batch.weight
        self.loss_sum += loss_sum


class Member:
    """Where one cluster is in a round of the decoder. Whoever shares it between threads holds a lock.

    Parameters
    ----------
    cluster : its index
    local_steps : of the round
    tied : the round's values of the tied matrices
    """

    def __init__(self, cluster: int, local_steps: int, tied: Mapping[str, Tensor] | None = None) -> None:
        self.cluster = cluster
        self.seat = 0
        """Number of its newest stream."""
        self.away_since: float | None = None
        """When its stream was cut [s, monotonic]; None while it is there."""
        self.heard_at = 0.0
        """When it last did something [s, monotonic]."""
        self.gone_at = 0.0
        """When it finished or left [s, monotonic]."""
        self.silent = False
        """Whether it left because nothing came from it in time."""
        self.local_steps = local_steps
        self.tied = dict(tied or {})
        """Values of the tied matrices that this cluster's step computes with: at first those of the round."""
        self._shapes = {name: value.shape for name, value in self.tied.items()}
        self.joined = False
        self.finished = False
        self.departure: str | None = None
        self.step = 1
        self.attempt = 0
        self.beginnings = 1
        """Of the step in progress, whatever its attempts are called."""
        self.steps, self.weight, self.loss_sum = 0, 0.0, 0.0
        self._progress = StepProgress(self._shapes)

    # Coming and going.

    @property
    def gone(self) -> bool:
        """Whether nothing more is to come from it."""
        return self.finished or self.departure is not None

    def hear(self, now: float) -> None:
        """Note that something has come from it."""
        self.heard_at = now

    def join(self) -> None:
        """Note its hello."""
        self.joined = True

    def come_back(self, seat: int, *, closed: bool) -> None:
        """Go on with another stream; a step that was not ``closed`` is begun anew."""
        self.seat, self.away_since = seat, None
        if not closed and not self.finished:
            self._progress = StepProgress(self._shapes)

    def go_away(self, now: float) -> None:
        """Note that its stream was cut."""
        self.away_since = now

    def finish(self, now: float) -> None:
        """Note its goodbye; refuse one in the middle of a step."""
        if self._progress.next_micro_batch:
            raise Refusal(f"goodbye before step {self.step} was closed")
        self.finished, self.gone_at = True, now

    def leave(self, reason: str, now: float, *, silent: bool = False) -> None:
        """Note that it is out of the round; ``silent``: as nothing came from it."""
        self.departure, self.gone_at, self.silent = reason, now, silent

    # Steps.

    def count_step(self) -> None:
        """Note that the decoder took the step in progress."""
        self.step += 1
        self.attempt = 0
        self.beginnings = 1
        self.steps += 1
        self.weight += self._progress.weight
        self.loss_sum += self._progress.loss_sum
        self._progress = StepProgress(self._shapes)

    @property
    def step_weight(self) -> float:
        """W_n of the step in progress, as it was announced."""
        return self._progress.weight

    def total_weight(self, batch: MicroBatch) -> float:
        """W_n of a micro-batch's step: as it says, or as the first one of the step has said."""
        return batch.total_weight or self._progress.weight

    def count_micro_batch(self, batch: MicroBatch, total_weight: float, loss_sum: float) -> None:
        """Note a micro-batch of the step in progress that the decoder has computed."""
        self._progress.count(batch, total_weight, loss_sum)

    def summary(self) -> ClusterSummary:
        """Sum up the steps that counted."""
        loss = self.loss_sum / self.weight if self.weight else math.nan
        return ClusterSummary(steps=self.steps, weight=self.weight, loss=loss, departure=self.departure)

    def check_order(self, batch: MicroBatch, is_closed: bool) -> None:
        """Refuse a micro-batch that is not the next one; ``is_closed``: the step in progress is closed already."""
        step = batch.step.step
        if step > self.local_steps:
            raise Refusal(f"a round has local-steps = {self.local_steps}, found step {step}")
        if step != self.step or is_closed:
            raise Refusal(f"expected step {self.step}, found step {step}")
        if batch.micro_batch != self._progress.next_micro_batch:
            raise Refusal(f"expected micro-batch {self._progress.next_micro_batch}, found {batch.micro_batch}")
        first = batch.micro_batch == 0
        if batch.num_micro_batches != (self._progress.num_micro_batches or batch.num_micro_batches):
            raise Refusal(f"expected {self._progress.num_micro_batches} micro-batches, found {batch.num_micro_batches}")
        if batch.micro_batch >= batch.num_micro_batches:
            raise Refusal(f"expected {batch.num_micro_batches} micro-batches, found one more")
        if first != (batch.total_weight is not None) or (batch.total_weight is not None and batch.total_weight <= 0):
            raise Refusal(
                "only the first micro-batch of a step carries the total weight, above 0; "
                f"found {batch.total_weight} on micro-batch {batch.micro_batch}"
            )

    def begin_again(self, step: int, attempt: int, is_closed: bool) -> bool:
        """Whether the cluster has dropped the step in progress and begins it once more; then forget what has come."""
        if step != self.step or attempt <= self.attempt or is_closed:
            return False
        self.beginnings += 1
        if self.beginnings > MOST_BEGINNINGS:
            raise Refusal(f"step {step} was begun more than {MOST_BEGINNINGS} times")
        self.attempt = attempt
        self._progress = StepProgress(self._shapes)
        return True

    def take_tied(self, step: int, name: str, start: int, rows: Tensor, is_closed: bool) -> None:
        """Take rows of a tied matrix, before the first micro-batch of a step; refuse them at any other time."""
        if step != self.step or is_closed:
            raise Refusal(f"tied matrix {name}: expected one of step {self.step}, found one of step {step}")
        if step == 1 or self._progress.next_micro_batch:
            when = "a round's first step trains with the round's own" if step == 1 else "the step has begun"
            raise Refusal(f"tied matrix {name}: not expected in step {step}, {when}")
        try:
            self._progress.rows.add(name, start, rows)
        except ValueError as error:
            raise Refusal(str(error)) from None

    def tied_of_step(self) -> dict[str, Tensor]:
        """The tied matrices of the step in progress; refuses a step whose matrices have not all come."""
        if self.step > 1:
            rows = self._progress.rows
            if rows.missing is not None:
                raise Refusal(f"tied matrix {rows.missing}: step {self.step} began before it had come in full")
            self.tied = rows.values
        return self.tied

    def check_complete(self, step: int, scale: float, is_closed: bool) -> None:
        """Refuse to close a step that is not the one in progress, or not complete."""
        if step != self.step or is_closed:
            raise Refusal(f"expected the end of step {self.step}, found that of step {step}")
        progress = self._progress
        if not progress.num_micro_batches or progress.next_micro_batch != progress.num_micro_batches:
            raise Refusal(
                f"step {step} ended after {progress.next_micro_batch} of {progress.num_micro_batches} micro-batches"
            )
        if not math.isclose(progress.seen_weight, progress.weight, rel_tol=1e-6):
            raise Refusal(
                f"step {step}: the micro-batches weigh {progress.seen_weight:g}, announced were {progress.weight:g}"
            )
        if not 0 <= scale <= 1:
            raise Refusal(f"step {step}: expected a clipping factor in [0, 1], found {scale}")


def check_values(batch: MicroBatch) -> None:
    """Refuse activations that are not finite, and a weight that the labels do not have.

    Raises
    ------
    Refusal
        Naming the tensor, and what was expected and found.
    """
    if batch.weight != target_weight(batch.targets):
        raise Refusal(f"weight: expected {target_weight(batch.targets)} as the labels say, found {batch.weight:g}")
    if not is_finite(batch.hidden_BTD):
        raise NotFiniteRefusal(f"hidden: micro-batch {batch.micro_batch} holds NaN or Inf: training diverged on the CU")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor that is not empty holds neither NaN nor Inf; one pass, as NaN is both least and largest."""
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)
