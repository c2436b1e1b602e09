"""One cluster in a round of the decoder: its micro-batches, its progress, and the checks on both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Size, Tensor

from client_pipeline.link.tied import TiedRows
from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.partition.parts import target_weight
from client_pipeline.runtime.stage.decoder_update import Contribution

MOST_BEGINNINGS = 64
"""Most beginnings of a step. Each lost device begins it again, and the decoder computes it anew."""


class Refusal(ValueError):
    """Refusal of a CU's request; the message gives the reason and goes back to the CU."""


class NotFiniteRefusal(Refusal):
    """Refusal of a CU's tensor that holds NaN or Inf, or leads to them."""


class Superseded(Exception):  # noqa: N818
    """Refusal of a stream whose cluster has opened another one since."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Activations and targets of one micro-batch, as a cluster sent them."""

    step: StepId
    micro_batch: int
    """Index within the step, from 0."""
    num_micro_batches: int
    """m of this step."""
    weight: float
    """Target tokens or samples in it."""
    total_weight: float | None
    """W_n of the whole step; on its first micro-batch only."""
    hidden_BTD: Tensor
    mask_BT: Tensor
    targets: Mapping[str, Tensor]
    """By name; none where labels stay in the clusters."""
    attempt: int = 0
    """Number of times that the cluster has begun the step before."""


@dataclass(frozen=True, kw_only=True)
class ClusterSummary:
    """Contribution of one cluster to the decoder in a round."""

    steps: int
    """Steps that counted."""
    weight: float
    """Sum of their total weights W_n."""
    loss: float
    """Mean loss per target over these steps; NaN without any."""
    departure: str | None
    """Reason of a departure before the goodbye; None without one."""


class StepProgress:
    """Progress of a cluster's step in its present attempt."""

    def __init__(self, shapes: Mapping[str, Size]) -> None:
        self.rows = TiedRows(shapes)
        """Received rows of the tied matrices that the step computes with."""
        self.next_forward = 0
        """Next micro-batch that comes."""
        self.next_micro_batch = 0
        """Next one whose gradient is given; the same, but where labels stay in the clusters."""
        self.num_micro_batches = 0
        """m; 0 before the first micro-batch."""
        self.weight = 0.0
        """W_n, as the first micro-batch announced it."""
        self.seen_weight = 0.0
        """Sum of the weights of the micro-batches so far."""
        self.loss_sum = 0.0


