"""The pipeline's virtual clock: action lists executed on given stage and link times.

The lists are those that the runtime executes (:mod:`client_pipeline.timetable.schedules`), or ``fused``: one chunk of
forward and backward per micro-batch, as the closed forms of :mod:`client_pipeline.system.latency` see a pipeline.

A device starts its next action as soon as it is free and the action's input is there. Activations of micro-batch i go
over link s from stage s to s + 1, gradients back from s + 1 to s; what happens meanwhile is the link mode:

* ``blocking``: the sender is busy while it sends;
* ``overlapping``: the sender goes on; each direction of a link sends one message at a time, in the order of production;
* ``shared``: the sender goes on; all links of the cluster are one medium, which sends one message at a time, the one
  that was ready first.

Each link may have a mode of its own: a control unit's radio sends while the last device goes on. No wait for the
receiver: it has room for what comes.

A micro-batch may be cut into token slices, which go one after the other. The gradients of all of them are at the last
stage when the forward pass of the last one has ended there, and the decoder has answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from client_pipeline.system.latency import Scaling
from client_pipeline.timetable.schedules import Action, actions, splits_backward

Array = NDArray[np.float64]
LINK_MODES = ("blocking", "overlapping", "shared")
FUSED = "fused"
Todo = Sequence[Sequence[Action]]
"""Actions of each stage in order."""


class Event(NamedTuple):
    """One action of a stage, or one message on a link."""

    kind: str
    """``F``, ``B``, ``W`` or ``FB`` on a stage; ``z`` (activations), ``g`` (gradient) or ``zg`` on a link."""
    place: int
    """Stage s; or link s, between the stages s and s + 1."""
    micro_batch: int
    """Its number, or that of a slice of it, as an action has it."""
    start: float
    """[s]."""
    end: float
    """[s]."""


class StageTimes(NamedTuple):
    """Seconds of a pipeline's stages and links for each micro-batch; links after each stage but the last.

    Where micro-batches are cut into Q token slices, for each slice by its number: (S, m Q) and (S - 1, m Q).
    """

    forward_s: Array
    """(S, m)."""
    backward_s: Array
    """(S, m), weight gradients included."""
    forward_link_s: Array
    """(S - 1, m)."""
    backward_link_s: Array
    """(S - 1, m)."""
    weight_s: Array
    """(S, m): the part of ``backward_s`` that a schedule may put off."""


class Simulation(NamedTuple):
    """Times of a simulated round."""

    makespan: float
    """[s]."""
    events: list[Event]
    """Events in the order of their starts."""


def simulate_pipeline(
    schedule: str,
    forward_s: Array,
    backward_s: Array,
    forward_link_s: Array,
    backward_link_s: Array,
    weight_s: Array | None = None,
    *,
    links: str | Sequence[str] = "blocking",
    decoder_s: float = 0.0,
    answers_at_once: bool = False,
    num_slices: int = 1,
    input_s: Array | None = None,
) -> Simulation:
    """Execute a schedule.

    Parameters
    ----------
    schedule : one of the runtime's, or ``fused``
    forward_s, backward_s : (S, m), seconds of each stage's pass of each micro-batch
    forward_link_s, backward_link_s : (S - 1, m), seconds of activations and gradients on the link after each stage
    weight_s : (S, m), part of ``backward_s`` that makes the weights' gradients; None: none of it. Other schedules than
        those that cut backward passes in two do not look at it
    links : ``blocking``, ``overlapping`` or ``shared``; or one for each link, (S - 1,)
    decoder_s : from the end of the last stage's forward pass to its gradient [s]; ``fused`` adds it to the last chunk
    answers_at_once : the last stage is no device but the decoder, which answers each micro-batch before it takes the
        next one, whatever the schedule of the others; not with ``fused``
    num_slices : Q, token slices of each micro-batch; the times are then those of slices, (S, m Q) and (S - 1, m Q).
        Not with ``fused``: a backward pass waits for all of them
    input_s : (m,) or (m Q,), when each one's input is at the first stage [s]; None: all are there from the beginning

    Raises
    ------
    ValueError
        For an unknown schedule or link mode, or shapes that do not fit.
    """
    num_stages, num_numbers = forward_s.shape
    if num_numbers % num_slices or (schedule == FUSED and num_slices > 1):
        raise ValueError(
            f"num_slices: expected a divisor of {num_numbers} columns, and 1 with {FUSED}, found {num_slices}"
        )
    num_micro_batches = num_numbers // num_slices
    modes = [links] * (num_stages - 1) if isinstance(links, str) else list(links)
    if not {links if isinstance(links, str) else "blocking", *modes} <= set(LINK_MODES):
        raise ValueError(f"links: expected one of {', '.join(LINK_MODES)}, found {links!r}")
    if len(modes) != num_stages - 1:
        raise ValueError(f"links: expected one for each of {num_stages - 1} links, found {len(modes)}")
    if weight_s is not None:
        # All of a pass may be, but for rounding.
        if weight_s.shape != backward_s.shape or (weight_s > backward_s * (1 + 1e-9)).any():
            raise ValueError("weight_s: expected a part of each backward pass, of the shape (S, m) of backward_s")
        weight_s = np.minimum(weight_s, backward_s)
    shapes = (backward_s.shape, forward_link_s.shape, backward_link_s.shape)
    expected = ((num_stages, num_numbers), *2 * ((num_stages - 1, num_numbers),))
    if shapes != expected:
        raise ValueError(f"times: found shapes {shapes} beside (S, m) = {forward_s.shape}; expected {expected}")
    if schedule == FUSED:
        todo: Todo = [[Action("FB", i) for i in range(num_micro_batches)] for _ in range(num_stages)]
        chunk = forward_s + backward_s
        chunk[-1] += decoder_s
        compute, send = {"FB": chunk.tolist()}, {"FB": (forward_link_s + backward_link_s).tolist()}
    else:
        todo = _todo_of(schedule, num_stages, num_micro_batches, num_slices, answers_at_once)
        puts_off = weight_s if splits_backward(schedule) and weight_s is not None else np.zeros_like(backward_s)
        compute = {"F": forward_s.tolist(), "B": (backward_s - puts_off).tolist(), "W": puts_off.tolist()}
        send = {"F": forward_link_s.tolist(), "B": backward_link_s.tolist()}
    inputs = np.zeros(num_numbers) if input_s is None else input_s
    if inputs.shape != (num_numbers,):
        raise ValueError(f"input_s: expected a time for each of {num_numbers} inputs, found shape {inputs.shape}")
    return _Run(todo, compute, send, modes, decoder_s, num_slices, inputs.tolist()).execute()


@lru_cache(maxsize=256)
def _todo_of(schedule: str, num_stages: int, num_micro_batches: int, num_slices: int, answers_at_once: bool) -> Todo:
    """Actions of each stage: a search for a plan asks for the same ones thousands of times."""
    num_devices = num_stages - answers_at_once
    todo = [actions(schedule, s, num_devices, num_micro_batches, num_slices) for s in range(num_devices)]
    if answers_at_once:
        # As the only stage of a pipeline: one micro-batch after the other.
        todo.append(actions("1f1b", 0, 1, num_micro_batches, num_slices))
    return todo


_MESSAGE = {"F": "z", "B": "g", "FB": "zg"}


class _Run:
    def __init__(
        self,
        todo: Todo,
        compute: dict[str, list[list[float]]],
        send: dict[str, list[list[float]]],
        links: list[str],
        decoder_s: float,
        num_slices: int,
        input_s: list[float],
    ) -> None:
        self._todo, self._compute, self._send = todo, compute, send
        self._links, self._decoder_s, self._num_slices = links, decoder_s, num_slices
        self._last_stage = len(todo) - 1
        self._next_action = [0] * len(todo)
        self._free = [0.0] * len(todo)
        """Time at which each device is free [s]."""
        self._arrival = {(kind, 0, i): arrival for kind in ("F", "FB") for i, arrival in enumerate(input_s)}
        """Arrival of an action's input [s], by kind, stage and micro-batch."""
        self._medium: dict[tuple[str, int], float] = {}
        """Time at which each direction of a link, or the shared medium, is free [s]."""
        self._messages: list[tuple[float, int, int, str]] = []
        """Messages for the shared medium: ready, link, micro-batch, kind of the action that made it."""
        self._events: list[Event] = []
        self._starts: list[tuple[float, int]] = []
        """Heap of the start times of the devices' next actions, of those whose input is on the way."""

    def execute(self) -> Simulation:
        """Take what starts first, until nothing is left."""
        for stage in range(self._last_stage + 1):
            self._await(stage)
        while True:
            message = min(self._messages) if self._messages else None
            # A message that is sent now must have been ready before any other: first all actions that start until then.
            sending_time = None if message is None else max(message[0], self._medium.get(("shared", 0), 0.0))
            if self._starts and (sending_time is None or self._starts[0][0] <= sending_time):
                start, stage = heappop(self._starts)
                self._act(stage, start)
                self._await(stage)
            elif message is not None and sending_time is not None:
                self._messages.remove(message)
                _, link, micro_batch, kind = message
                self._transfer(kind, link, micro_batch, sending_time, ("shared", 0))
            else:
                break
        if any(place < len(todo) for place, todo in zip(self._next_action, self._todo, strict=True)):
            raise AssertionError("the schedule dead-locks")
        events = sorted(self._events, key=attrgetter("start", "end"))
        return Simulation(max(map(attrgetter("end"), events)), events)

    def _await(self, stage: int) -> None:
        """Note when a device starts its next action; not if its input is not on the way yet or all is done.

        Called when it has started the one before, and when the input of this one is sent to it: neither of the two
        times changes any more once both are known.
        """
        place, todo = self._next_action[stage], self._todo[stage]
        if place < len(todo):
            kind, micro_batch = todo[place]
            arrival = self._arrival.get((kind, stage, micro_batch))
            if arrival is not None:
                heappush(self._starts, (max(self._free[stage], arrival), stage))

    def _act(self, stage: int, start: float) -> None:
        kind, micro_batch = self._todo[stage][self._next_action[stage]]
        self._next_action[stage] += 1
        end = start + self._compute[kind][stage][micro_batch]
        self._free[stage] = end
        self._events.append(Event(kind, stage, micro_batch, start, end))
        if kind == "W":
            return
        if kind == "B":
            self._arrival["W", stage, micro_batch] = end
        link = stage - 1 if kind == "B" else stage
        if kind == "F" and stage == self._last_stage:
            self._answer(micro_batch, end + self._decoder_s)
        elif 0 <= link < self._last_stage:
            if self._links[link] == "blocking":
                self._free[stage] = self._transfer(kind, link, micro_batch, end, (kind, link))
            elif self._links[link] == "overlapping":
                channel = (kind, link)
                ready = max(end, self._medium.get(channel, 0.0))
                self._transfer(kind, link, micro_batch, ready, channel)
            else:
                self._messages.append((end, link, micro_batch, kind))

    def _answer(self, number: int, time: float) -> None:
        """Give the last stage the gradients of a micro-batch whose last slice is through; a whole one is its own."""
        if number % self._num_slices == self._num_slices - 1:
            for part in range(number - self._num_slices + 1, number + 1):
                self._arrival["B", self._last_stage, part] = time

    def _transfer(self, kind: str, link: int, micro_batch: int, start: float, channel: tuple[str, int]) -> float:
        end = start + self._send[kind][link][micro_batch]
        self._medium[channel] = end
        self._events.append(Event(_MESSAGE[kind], link, micro_batch, start, end))
        receiver = link if kind == "B" else link + 1
        self._arrival[kind, receiver, micro_batch] = end
        place, todo = self._next_action[receiver], self._todo[receiver]
        if place < len(todo) and todo[place] == (kind, micro_batch):
            self._await(receiver)
        return end


