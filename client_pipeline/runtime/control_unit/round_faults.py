"""A control unit's records of the faults of one round: of its devices, of its stream, of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from client_pipeline.link.base import Cut, DecoderLink, LinkError, NotFiniteLink
from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime.control_unit import fault_files
from client_pipeline.runtime.transport.faults import FailedRound, FaultRecord, NotFinite, PipelineError

_HEARTBEAT_S = 0.5
"""Interval of a control unit's news to the server when nothing changes [s]."""


class RoundFaults:
    """Faults of the round in progress.

    Parameters
    ----------
    cluster : index of the cluster
    folder : folder where records outlive the control unit's process; None: nowhere
    lost_at : time at which the process before this one was lost [s since the epoch]; None if there was none
    """

    def __init__(self, cluster: int, folder: Path | None = None, lost_at: float | None = None) -> None:
        self.round = 0
        self.step = 0
        """Local step in progress; 0 before the first."""
        self.cluster, self._folder, self._lost_at = cluster, folder, lost_at
        self._closed: list[FaultRecord] = []
        """Records of faults that are over."""
        self._open: list[tuple[FaultRecord, float]] = []
        """Records of the other faults, each with the time at which it began [s, monotonic]."""
        self._link: DecoderLink | None = None
        """Link of the round in progress; None between rounds."""
        self._signs: Sequence[LifeSign] = ()
        """Devices that give no sign of life."""
        self._lasting: tuple[list[FaultRecord], list[tuple[int, str]]] = [], []
        """Records and life signs (without seconds) that the file holds."""
        self._keeping = threading.Lock()
        self._sent_news: tuple[object, ...] = ()
        self._sent_at, self._is_over = 0.0, False
        self._cut_s: list[float] = []
        """Duration of each cut of the round's link: from when it was noticed to the next finished micro-batch [s]."""

    @property
    def records(self) -> list[FaultRecord]:
        """Records of the round so far, without those of the stream."""
        return [*self._closed, *(record for record, _ in self._open)]

    def begin_round(self, round_: int) -> None:
        """Forget the round before."""
        self.round, self.step = round_, 0
        self._closed, self._open = [], []
        self._link, self._cut_s, self._signs = None, [], ()
        self._lasting, self._sent_news, self._is_over = ([], []), (), False
        fault_files.keep(self._folder, round_, [])

    def begin_link(self, link: DecoderLink) -> None:
        """Record the cuts of a link until the round ends."""
        self._link = link

    def begin_step(self, step: int) -> None:
        """Note that a local step begins."""
        self.step = step

    def open(self, kind: str, device: int | None, reason: str, began: float) -> None:
        """Record a fault that goes on until the next finished micro-batch.

        Parameters
        ----------
        kind, device, reason : fields of the :class:`FaultRecord`
        began : time at which the fault began [s, monotonic]
        """
        self._open.append((self._record(kind, device, reason), began))

    def close(self, kind: str, device: int | None, reason: str, seconds: float | None = None) -> None:
        """Record a fault that is over, as its fields say."""
        self._closed.append(replace(self._record(kind, device, reason), recovered=True, seconds=seconds))

    def add_bytes(self, num_bytes: int) -> None:
        """Add bytes that were put back to all open records."""
        self._open = [(replace(record, bytes=record.bytes + num_bytes), began) for record, began in self._open]

    def finished_micro_batch(self) -> None:
        """Close the open records: whatever was lost works again."""
        if self._lost_at is not None:
            self.close("joined", None, "the lost control unit is training again", time.time() - self._lost_at)
            self._lost_at = None
        now = time.monotonic()
        opened, self._open = self._open, []
        self._closed += [replace(record, recovered=True, seconds=now - began) for record, began in opened]
        self._cut_s += [now - cut.noticed for cut in self._mended()[len(self._cut_s) :]]

    def keep(self) -> None:
        """Write the records so far to a file: they outlive this process and are added to the round's."""
        # Three threads of a step come here.
        with self._keeping:
            records, signs = [*self.records, *self._cuts()], self._signs
            lasting = records, [(sign.device, sign.state) for sign in signs]
            if lasting != self._lasting:
                self._lasting = lasting
                fault_files.keep(self._folder, self.round, records, signs)

    def tell(self, signs: Sequence[LifeSign]) -> None:
        """Send news to the server: at once after a change, else as a heartbeat.

        Parameters
        ----------
        signs : devices that give no sign of life
        """
        self._signs = signs
        self.keep()
        if (link := self._link) is None or self._is_over:
            return
        faults, now = [record.to_dict() for record in self._lasting[0]], time.monotonic()
        content = (faults, [sign[:2] for sign in signs])
        if content != self._sent_news or now - self._sent_at >= _HEARTBEAT_S:
            self._sent_news, self._sent_at = content, now
            link.tell(ClusterNews(round=self.round, faults=faults, signs=signs).to_text())

    def tell_end(self) -> None:
        """Send the end of the cluster's round to the server, before the link is closed."""
        link, self._is_over = self._link, True
        if link is not None:
            link.tell(ClusterNews(round=self.round, is_over=True).to_text())

    def end_round(self, recovered: bool) -> list[FaultRecord]:
        """Return the round's records; those still open become ``recovered`` or not."""
        opened = [replace(record, recovered=recovered) for record, _ in self._open]
        records = [*self._closed, *opened, *self._cuts()]
        self._closed, self._open, self._link = [], [], None
        return records

    def failed_round(self, error: PipelineError | LinkError) -> FailedRound:
        """Return the failure of a round that ``error`` ended; at least one record is not recovered."""
        faults = self.end_round(recovered=False)
        if all(fault.recovered for fault in faults):
            kind = "nan" if isinstance(error, NotFinite | NotFiniteLink) else "cluster"
            faults.append(self._record(kind, None, str(error).splitlines()[0][:300]))
        return FailedRound(str(error), [fault.to_dict() for fault in faults])

    def _record(self, kind: str, device: int | None, reason: str) -> FaultRecord:
        return FaultRecord(
            kind=kind,
            cluster=self.cluster,
            device=device,
            round=self.round,
            step=self.step,
            recovered=False,
            reason=reason,
        )

    def _mended(self) -> Sequence[Cut]:
        return () if self._link is None else self._link.cuts

    def _cuts(self) -> list[FaultRecord]:
        return [
            FaultRecord(
                kind="stream",
                cluster=self.cluster,
                round=self.round,
                recovered=True,
                seconds=self._cut_s[i] if i < len(self._cut_s) else None,
                bytes=cut.resent_bytes,
                reason="the stream to the decoder was cut and reopened",
            )
            for i, cut in enumerate(self._mended())
        ]