class Member:
    """State of one cluster in a round of the decoder. Threads that share it must hold a lock.

    Parameters
    ----------
    cluster : its index
    local_steps : steps of the round
    tied : the round's values of the tied matrices
    """

    def __init__(self, cluster: int, local_steps: int, tied: Mapping[str, Tensor] | None = None) -> None:
        self.cluster = cluster
        self.seat = 0
        """Number of its newest stream."""
        self.away_since: float | None = None
        """Time at which its stream was cut [s, monotonic]; None while the stream is open."""
        self.heard_at = 0.0
        """Time of its last action [s, monotonic]."""
        self.gone_at = 0.0
        """Time at which it finished or left [s, monotonic]."""
        self.silent = False
        """True if it left because nothing came from it in time."""
        self.local_steps = local_steps
        self.tied = dict(tied or {})
        """Values of the tied matrices that this cluster's step computes with; at first the round's."""
        self._shapes = {name: value.shape for name, value in self.tied.items()}
        self.joined = False
        self.finished = False
        self.departure: str | None = None
        self.step = 1
        self.attempt = 0
        self.beginnings = 1
        """Number of beginnings of the step in progress, whatever numbers its attempts carry."""
        self.closed: Contribution | None = None
        """Share of the step in progress, once it is closed and waits for the others; None before."""
        self.steps, self.weight, self.loss_sum = 0, 0.0, 0.0
        self.progress = StepProgress(self._shapes)

    # Joining and leaving.

    @property
    def gone(self) -> bool:
        """True if the cluster has finished or left."""
        return self.finished or self.departure is not None

    def come_back(self, seat: int) -> None:
        """Go on with another stream; a step that was not closed begins anew."""
        self.seat, self.away_since = seat, None
        if self.closed is None and not self.finished:
            self.progress = StepProgress(self._shapes)

    def finish(self, now: float) -> None:
        """Note the cluster's goodbye; refuse one in the middle of a step."""
        if self.progress.next_forward:
            raise Refusal(f"goodbye before step {self.step} was closed")
        self.finished, self.gone_at = True, now

    def leave(self, reason: str, now: float, *, silent: bool = False) -> None:
        """Note that the cluster has left the round; ``silent``: because nothing came from it in time."""
        self.departure, self.gone_at, self.silent = reason, now, silent

    # Steps.

    def count_step(self) -> None:
        """Note that the decoder took the step in progress."""
        self.step += 1
        self.attempt = 0
        self.beginnings = 1
        self.closed = None
        self.steps += 1
        self.weight += self.progress.weight
        self.loss_sum += self.progress.loss_sum
        self.progress = StepProgress(self._shapes)

    def count_forward(self, batch: MicroBatch, total_weight: float) -> None:
        """Note a micro-batch of the step in progress that has passed the decoder."""
        progress = self.progress
        progress.weight, progress.num_micro_batches = total_weight, batch.num_micro_batches
        progress.next_forward += 1
        progress.seen_weight += batch.weight

    def count_gradient(self, loss_sum: float) -> None:
        """Note a micro-batch whose gradient the decoder has computed."""
        self.progress.next_micro_batch += 1
        self.progress.loss_sum += loss_sum

    def summary(self) -> ClusterSummary:
        """Sum up the steps that counted."""
        loss = self.loss_sum / self.weight if self.weight else math.nan
        return ClusterSummary(steps=self.steps, weight=self.weight, loss=loss, departure=self.departure)

    def check_order(self, batch: MicroBatch) -> None:
        """Refuse a micro-batch that is not the next one."""
        step = batch.step.step
        if step > self.local_steps:
            raise Refusal(f"a round has local-steps = {self.local_steps}, found step {step}")
        if step != self.step or self.closed is not None:
            raise Refusal(f"expected step {self.step}, found step {step}")
        if batch.micro_batch != self.progress.next_forward:
            raise Refusal(f"expected micro-batch {self.progress.next_forward}, found {batch.micro_batch}")
        first = batch.micro_batch == 0
        if batch.num_micro_batches != (self.progress.num_micro_batches or batch.num_micro_batches):
            raise Refusal(f"expected {self.progress.num_micro_batches} micro-batches, found {batch.num_micro_batches}")
        if batch.micro_batch >= batch.num_micro_batches:
            raise Refusal(f"expected {batch.num_micro_batches} micro-batches, found one more")
        if first != (batch.total_weight is not None) or (batch.total_weight is not None and batch.total_weight <= 0):
            raise Refusal(
                "only the first micro-batch of a step carries the total weight, above 0; "
                f"found {batch.total_weight} on micro-batch {batch.micro_batch}"
            )

    def check_waiting(self, step: int, micro_batch: int) -> None:
        """Refuse the gradient of states that were not given, or are not the next ones."""
        progress = self.progress
        if step != self.step or self.closed is not None:
            raise Refusal(f"expected a gradient of states of step {self.step}, found one of step {step}")
        if micro_batch != progress.next_micro_batch or micro_batch >= progress.next_forward:
            raise Refusal(
                f"expected the gradient of the states of micro-batch {progress.next_micro_batch}, of "
                f"{progress.next_forward} that were given, found that of {micro_batch}"
            )

    def begin_again(self, step: int, attempt: int) -> bool:
        """Restart the step in progress if the cluster begins it again; returns whether it does."""
        if step != self.step or attempt <= self.attempt or self.closed is not None:
            return False
        self.beginnings += 1
        if self.beginnings > MOST_BEGINNINGS:
            raise Refusal(f"step {step} was begun more than {MOST_BEGINNINGS} times")
        self.attempt = attempt
        self.progress = StepProgress(self._shapes)
        return True

    def take_tied(self, step: int, name: str, start: int, rows: Tensor) -> None:
        """Take rows of a tied matrix, before the first micro-batch of a step; refuse them at any other time."""
        if step != self.step or self.closed is not None:
            raise Refusal(f"tied matrix {name}: expected one of step {self.step}, found one of step {step}")
        if step == 1 or self.progress.next_forward:
            when = "a round's first step trains with the round's own" if step == 1 else "the step has begun"
            raise Refusal(f"tied matrix {name}: not expected in step {step}, {when}")
        try:
            self.progress.rows.add(name, start, rows)
        except ValueError as error:
            raise Refusal(str(error)) from None

    def tied_of_step(self) -> dict[str, Tensor]:
        """Return the tied matrices of the step in progress; refuse a step whose matrices are incomplete."""
        if self.step > 1:
            rows = self.progress.rows
            if rows.missing is not None:
                raise Refusal(f"tied matrix {rows.missing}: step {self.step} began before it had come in full")
            self.tied = rows.values
        return self.tied

    def check_complete(self, step: int, scale: float) -> None:
        """Refuse to close a step that is not the one in progress, or not complete."""
        if step != self.step or self.closed is not None:
            raise Refusal(f"expected the end of step {self.step}, found that of step {step}")
        progress = self.progress
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
        With the name of the tensor, and the expected and found values.
    """
    if batch.targets and batch.weight != target_weight(batch.targets):
        raise Refusal(f"weight: expected {target_weight(batch.targets)} as the labels say, found {batch.weight:g}")
    if batch.weight > (most := int((batch.mask_BT != 0).sum())) and not batch.targets:
        raise Refusal(f"weight: expected at most the {most} real tokens of the mask, found {batch.weight:g}")
    if not is_finite(batch.hidden_BTD):
        raise NotFiniteRefusal(f"hidden: micro-batch {batch.micro_batch} holds NaN or Inf: training diverged on the CU")


def is_finite(tensor: Tensor) -> bool:
    """Return whether a non-empty tensor holds neither NaN nor Inf; one pass, as NaN is both least and largest."""
    low, high = tensor.aminmax()
    return math.isfinite(low) and math.isfinite(high)
