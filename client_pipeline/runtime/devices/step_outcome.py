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
    """Activations and gradients that went over each link between two stages."""
    decoder_norm_sq: float | None
    """Squared norm of the decoder's gradient, from the decoder."""
    segments: list[Segment]
    """Segments that it ran on."""
    sizes: list[int] = field(default_factory=list)
    """Examples of each micro-batch, of all batches one after the other."""
    exchange: list[ExchangeTimes] = field(default_factory=list)
    """Times of each micro-batch at the control unit."""

    def __add__(self, later: StepOutcome) -> StepOutcome:
        """Join it with that of the step's next batch; norms are of all that was accumulated until then."""
        devices = {
            device: StepReport(
                actions=report.actions + later.devices[device].actions,
                norm_sq=later.devices[device].norm_sq,
                work=report.work + later.devices[device].work,
            )
            for device, report in self.devices.items()
        }
        return StepOutcome(
            loss_sum=self.loss_sum + later.loss_sum,
            weight=self.weight + later.weight,
            devices=devices,
            link_bytes=self.link_bytes + later.link_bytes,
            decoder_norm_sq=later.decoder_norm_sq,
            segments=later.segments,
            sizes=self.sizes + later.sizes,
            exchange=self.exchange + later.exchange,
        )
