"""A control unit's report of a round beside its weights, as JSON values.

Its part ``measured`` has the times on each device, link and the decoder's stream, from which the server estimates the
next rounds. Every list has an entry ``[samples, count, seconds]`` for each size of micro-batch: how many were timed,
and their median. Clocks of two machines differ, so a link's two directions are timed together: the difference cancels::

    there: arrival at s + 1 - departure at s = transit + difference        back: transit - difference

A message that follows another one over the link has waited for it: it counts from the arrival of that one on. Only
those that the receiver waited for tell when they arrived.

Where micro-batches are cut into token slices nothing is summed up: what a slice takes depends on where it is cut.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.devices.pipeline import Pipeline
from client_pipeline.runtime.devices.step_outcome import StepOutcome
from client_pipeline.runtime.stage.memory import peak_bytes
from client_pipeline.runtime.stage.stage import DoneAction

WAITED_S = 2e-4
"""A shorter wait for an input says that it was there already [s]."""


def round_report(
    *,
    pipeline: Pipeline,
    plan: ClusterPlan,
    outcomes: Sequence[StepOutcome],
    memory: Mapping[int, Mapping[str, int]],
    spare: Mapping[str, list[list[Any]]],
    clock: tuple[float, float, float, float],
    paced: bool,
) -> dict[str, Any]:
    """Sum up a round.

    Parameters
    ----------
    pipeline : after the round
    plan : in the end: a lost device changes it
    outcomes : of the local steps
    memory : of each device that was there in the end
    spare : what a TEB took on devices that train none
    clock : when the round began, was ready to train, had trained, and was over [s]
    paced : whether the devices take the time that their profiles say
    """
    start, ready_at, trained, end = clock
    blocks = {segment.device: len(segment.blocks) for segment in pipeline.segments}
    snapshots = pipeline.placement.snapshots
    return {
        "plan": plan.to_dict(),
        "devices": {
            str(device): {
                "blocks": blocks.get(device, 0),
                "busy_s": sum(o.devices[device].busy_s for o in outcomes if device in o.devices),
                **memory.get(device, {}),
            }
            for device in sorted(blocks.keys() | {device for outcome in outcomes for device in outcome.devices})
        },
        # Of the control unit's own process, since it began: the data and the embedding.
        "peak_bytes": peak_bytes(),
        "moved_blocks": pipeline.placement.moved_blocks,
        "moved_bytes": pipeline.placement.moved_bytes,
        # Since the control unit began.
        "snapshots": {
            "taken": snapshots.taken,
            "bytes": snapshots.bytes,
            "fetch_s": snapshots.fetch_s,
        },
        "link_bytes": sum(outcome.link_bytes for outcome in outcomes),
        "measured": round_times(outcomes) | {"spare": spare},
        "timeline": timeline(next((o for o in reversed(outcomes) if o.devices), outcomes[-1])),
        # Steps, as shares of them, in which devices ran: the others' activations were with the server.
        **({} if pipeline.kept is None else {"computed_steps": sum(outcome.computed_share for outcome in outcomes)}),
        "prepare_s": ready_at - start,
        "train_s": trained - ready_at,
        "collect_s": end - trained,
        # Of paced devices: steps and upload, as the model has a round.
        "paced_s": end - ready_at if paced else None,
    }


def timeline(outcome: StepOutcome) -> list[list[Any]]:
    """Return each stage's actions of a step's last batch: kind, stage, micro-batch, start and end, from 0 on [s].

    Micro-batches, or their token slices, have the numbers of their actions.
    """
    events = [
        (action.kind, stage, action.micro_batch, action.start, action.end)
        for stage, segment in enumerate(outcome.segments if outcome.devices else [])
        for action in _of_last_batch(outcome.devices[segment.device].actions)
    ]
    zero = min((event[3] for event in events), default=0.0)
    return [[kind, s, i, start - zero, end - zero] for kind, s, i, start, end in sorted(events, key=lambda e: e[3])]


def _of_last_batch(actions: Sequence[DoneAction]) -> Sequence[DoneAction]:
    """A step's last batch: with each, numbers begin anew."""
    begins = max((i for i, action in enumerate(actions) if (action.kind, action.micro_batch) == ("F", 0)), default=0)
    return actions[begins:]


class Message(NamedTuple):
    """One tensor on its way between two stages."""

    samples: int
    departed: float
    """By the sender's clock [s]."""
    asked: float
    """By the receiver's clock [s]."""
    arrived: float
    """By the receiver's clock [s]."""

    @property
    def awaited(self) -> bool:
        """True if the receiver waited, so that the arrival is known."""
        return self.arrived - self.asked > WAITED_S


def round_times(outcomes: Sequence[StepOutcome]) -> dict[str, Any]:
    """Sum up the steps of a round, as JSON values: ``measured`` of a round's report.

    ``tebs`` has, by device, a TEB's forward and backward pass together; ``links``, by the device before it, a
    micro-batch's activations and gradient (after the last device: to the control unit); ``inlets``, by the first
    device, the time between two inputs that it waits for; ``stream`` a micro-batch from the control unit to the decoder
    and back. ``pipeline_s`` is a batch from the first device's first pass to its last.
    """
    tebs: dict[str, list[tuple[int, float]]] = defaultdict(list)
    links: dict[str, list[tuple[int, float]]] = defaultdict(list)
    inlets: dict[str, list[tuple[int, float]]] = defaultdict(list)
    stream: list[tuple[int, float]] = []
    pipelines: list[float] = []
    # The first step of a round opens connections and allocates: it counts where there is no other. TEBs move when a
    # device is lost or slow: each step counts with the segments that it ran on.
    for outcome in outcomes[1:] or outcomes:
        for batch in _batches(outcome):
            stages = [batch.actions[segment.device] for segment in outcome.segments]
            for segment, actions in zip(outcome.segments, stages, strict=True):
                tebs[str(segment.device)] += _teb_times(actions, batch.sizes, len(segment.blocks))
            for segment, there, back in zip(outcome.segments, *_messages(stages, batch), strict=True):
                links[str(segment.device)] += _link_times(there, back)
            inlets[str(outcome.segments[0].device)] += _inlet_times(stages[0], batch.sizes)
            stream += _stream_times(batch)
            pipelines.append(max(a.end for a in stages[0]) - min(a.start for a in stages[0]))
    return {
        "tebs": {device: medians(times) for device, times in tebs.items()},
        "links": {device: medians(times) for device, times in links.items() if times},
        "inlets": {device: medians(times) for device, times in inlets.items() if times},
        "stream": medians(stream),
        "pipeline_s": statistics.median(pipelines) if pipelines else 0.0,
    }


