"""A control unit's link to the decoder, wherever that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from client_pipeline.partition.dropout_seed import StepId


class LinkError(RuntimeError):
    """The decoder refused, closed or was too late; the message gives its address and the reason."""


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


@dataclass(frozen=True, kw_only=True)
class States:
    """The decoder's first answer to a micro-batch whose labels stay in the cluster."""

    micro_batch: int
    tensor: Tensor
    """States after the server's blocks, [B, T, D]."""


class Cut(NamedTuple):
    """A cut of a link that was mended."""

    noticed: float
    """Time at which it was noticed [s, ``time.monotonic``]."""
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

    is_remote: bool
    """True if it goes over a network, which can be cut."""
    bytes_up: int
    """Bytes sent to the decoder over a network."""
    bytes_down: int
    """Bytes received from the decoder."""
    payload_up: int
    """Bytes of ``bytes_up`` that are tensors', without headers."""
    payload_down: int
    """Bytes of ``bytes_down`` that are tensors', without headers."""

    @property
    def cuts(self) -> Sequence[Cut]:
        """Cuts that were mended so far, oldest first; none without a network."""
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

        Calls that wait on the link raise :class:`LinkError`. Never raises itself.
        """
        ...

    def end_step(self, scale: float) -> None:
        """Close the step with the clipping factor c; the decoder steps when all clusters have closed it."""
        ...

    def close(self) -> None:
        """End the round in good order."""
        ...

    def abort(self) -> None:
        """Break off: calls that wait on the link raise :class:`LinkError`. Never raises itself."""
        ...

    def cut(self, for_s: float = 0.0) -> None:
        """Cut the link as a network would, and leave it so for a while [s]; without a network nothing happens."""
        ...


class KeepingLink(DecoderLink, Protocol):
    """A link to a server that keeps activations."""

    def name_examples(self, micro_batch: int, names: Sequence[str]) -> None:
        """Name the examples of a micro-batch that will be sent, for a server that keeps their activations."""
        ...

    def recall(self, micro_batch: int, names: Sequence[str], weight: float) -> None:
        """Have the server take one micro-batch, of a weight, of examples that it keeps."""
        ...

    def receive_loss(self) -> tuple[int, float, float | None]:
        """Wait for number, loss_sum and norm_sq of the next micro-batch, whose activations the server keeps."""
        ...


class ForwardingLink:
    """A link that hands everything on to another one; a subclass overrides what differs."""

    def __init__(self, link: DecoderLink) -> None:
        self.link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)
