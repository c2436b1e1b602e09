"""What a control unit needs of the decoder, wherever it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from client_pipeline.partition.micro_batches import StepId


class LinkError(RuntimeError):
    """The decoder refused, closed or was too late; the message says who and why."""


class NotFiniteLink(LinkError):
    """The decoder refused activations or a loss that hold NaN or Inf."""


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The decoder's answer to one micro-batch."""

    micro_batch: int
    tensor: Tensor
    """Gradient of loss_sum / W_n with respect to the activations, [B, T, D]."""
    loss_sum: float
    norm_sq: float | None = None
    """Squared norm of the decoder's gradient g_n; on the last micro-batch of a step only."""


class Cut(NamedTuple):
    """A cut of a link that was mended."""

    noticed: float
    """When it was noticed [s, ``time.monotonic``]."""
    seconds: float
    """Until the link was there again [s]."""
    resent_bytes: int
    """Bytes that were sent again; they are in no other count."""


class DecoderLink(Protocol):
    """One local step: ``begin_step``, m times ``send``, m times ``receive`` in the same order, ``end_step``.

    With tied matrices also ``send_tied`` after ``begin_step``, and ``receive_tied`` after the last ``receive``.

    ``send`` and ``receive`` are called from two threads. No call waits without a bound: each raises
    :class:`LinkError` at the link's timeout.
    """

    @property
    def is_remote(self) -> bool:
        """Whether it goes over a network, which can be cut."""
        ...

    @property
    def cuts(self) -> Sequence[Cut]:
        """Cuts that were mended so far, oldest first; none without a network."""
        ...

    @property
    def bytes_up(self) -> int:
        """Bytes that have gone to the decoder over a network."""
        ...

    @property
    def bytes_down(self) -> int:
        """Bytes that have come from it."""
        ...

    @property
    def payload_up(self) -> int:
        """Bytes of ``bytes_up`` that are tensors', without headers."""
        ...

    @property
    def payload_down(self) -> int:
        """Bytes of ``bytes_down`` that are tensors', without headers."""
        ...

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """Announce a step with the batch's total weight W_n."""
        ...

    def send_tied(self, tied: Mapping[str, Tensor]) -> None:
        """Give the cluster's current values of the tied matrices, by the head's own names; before the first send."""
        ...

    def receive_tied(self) -> dict[str, Tensor]:
        """Wait for the gradient of the tied matrices, of loss_sum / W_n over the whole step."""
        ...

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """Hand over the activations of one micro-batch."""
        ...

    def receive(self) -> Gradient:
        """Wait for the gradient of the next micro-batch."""
        ...

    def tell(self, news: str) -> None:
        """Tell the server what happens in the round, beside the steps; at once, or not at all. Never raises."""
        ...

    def drop_step(self) -> None:
        """Break off the step in progress, which may be begun again: its sums are forgotten, here and at the decoder.

        Whoever waits on the link gets a :class:`LinkError`. Never raises.
        """
        ...

    def end_step(self, scale: float) -> None:
        """Close the step with the clipping factor c; the decoder steps when all clusters have closed it."""
        ...

    def close(self) -> None:
        """End the round in good order."""
        ...

    def abort(self) -> None:
        """Break off: whoever waits on the link gets a :class:`LinkError`. Never raises."""
        ...

    def cut(self, for_s: float = 0.0) -> None:
        """Cut the link as a network would, and leave it so for a while [s]; without a network nothing happens."""
        ...


class ForwardingLink:
    """A link that hands everything on to another one; what is different on it overrides a method."""

    def __init__(self, link: DecoderLink) -> None:
        self.link = link

    @property
    def is_remote(self) -> bool:
        """See :class:`DecoderLink`."""
        return self.link.is_remote

    @property
    def cuts(self) -> Sequence[Cut]:
        """See :class:`DecoderLink`."""
        return self.link.cuts

    @property
    def bytes_up(self) -> int:
        """See :class:`DecoderLink`."""
        return self.link.bytes_up

    @property
    def bytes_down(self) -> int:
        """See :class:`DecoderLink`."""
        return self.link.bytes_down

    @property
    def payload_up(self) -> int:
        """See :class:`DecoderLink`."""
        return self.link.payload_up

    @property
    def payload_down(self) -> int:
        """See :class:`DecoderLink`."""
        return self.link.payload_down

    def begin_step(self, step: StepId, num_micro_batches: int, total_weight: float) -> None:
        """See :class:`DecoderLink`."""
        self.link.begin_step(step, num_micro_batches, total_weight)

    def send_tied(self, tied: Mapping[str, Tensor]) -> None:
        """See :class:`DecoderLink`."""
        self.link.send_tied(tied)

    def receive_tied(self) -> dict[str, Tensor]:
        """See :class:`DecoderLink`."""
        return self.link.receive_tied()

    def send(self, micro_batch: int, hidden_BTD: Tensor, mask_BT: Tensor, targets: Mapping[str, Tensor]) -> None:
        """See :class:`DecoderLink`."""
        self.link.send(micro_batch, hidden_BTD, mask_BT, targets)

    def receive(self) -> Gradient:
        """See :class:`DecoderLink`."""
        return self.link.receive()

    def tell(self, news: str) -> None:
        """See :class:`DecoderLink`."""
        self.link.tell(news)

    def drop_step(self) -> None:
        """See :class:`DecoderLink`."""
        self.link.drop_step()

    def end_step(self, scale: float) -> None:
        """See :class:`DecoderLink`."""
        self.link.end_step(scale)

    def close(self) -> None:
        """See :class:`DecoderLink`."""
        self.link.close()

    def abort(self) -> None:
        """See :class:`DecoderLink`."""
        self.link.abort()

    def cut(self, for_s: float = 0.0) -> None:
        """See :class:`DecoderLink`."""
        self.link.cut(for_s)
