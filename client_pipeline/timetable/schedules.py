"""Pipeline schedules as data: what each stage does, in which order.

GPipe with three stages and three micro-batches, one column per time unit, as ``timetable`` draws it::

    stage 0 | F0 F1 F2 .. .. .. .. B0 B1 B2
    stage 1 | .. F0 F1 F2 .. .. B0 B1 B2 ..
    stage 2 | .. .. F0 F1 F2 B0 B1 B2 .. ..

Backward passes run in the order of the forward passes: the decoder returns the gradient of micro-batch 0 first.

ZB-H1 cuts a backward pass in two (Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241): the gradient of the
input (``B``), for which the device before waits, and the gradients of the weights (``W``), for which nobody does::

    stage 0 | F0 F1 F2 .. .. B0 W0 B1 W1 B2 W2
    stage 1 | .. F0 F1 .. B0 F2 B1 W0 B2 W1 W2
    stage 2 | .. .. F0 B0 F1 B1 F2 B2 W0 W1 W2

Where micro-batches are cut into token slices (:mod:`client_pipeline.partition.token_slices`), each action becomes those
of its slices: forward passes from the first to the last, the others from the last to the first. Numbers go on over the
slices. Two micro-batches of two slices under GPipe, where the gradient of one comes when both its slices are through::

    stage 0 | F0 F1 F2 F3 .. .. .. .. B1 B0 B3 B2
    stage 1 | .. F0 F1 F2 F3 .. .. B1 B0 B3 B2 ..
    stage 2 | .. .. F0 F1 F2 F3 B1 B0 B3 B2 .. ..
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from client_pipeline.system.device_memory import HeldMicroBatches


class Action(NamedTuple):
    """One forward (``F``) or backward (``B``) pass of one micro-batch; or the part that ``B`` left over (``W``)."""

    kind: str
    micro_batch: int
    """Its number; of slice q of micro-batch i, where each is cut into Q of them, i Q + q."""

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


ZB_H1 = "zb-h1"
SCHEDULES = ("gpipe", "1f1b", ZB_H1)
AUTO_SCHEDULE = "auto"
"""Value in a configuration for the event simulator's choice among them."""


def splits_backward(schedule: str) -> bool:
    """True if weight gradients are actions of their own."""
    return schedule == ZB_H1


def actions(schedule: str, stage: int, num_stages: int, num_micro_batches: int, num_slices: int = 1) -> list[Action]:
    """List the actions of one stage in order.

    ``gpipe`` runs all forward passes, then all backward passes. ``1f1b`` fills the pipeline with
    S - stage - 1 forward passes and then alternates, so stage s never holds more than S - s activations. ``zb-h1`` is
    ``1f1b`` with a backward pass in two: stage s puts off the weight gradients of s micro-batches, so that no stage
    holds anything of more than S. Each micro-batch is cut into ``num_slices`` token slices.

    Raises
    ------
    ValueError
        For an unknown schedule or a stage outside the pipeline.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, found {schedule!r}")
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} is outside a pipeline of {num_stages} stages; expected 0 to {num_stages - 1}")
    if num_micro_batches < 1:
        raise ValueError(f"m = {num_micro_batches} micro-batches: expected at least 1")
    forward = [Action("F", i) for i in range(num_micro_batches)]
    backward = [Action("B", i) for i in range(num_micro_batches)]
    if schedule == "gpipe":
        return _in_slices(forward + backward, num_slices)
    warmup = min(num_stages - stage - 1, num_micro_batches)
    steady = [a for pair in zip(forward[warmup:], backward, strict=False) for a in pair]
    one_by_one = forward[:warmup] + steady + backward[num_micro_batches - warmup :]
    return _in_slices(_with_weights(one_by_one, stage) if splits_backward(schedule) else one_by_one, num_slices)


def _in_slices(listed: list[Action], num_slices: int) -> list[Action]:
    """Put the actions of all slices of a micro-batch in the place of its own."""
    forth = range(num_slices)
    return [Action(kind, i * num_slices + q) for kind, i in listed for q in (forth if kind == "F" else reversed(forth))]


def _with_weights(one_by_one: list[Action], delay: int) -> list[Action]:
    """Let weight gradients follow the input gradient of ``delay`` micro-batches later; the others come at the end."""
    listed: list[Action] = []
    waiting: list[Action] = []
    for action in one_by_one:
        listed.append(action)
        if action.kind == "B":
            waiting.append(Action("W", action.micro_batch))
            if len(waiting) > delay:
                listed.append(waiting.pop(0))
    return listed + waiting


@lru_cache(maxsize=4096)
def held_at_backward(
    schedule: str, stage: int, num_stages: int, num_micro_batches: int
) -> tuple[HeldMicroBatches, ...]:
    """Return a stage's stored micro-batches at each backward pass, and after it: one of these moments has the peak.

    Between them it only adds what the next backward pass finds, and drops. Equal moments count once.
    """
    moments: dict[HeldMicroBatches, None] = {}
    forwarded = weights_left = 0
    for action in actions(schedule, stage, num_stages, num_micro_batches):
        if action.kind == "F":
            forwarded += 1
        elif action.kind == "W":
            weights_left -= 1
        else:
            forwarded -= 1
            moments[HeldMicroBatches(forwarded, 1, weights_left)] = None
            if splits_backward(schedule):
                weights_left += 1
                moments[HeldMicroBatches(forwarded, 0, weights_left)] = None

    def has_all_of(larger: HeldMicroBatches, moment: HeldMicroBatches) -> bool:
        # Where more wait, those that do not are later micro-batches, which may be smaller.
        same_waiting = larger.weights_left == moment.weights_left
        return larger != moment and same_waiting and larger[0] >= moment[0] and larger[1] >= moment[1]

    # A moment that another one has all of is no peak.
    return tuple(moment for moment in moments if not any(has_all_of(larger, moment) for larger in moments))


def schedules_of(name: str, key: str = "planner.schedule") -> tuple[str, ...]:
    """Return the schedules that a configuration allows: one by its name, or all that there are.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name == AUTO_SCHEDULE:
        return SCHEDULES
    if name not in SCHEDULES:
        raise ValueError(f"{key}: expected one of {', '.join((*SCHEDULES, AUTO_SCHEDULE))}, found {name!r}")
    return (name,)


