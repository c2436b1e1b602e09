"""Times of a cluster's devices, links, stream and uploads, followed over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from client_pipeline.partition.plan import ClusterPlan
from strategies.estimation.affine_time import AffineTime, Change

DEVICE, LINK, INLET, OUTLET = "device", "link", "inlet", "outlet"
STREAM, UPLOAD, STEP, MOVE = "stream", "upload", "step", "move"
SPARE = "spare"
"""Kinds of times. DEVICE, SPARE: a TEB on a device that trains, and a trial TEB on an idle one. LINK: after a device,
both ways. INLET: from the control unit to the first device, one way. OUTLET: the last device's link to the control
unit. STREAM: from there to the decoder and back. UPLOAD: the upload. STEP: a step beside its pipeline. MOVE: TEBs that
move, with bytes as samples."""
_UNAWAITED = 0.7
"""Assumed share of its estimated time for a link that nothing waited for."""
_LEAST_S = 1e-5
"""Least time that the clocks measure [s]."""
SPOKEN = (DEVICE, LINK, STREAM, UPLOAD)
"""Kinds whose changes are given as reasons of a plan."""
_SMALL_ERROR, _MOST_ERROR, _ERROR_WEIGHT = 0.1, 0.2, 0.1
"""Limits on the event simulator's relative error: a larger one is a change instead; its bound; the least weight of a
round."""
_LOSSES = ("device", "freeze", "link")
"""Faults by which a device is lost."""
_WORDS = {
    DEVICE: "a TEB on device {place} takes {factor} as long",
    LINK: "the link after device {place} takes {factor} as long",
    STREAM: "the decoder's stream takes {factor} as long",
    UPLOAD: "the upload takes {factor} as long",
}


class Declared(NamedTuple):
    """Belief about a time before any observation."""

    fixed_s: float
    sample_s: float


class NoticedChange(NamedTuple):
    """A change of one of the cluster's times."""

    kind: str
    place: int
    """Device; 0 where there is only one such time."""
    change: Change

    def __str__(self) -> str:
        factor = f"{self.change.factor:.2g} times"
        return _WORDS.get(self.kind, "{kind}: {factor} as long").format(kind=self.kind, place=self.place, factor=factor)


