"""Result of one local step of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from client_pipeline.partition.plan import Segment
from client_pipeline.runtime.devices.batch_run import ExchangeTimes
from client_pipeline.runtime.devices.device import StepReport


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """Result of one local step of a cluster."""

    loss_sum: float
    weight: int
    """W_n: targets that carry a loss."""
    devices: dict[int, StepReport]
    """Reports by device index."""
    link_bytes: int
    """Activations and gradients that went over the links between the devices, all links together."""
    decoder_norm_sq: float | None
    """Squared norm of the decoder's gradient, from the decoder."""
    segments: list[Segment]
    """Segments that it ran on."""
    sizes: list[int] = field(default_factory=list)
    """Examples of each micro-batch, of all batches one after the other."""
    exchange: list[ExchangeTimes] = field(default_factory=list)
    """Times of each micro-batch at the control unit."""
    recalled: int = 0
    """Micro-batches whose activations the server kept; the fields above are of the others."""

    @property
    def computed_share(self) -> float:
        """Share of the micro-batches that went through the devices."""
        return len(self.exchange) / max(len(self.exchange) + self.recalled, 1)

    def __add__(self, later: StepOutcome) -> StepOutcome:
        """Join it with that of the step's next batch; norms are of all that was accumulated until then."""
        # No device ran for a batch whose activations the server keeps.
        devices = self.devices | later.devices
        for device in self.devices.keys() & later.devices.keys():
            first, last = self.devices[device], later.devices[device]
            devices[device] = StepReport(
                actions=first.actions + last.actions, norm_sq=last.norm_sq, work=first.work + last.work
            )
        return StepOutcome(
            loss_sum=self.loss_sum + later.loss_sum,
            weight=self.weight + later.weight,
            devices=devices,
            link_bytes=self.link_bytes + later.link_bytes,
            decoder_norm_sq=later.decoder_norm_sq,
            segments=later.segments,
            sizes=self.sizes + later.sizes,
            exchange=self.exchange + later.exchange,
            recalled=self.recalled + later.recalled,
        )