def unit_timetable(
    schedule: str, num_stages: int, num_micro_batches: int, num_slices: int = 1
) -> list[list[Action | None]]:
    """Run the schedule with every action taking one time unit and links taking none.

    Returns
    -------
    One row per stage, one column per time unit; None where the stage waits.
    """
    todo = [actions(schedule, s, num_stages, num_micro_batches, num_slices) for s in range(num_stages)]
    done_actions: list[set[Action]] = [set() for _ in range(num_stages)]
    rows: list[list[Action | None]] = [[] for _ in range(num_stages)]
    while any(todo):
        ready_actions: list[Action | None] = []
        for stage in range(num_stages):
            action = todo[stage][0] if todo[stage] else None
            if action is not None and not _inputs_ready(action, stage, done_actions, num_slices):
                action = None
            ready_actions.append(action)
        if not any(ready_actions):
            raise AssertionError(f"schedule {schedule} dead-locks with S = {num_stages}, m = {num_micro_batches}")
        for stage, action in enumerate(ready_actions):
            rows[stage].append(action)
            if action is not None:
                todo[stage].pop(0)
                done_actions[stage].add(action)
    return rows


def _inputs_ready(action: Action, stage: int, done_actions: list[set[Action]], num_slices: int) -> bool:
    if action.kind == "W":
        return Action("B", action.micro_batch) in done_actions[stage]
    if action.kind == "F":
        return stage == 0 or action in done_actions[stage - 1]
    if stage == len(done_actions) - 1:
        last_slice = action.micro_batch - action.micro_batch % num_slices + num_slices - 1
        return Action("F", last_slice) in done_actions[stage]
    return action in done_actions[stage + 1]


def timetable(schedule: str, num_stages: int, num_micro_batches: int, num_slices: int = 1) -> str:
    """Draw the schedule as text, a row a stage."""
    rows = unit_timetable(schedule, num_stages, num_micro_batches, num_slices)
    cell = len(f"F{num_micro_batches * num_slices - 1}")
    label = len(f"{num_stages - 1}")
    lines = []
    for stage, row in enumerate(rows):
        cells = " ".join((str(action) if action else "." * cell).ljust(cell) for action in row)
        lines.append(f"stage {stage:<{label}} | {cells}".rstrip())
    return "\n".join(lines)