def medians(times: Iterable[tuple[int, float]]) -> list[list[Any]]:
    """Entries ``[samples, count, median seconds]``, by samples."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for samples, seconds in times:
        by_size[samples].append(max(seconds, 0.0))
    return [[samples, len(values), statistics.median(values)] for samples, values in sorted(by_size.items())]


class _Batch(NamedTuple):
    sizes: list[int]
    actions: Mapping[int, list[DoneAction]]
    exchange: Sequence[tuple[float, float, float]]


def _batches(outcome: StepOutcome) -> Iterable[_Batch]:
    """Cut a step into its batches: each has 2 m actions on every device, or 3 m where backward passes are in two.

    There are none where devices run forward alone: what is measured is of both passes.
    """
    total = len(outcome.exchange)
    some = next(iter(outcome.devices.values())).actions if outcome.devices else []
    kinds = {action.kind for action in some}
    each = 3 if "W" in kinds else 2
    if not total or "B" not in kinds or any(len(report.actions) != each * total for report in outcome.devices.values()):
        return
    # Numbers of micro-batches begin anew with each batch.
    m = max(action.micro_batch for action in some) + 1
    for first in range(0, total, m):
        yield _Batch(
            outcome.sizes[first : first + m],
            {device: report.actions[each * first : each * (first + m)] for device, report in outcome.devices.items()},
            outcome.exchange[first : first + m],
        )


def _teb_times(actions: Sequence[DoneAction], sizes: Sequence[int], num_blocks: int) -> list[tuple[int, float]]:
    passes: dict[int, float] = defaultdict(float)
    for action in actions:
        passes[action.micro_batch] += action.end - action.start
    return [(sizes[i], seconds / num_blocks) for i, seconds in passes.items()]


def _messages(stages: Sequence[Sequence[DoneAction]], batch: _Batch) -> tuple[list[list[Message]], list[list[Message]]]:
    """Activations and gradients over the link after each stage, in the order in which they left."""
    there, back = [], []
    by_kind = [{(a.kind, a.micro_batch): a for a in actions} for actions in stages]
    for s, times in enumerate(by_kind):
        forward, backward = [], []
        for i, samples in enumerate(batch.sizes):
            if s + 1 < len(by_kind):
                received, returned = by_kind[s + 1]["F", i], by_kind[s + 1]["B", i].end
                asked, arrived = received.asked, received.arrived
            else:
                asked, arrived, returned = batch.exchange[i]
            forward.append(Message(samples, times["F", i].end, asked, arrived))
            backward.append(Message(samples, returned, times["B", i].asked, times["B", i].arrived))
        there.append(forward)
        back.append(sorted(backward, key=lambda message: message.departed))
    return there, back


def _link_times(there: Sequence[Message], back: Sequence[Message]) -> list[tuple[int, float]]:
    """Both directions of micro-batches together; nothing where one direction was never waited for."""
    transits = [[m.arrived - m.departed for m in messages if m.awaited] for messages in (there, back)]
    if not all(transits):
        return []
    difference = (min(transits[0]) - min(transits[1])) / 2
    forward, backward = _services(there, difference), _services(back, -difference)
    if not forward or not backward:
        return []
    samples = {n for n, _ in forward} & {n for n, _ in backward}
    return [
        (n, statistics.median(t for k, t in forward if k == n) + statistics.median(t for k, t in backward if k == n))
        for n in sorted(samples)
    ]


def _services(messages: Sequence[Message], difference: float) -> list[tuple[int, float]]:
    """Return the link's time for each message, without the wait for earlier ones."""
    times, previous = [], None
    for message in messages:
        if message.awaited and (previous is None or previous.awaited):
            begun = message.departed if previous is None else max(message.departed, previous.arrived - difference)
            times.append((message.samples, message.arrived - difference - begun))
        previous = message
    return times


def _inlet_times(actions: Sequence[DoneAction], sizes: Sequence[int]) -> list[tuple[int, float]]:
    """From one input's arrival at the first device to the next one's, as far as it waited for both.

    The control unit sends them one after the other; one clock tells of both, so that delays do not count.
    """
    inputs = {
        a.micro_batch: Message(sizes[a.micro_batch], a.asked, a.asked, a.arrived) for a in actions if a.kind == "F"
    }
    pairs = [(inputs[i - 1], inputs[i]) for i in inputs if i - 1 in inputs]
    return [(later.samples, later.arrived - one.arrived) for one, later in pairs if one.awaited and later.awaited]


def _stream_times(batch: _Batch) -> list[tuple[int, float]]:
    """From the control unit to the decoder and back, the wait for the micro-batches before left out."""
    times, free = [], 0.0
    for samples, (_, arrived, answered) in zip(batch.sizes, batch.exchange, strict=True):
        times.append((samples, answered - max(arrived, free)))
        free = answered
    return times