def stage_times(
    *,
    num_blocks: Sequence[float],
    speed: Sequence[float],
    link_rate: Sequence[float],
    micro_batches: Sequence[float],
    o_f: float,
    o_b: float,
    o_b_scaling: Scaling,
    t0: float | Array,
    z_bits: float,
    g_bits: float,
    act_scaling: Scaling,
    lat: float | Array,
    weight_share: float = 0.5,
    num_slices: int = 1,
    attention_share: float = 0.0,
) -> StageTimes:
    """Times for :func:`simulate_pipeline` from what devices and TEBs cost; t0 and lat count half in each direction.

    Q token slices have a part in Q of a micro-batch's FLOP and bits, but for the attention's, which grow along the
    sequence: slice q's tokens see those of the slices before and half of their own, so that it has (2q + 1) / Q^2 of
    them. Each takes t0 and lat of its own.

    Parameters
    ----------
    num_blocks : (S,), TEBs of the stages, in pipeline order; where they cost differently, their work in costliest ones
    speed : (S,), phi_k f_k [FLOP/s]
    link_rate : (S,), r_k of each stage's device [bit/s]; the last one's does not matter
    micro_batches : (m,), samples of each
    o_f : forward FLOP of one TEB for one sample
    o_b : backward FLOP of one TEB, for one micro-batch or for one sample, as ``o_b_scaling`` says
    t0 : seconds of one TEB for one micro-batch beside its FLOP, or (S,) of each stage's device
    z_bits, g_bits : activations and gradient, of one micro-batch or of one sample, as ``act_scaling`` says [bit]
    lat : seconds of one micro-batch on a link beside its bits, both directions together, or (S,)
    weight_share : part of o_b that makes weight gradients
    num_slices : Q, equal token slices of each micro-batch
    attention_share : part of o_f and o_b that are products of queries with keys, and of their weights with values

    Returns
    -------
    Both directions of a link run at the rate of the device before it, as in Eq. (15).
    """
    samples = np.asarray(micro_batches, dtype=np.float64)
    blocks, rate = np.asarray(num_blocks, dtype=np.float64)[:, None], np.asarray(link_rate, dtype=np.float64)[:-1, None]
    flops = np.asarray(speed, dtype=np.float64)[:, None]
    t0 = np.broadcast_to(np.asarray(t0, dtype=np.float64), (len(blocks),))[:, None]
    lat = np.broadcast_to(np.asarray(lat, dtype=np.float64), (len(blocks),))[:-1, None]
    backward = o_b * (samples if o_b_scaling == "sample" else np.ones_like(samples))
    units = samples if act_scaling == "sample" else np.ones_like(samples)
    of_attention = (2 * np.arange(num_slices) + 1) / num_slices**2
    part = 1 / num_slices + attention_share * (of_attention - 1 / num_slices)
    samples, backward = (np.outer(of_whole, part).ravel() for of_whole in (samples, backward))
    units = np.repeat(units / num_slices, num_slices)
    return StageTimes(
        blocks * (samples * o_f / flops + t0 / 2),
        blocks * (backward / flops + t0 / 2),
        units * z_bits / rate + lat / 2,
        units * g_bits / rate + lat / 2,
        blocks * weight_share * backward / flops,
    )
