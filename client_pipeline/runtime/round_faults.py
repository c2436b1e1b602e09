"""A control unit's records of the faults of one round: of its devices, of its stream, of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from client_pipeline.link.base import Cut, DecoderLink, LinkError, NotFiniteLink
from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime import fault_files
from client_pipeline.runtime.faults import FailedRound, FaultRecord, NotFinite, PipelineError
from client_pipeline.runtime.recovery import Recovery

_HEARTBEAT_S = 0.5
"""How often the server hears of a control unit to which nothing happens [s]."""


class RoundFaults:
    """What went wrong in the round in progress.

    Parameters
    ----------
    recovery : has the records of devices
    cluster : whose they are
    folder : where records outlive the control unit's process
    lost_at : when the process before this one was lost [s since the epoch]; None if there was none
    """

    def __init__(self, recovery: Recovery, cluster: int, folder: Path | None, lost_at: float | None) -> None:
        self._link: DecoderLink | None = None
        """Link of the round in progress; None between rounds."""
        self._recovery, self._cluster, self._folder, self._lost_at = recovery, cluster, folder, lost_at
        self._lasting_records: list[FaultRecord] = []
        """Records of the round that outlive this process."""
        self._signs: Sequence[LifeSign] = ()
        """Devices that give no sign of life."""
        self._lasting_signs: list[tuple[int, str]] = []
        """Those of them that outlive this process, without the seconds that go on."""
        self._keeping = threading.Lock()
        self._told: tuple[object, ...] = ()
        """What the server was told last."""
        self._told_at, self._is_over = 0.0, False
        self._cut_s: list[float] = []
        """Duration of each cut of the round's link: from when it was noticed to the next finished micro-batch [s]."""

    def begin_round(self, round_: int) -> None:
        """Forget the round before."""
        self._link, self._lasting_records, self._cut_s = None, [], []
        self._signs, self._lasting_signs = (), []
        self._told, self._is_over = (), False
        fault_files.keep(self._folder, round_, [])

    def begin_link(self, link: DecoderLink) -> None:
        """Record the cuts of a link from here on."""
        self._link = link

    def end_link(self) -> None:
        """Look at the link no longer."""
        self._link = None

    def finished_micro_batch(self) -> None:
        """Whoever was lost has come back at the latest now."""
        if self._lost_at is not None:
            self._recovery.note(self._restarted(time.time() - self._lost_at))
            self._lost_at = None
        self._recovery.finished_micro_batch()
        for cut in self._mended()[len(self._cut_s) :]:
            self._cut_s.append(time.monotonic() - cut.noticed)

    def keep(self) -> None:
        """Have the records so far outlive this process: whoever finds it gone adds them to the round's."""
        # Three threads of a step come here.
        with self._keeping:
            records, signs = [*self._recovery.all_records, *self._cuts()], self._signs
            states = [(sign.device, sign.state) for sign in signs]
            if (records, states) != (self._lasting_records, self._lasting_signs):
                self._lasting_records, self._lasting_signs = records, states
                fault_files.keep(self._folder, self._recovery.round, records, signs)

    def tell(self, signs: Sequence[LifeSign]) -> None:
        """Tell the server what happens, at once if something has changed; else that this control unit is there.

        Parameters
        ----------
        signs : devices that give no sign of life
        """
        self._signs = signs
        self.keep()
        if (link := self._link) is None or self._is_over:
            return
        records, now = self._lasting_records, time.monotonic()
        content = ([record.to_dict() for record in records], [sign[:2] for sign in signs])
        if content != self._told or now - self._told_at >= _HEARTBEAT_S:
            self._told, self._told_at = content, now
            link.tell(ClusterNews(round=self._recovery.round, faults=content[0], signs=signs).to_text())

    def tell_end(self) -> None:
        """Tell the server that the cluster's part of the round is over, before its link is closed."""
        link, self._is_over = self._link, True
        if link is not None:
            link.tell(ClusterNews(round=self._recovery.round, is_over=True).to_text())

    def end_round(self, recovered: bool) -> list[FaultRecord]:
        """The round's records; ``recovered`` says whether what was still open is mended."""
        return [*self._recovery.end_round(recovered), *self._cuts()]

    def failed_round(self, round_: int, error: PipelineError | LinkError) -> FailedRound:
        """End a round that ``error`` has ended; one record at least says that it was not recovered from."""
        faults = self.end_round(recovered=False)
        if all(fault.recovered for fault in faults):
            kind = "nan" if isinstance(error, NotFinite | NotFiniteLink) else "cluster"
            faults.append(
                FaultRecord(
                    kind=kind,
                    cluster=self._cluster,
                    round=round_,
                    step=self._recovery.step,
                    recovered=False,
                    reason=str(error).splitlines()[0][:300],
                )
            )
        return FailedRound(str(error), [fault.to_dict() for fault in faults])

    def _restarted(self, seconds: float) -> FaultRecord:
        return FaultRecord(
            kind="joined",
            cluster=self._cluster,
            round=self._recovery.round,
            step=self._recovery.step,
            recovered=True,
            seconds=seconds,
            reason="the lost control unit is training again",
        )

    def _mended(self) -> Sequence[Cut]:
        return () if self._link is None else self._link.cuts

    def _cuts(self) -> list[FaultRecord]:
        return [
            FaultRecord(
                kind="stream",
                cluster=self._cluster,
                round=self._recovery.round,
                recovered=True,
                seconds=self._cut_s[i] if i < len(self._cut_s) else None,
                bytes=cut.resent_bytes,
                reason="the stream to the decoder was cut and reopened",
            )
            for i, cut in enumerate(self._mended())
        ]
