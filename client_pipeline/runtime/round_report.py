"""What a control unit tells of a round beside its weights, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.memory import peak_bytes
from client_pipeline.runtime.pipeline import Pipeline
from client_pipeline.runtime.round_times import round_times
from client_pipeline.runtime.stage import DoneAction
from client_pipeline.runtime.step_outcome import StepOutcome


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
        "moved_blocks": pipeline.moved_blocks,
        "moved_bytes": pipeline.moved_bytes,
        # Since the control unit began.
        "snapshots": {
            "taken": snapshots.taken,
            "bytes": snapshots.bytes,
            "fetch_s": snapshots.fetch_s,
        },
        "link_bytes": sum(outcome.link_bytes for outcome in outcomes),
        "measured": round_times(outcomes) | {"spare": spare},
        "timeline": timeline(outcomes[-1]),
        "prepare_s": ready_at - start,
        "train_s": trained - ready_at,
        "collect_s": end - trained,
        # Of paced devices: steps and upload, as the model has a round.
        "paced_s": end - ready_at if paced else None,
    }


def timeline(outcome: StepOutcome) -> list[list[Any]]:
    """What each stage did with a step's last batch: kind, stage, micro-batch, start and end, from 0 on [s].

    Micro-batches, or their token slices, have the numbers of their actions.
    """
    events = [
        (action.kind, stage, action.micro_batch, action.start, action.end)
        for stage, segment in enumerate(outcome.segments)
        for action in _of_last_batch(outcome.devices[segment.device].actions)
    ]
    zero = min(event[3] for event in events)
    return [[kind, s, i, start - zero, end - zero] for kind, s, i, start, end in sorted(events, key=lambda e: e[3])]


def _of_last_batch(actions: Sequence[DoneAction]) -> Sequence[DoneAction]:
    """A step's last batch: with each, numbers begin anew."""
    begins = max((i for i, action in enumerate(actions) if (action.kind, action.micro_batch) == ("F", 0)), default=0)
    return actions[begins:]