class ClusterTimes:
    """Times of one cluster.

    Parameters
    ----------
    scale : wall seconds of a second of the plan: 1, or the time scale of paced devices
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.times: dict[tuple[str, int], AffineTime] = {}
        self.rounds = 0
        """Rounds in which the cluster was seen."""
        self.last_round = 0
        """The newest of them."""
        self.away: set[int] = set()
        """Devices that were lost and have not come back."""
        self._moved: tuple[float, float] | None = None
        """TEBs and bytes that had moved at the last report."""
        self.model_error = 0.0
        """Logarithm of a batch's measured time over the event simulator's."""
        self._error_rounds = 0
        """Rounds in that mean, since the last change."""
        self.block_bytes = 0.0
        """Bytes of a TEB with its optimizer state, measured or estimated; 0: unknown."""

    def __getitem__(self, key: tuple[str, int]) -> AffineTime | None:
        """Return a time by kind and place; None if it was never seen."""
        return self.times.get(key)

    def inlet(self, first: int) -> AffineTime | None:
        """Return the time to a plan's first device, else the median of those to others; None if unknown."""
        seen = sorted((time for (kind, _), time in self.times.items() if kind == INLET), key=lambda t: t.seconds(1.0))
        return self.times.get((INLET, first)) or (seen[len(seen) // 2] if seen else None)

    def believe(self, key: tuple[str, int], fixed_s: float, sample_s: float) -> None:
        """Set a time as known, from a profile."""
        self.times[key] = AffineTime(fixed_s, sample_s, spread=0.05, split=0.05)
        self.rounds = max(self.rounds, 1)

    def observe(
        self,
        round_: int,
        report: Mapping[str, Any],
        *,
        num_batches: int,
        declared: Mapping[tuple[str, int], Declared],
        upload: float | None,
    ) -> list[NoticedChange]:
        """Take a round's report, as the intake has checked it.

        Parameters
        ----------
        round_ : its number
        report : see :func:`client_pipeline.runtime.control_unit.round_report.round_times` for its ``measured``
        num_batches : number of batches of all local steps
        declared : times of devices and links by the scenario
        upload : seconds, or multiples of the planned time; None: unknown
        """
        measured, plan = report["measured"], ClusterPlan.from_dict(dict(report["plan"]))
        last = plan.devices[-1]
        self.rounds, self.last_round = self.rounds + 1, round_
        noticed: list[NoticedChange] = []

        def take(kind: str, place: int, times: Sequence[Sequence[float]]) -> None:
            observations = [(float(n), max(float(y), _LEAST_S) / self.scale, float(w)) for n, w, y in times]
            noticed.extend(self._take(round_, kind, place, observations, declared))

        for device, times in measured["tebs"].items():
            take(DEVICE, int(device), times)
        for device, times in measured["links"].items():
            take(OUTLET, 0, times) if int(device) == last else take(LINK, int(device), times)
        for device, times in measured["inlets"].items():
            take(INLET, int(device), times)
        for device, times in measured["spare"].items():
            observations = [(float(n), max(float(y), _LEAST_S) / self.scale, float(w)) for n, w, y in times]
            noticed.extend(self._take_spare(round_, int(device), observations))
        self._doubt_links(round_, plan, measured)
        take(STREAM, 0, measured["stream"])
        if num_batches and measured["pipeline_s"] > 0:
            beside_s = max(float(report["train_s"]) / num_batches - float(measured["pipeline_s"]), 0.0)
            take(STEP, 0, [[0, num_batches, beside_s]])
        if upload is not None:
            noticed.extend(self._take(round_, UPLOAD, 0, [(0.0, upload, 1.0)], declared))
        if noticed:
            self._error_rounds = 0
        self._take_moves(round_, report)
        self._take_losses(report["faults"], set(plan.devices))
        return noticed

    def _take(
        self,
        round_: int,
        kind: str,
        place: int,
        observations: Sequence[tuple[float, float, float]],
        declared: Mapping[tuple[str, int], Declared],
    ) -> list[NoticedChange]:
        if not observations:
            return []
        key = kind, place
        if key not in self.times:
            believed = declared.get(key)
            known = believed is not None and believed.fixed_s + believed.sample_s > 0
            links = sorted((t for (k, _), t in self.times.items() if k == LINK), key=lambda time: time.seconds(1.0))
            if kind == OUTLET and links:
                # The outlet is never declared and rarely timed: one delay must not count as its rate.
                self.times[key] = AffineTime.like(links[len(links) // 2], round_)
            else:
                self.times[key] = AffineTime(*believed) if known and believed else AffineTime.first_seen(observations)
        change = self.times[key].observe(round_, observations)
        return [] if change is None else [NoticedChange(kind, place, change)]

    def _take_spare(
        self, round_: int, device: int, observations: Sequence[tuple[float, float, float]]
    ) -> list[NoticedChange]:
        """Scale a device's time in training by the change of its time in trials.

        The two times need not be equal. A device that is planned by the trials and measured in training would join and
        leave for ever. So only the ratio of successive trials counts.
        """
        if not observations:
            return []
        trained, tried = self.times.get((DEVICE, device)), self.times.get((SPARE, device))
        if trained is None:
            trained = self.times[DEVICE, device] = AffineTime.first_seen(observations)
        if tried is None or tried.last_round < trained.last_round:
            self.times[SPARE, device] = AffineTime.first_seen(observations)
            self.times[SPARE, device].observe(round_, observations)
            return []
        size = max(observations)[0]
        before = tried.seconds(size)
        change = tried.observe(round_, observations)
        trained.scale(tried.seconds(size) / before)
        return [] if change is None else [NoticedChange(DEVICE, device, change)]

    def _doubt_links(self, round_: int, plan: ClusterPlan, measured: Mapping[str, Any]) -> None:
        """Believe a link faster that nothing waited for: a slow one would have caused a wait, and a time."""
        inlet, sizes = self.times.get((INLET, plan.devices[0])), measured["tebs"].get(str(plan.devices[0]))
        if inlet is not None and sizes and not measured["inlets"].get(str(plan.devices[0])):
            inlet.observe(round_, [(float(n), _UNAWAITED * inlet.seconds(float(n)), 1.0) for n, *_ in sizes])
        for device in plan.devices:
            key = (OUTLET, 0) if device == plan.devices[-1] else (LINK, device)
            sizes, link = measured["tebs"].get(str(device)), self.times.get(key)
            if link is not None and sizes and not measured["links"].get(str(device)):
                link.observe(round_, [(float(n), _UNAWAITED * link.seconds(float(n)), 1.0) for n, *_ in sizes])

    def _take_losses(self, faults: Sequence[Mapping[str, Any]], left: set[int]) -> None:
        """Note the devices that were lost and left the round's last plan, and those that have returned."""
        lost = {f["device"] for f in faults if f["kind"] in _LOSSES and f["device"] is not None}
        back = {f["device"] for f in faults if f["kind"] == "joined"}
        self.away = (self.away | lost) - left - back

    def _take_moves(self, round_: int, report: Mapping[str, Any]) -> None:
        """Learn a moved byte's cost from rounds that began with a move, except a new control unit's."""
        if not self.block_bytes and "payload_bytes" in report:
            # The update holds the weights, the embedding among them; an optimizer like Adam keeps twice as much.
            num_blocks = max(sum(report["plan"]["delta"]), 1)
            self.block_bytes = 3.0 * float(report["payload_bytes"]["update"]) / num_blocks
        blocks, size = float(report["moved_blocks"]), float(report["moved_bytes"])
        before, self._moved = self._moved, (blocks, size)
        if before is None or blocks <= before[0] or size <= before[1]:
            return
        self.block_bytes = (size - before[1]) / (blocks - before[0])
        self._take(round_, MOVE, 0, [(size - before[1], float(report["prepare_s"]) / self.scale, 1.0)], {})

    def learn_model_error(self, predicted_s: float, measured_s: float) -> None:
        """Learn the event simulator's lasting error, as with two ways that share a rate."""
        if predicted_s <= 0 or measured_s <= 0:
            return
        error = math.log(measured_s / predicted_s)
        if abs(error) < _SMALL_ERROR:
            self._error_rounds += 1
            corrected = self.model_error + max(_ERROR_WEIGHT, 1 / self._error_rounds) * error
            self.model_error = min(max(corrected, -_MOST_ERROR), _MOST_ERROR)

    def unseen_rounds(self, device: int) -> int:
        """Return the rounds since a device last trained or tried; all rounds if it never did."""
        times = (self.times.get((kind, device)) for kind in (DEVICE, SPARE))
        return self.last_round - max((time.last_round for time in times if time), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the times as JSON values."""
        return {
            "times": [[kind, place, time.to_dict()] for (kind, place), time in sorted(self.times.items())],
            "rounds": [self.rounds, self.last_round],
            "away": sorted(self.away),
            "moved": self._moved,
            "block_bytes": self.block_bytes,
            "model_error": [self.model_error, self._error_rounds],
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], scale: float = 1.0) -> ClusterTimes:
        """Read :meth:`to_dict`'s form."""
        cluster = cls(scale)
        cluster.times = {(kind, place): AffineTime.from_dict(time) for kind, place, time in raw["times"]}
        (cluster.rounds, cluster.last_round), cluster.block_bytes = raw["rounds"], raw["block_bytes"]
        cluster.away = set(raw["away"])
        cluster.model_error, cluster._error_rounds = raw["model_error"]
        cluster._moved = None if raw["moved"] is None else (raw["moved"][0], raw["moved"][1])
        return cluster
