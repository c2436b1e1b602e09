"""Messages of a stage in one step, and their times where its pace is set."""

import collections
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.stage import stage as stage_module
from client_pipeline.runtime.stage.stage import StepOrder, run_actions
from client_pipeline.runtime.transport.transport import BACKWARD, FORWARD
from client_pipeline.timetable import pacing
from client_pipeline.timetable.event_simulator import StageTimes, simulate_pipeline
from client_pipeline.timetable.pacing import Pace, StagePace
from client_pipeline.timetable.schedules import SCHEDULES, actions
from helpers.clocks import Clock

STEP = StepId(seed=0, round=1, step=1, cluster=0)


class Wire:
    """A place in a ring of four; says what was posted and sent, in the order of both."""

    def __init__(self, rank, size=4):
        self.rank, self.size = rank, size
        self.log = []
        self.shapes = {}

    def receive(self, shape, peer, direction, micro_batch):
        self.log.append(("post", peer, direction, micro_batch))
        self.shapes[direction, micro_batch] = shape
        return SimpleNamespace(wait=lambda: (direction, micro_batch))

    def send(self, tensor, peer, direction, micro_batch):
        self.log.append(("send", peer, direction, micro_batch))
        assert tensor == (direction, micro_batch)

    def flush(self):
        self.log.append("flush")


class Computed:
    """Hands on what it gets, and says with which mask."""

    def __init__(self, clock=None, seconds=0.0):
        self.clock, self.seconds = clock, seconds
        self.masks = []
        self.splits = []
        self.weights = []

    def _pass(self, step, micro_batch, x, mask_BT, splits=False, forward_only=False):
        assert step is STEP
        self.splits.append(splits)
        if self.clock:
            self.clock.now += self.seconds
        self.masks.append((micro_batch, tuple(mask_BT[:, 0].tolist())))
        return x

    forward = backward = _pass

    def backward_weights(self, micro_batch):
        self.weights.append(micro_batch)
        if self.clock:
            self.clock.now += self.seconds


def order(sizes=(2, 1, 1), schedule="gpipe", **more):
    mask_BT = torch.arange(sum(sizes))[:, None].expand(-1, 5)
    return StepOrder(step=STEP, schedule=schedule, sizes=list(sizes), mask_BT=mask_BT, width=8, **more)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_hands_everything_on_to_its_neighbours(rank, schedule):
    wire, stage = Wire(rank), Computed()
    done = run_actions(stage, wire, order(schedule=schedule))
    assert [(a.kind, a.micro_batch) for a in done] == [tuple(a) for a in actions(schedule, rank - 1, 3, 3)]
    following = (rank + 1) % 4
    sent = [entry[1:] for entry in wire.log if entry[0] == "send"]
    assert sent == [
        (following, FORWARD, a.micro_batch) if a.kind == "F" else (rank - 1, BACKWARD, a.micro_batch)
        for a in done
        if a.kind != "W"
    ]
    is_split = schedule == "zb-h1"
    assert stage.weights == ([0, 1, 2] if is_split else []) and any(stage.splits) == is_split
    posted = {entry[1:] for entry in wire.log if entry[0] == "post"}
    assert posted == {(rank - 1, FORWARD, i) for i in range(3)} | {(following, BACKWARD, i) for i in range(3)}
    assert wire.log[-1] == "flush"
    # Each micro-batch with its own rows of the mask.
    assert set(stage.masks) == {(0, (0, 1)), (1, (2,)), (2, (3,))}
    assert all(action.start <= action.end for action in done)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_runs_forward_alone_neither_awaits_nor_sends_a_gradient(schedule):
    wire, stage = Wire(2), Computed()
    done = run_actions(stage, wire, order(schedule=schedule, forward_only=True))
    assert [(a.kind, a.micro_batch) for a in done] == [("F", 0), ("F", 1), ("F", 2)]
    assert {entry[1:] for entry in wire.log if entry[0] == "post"} == {(1, FORWARD, i) for i in range(3)}
    assert [entry[1:] for entry in wire.log if entry[0] == "send"] == [(3, FORWARD, i) for i in range(3)]
    assert stage.weights == [] and wire.log[-1] == "flush"


# Paced.


@pytest.fixture
def clock(monkeypatch):
    made = Clock(now=10.0)
    monkeypatch.setattr(pacing, "time", made)
    monkeypatch.setattr(stage_module, "time", made)
    return made


PACE = StagePace([2.0, 3.0], [4.0, 5.0], [0.5, 0.25], [0.125, 1.0], [1.5, 2.0])


def test_a_paced_stage_computes_and_sends_as_long_as_its_profile_says(clock):
    pace = Pace([StagePace(*[[9.0] * 2] * 5), PACE, PACE], uplink_s=0.0)
    done = run_actions(Computed(clock, 0.01), Wire(2), order((1, 1), pace=pace))
    seconds = [(a.kind, a.micro_batch, a.start - 10.0, a.end - 10.0) for a in done]
    assert sorted(entry[:2] for entry in seconds) == [("B", 0), ("B", 1), ("F", 0), ("F", 1)]
    now = 0.0
    for kind, i, start, end in seconds:
        compute, link = (
            (PACE.forward_s, PACE.forward_link_s) if kind == "F" else (PACE.backward_s, PACE.backward_link_s)
        )
        assert (start, end) == pytest.approx((now, now + compute[i]))
        now = end + link[i]
    assert clock.now == pytest.approx(10.0 + now)


class OwnTime(threading.local):
    """A clock that each thread has of its own, and that waits move on."""

    now = 0.0

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.now += seconds


class TimedWire:
    """A ring of threads: a tensor arrives when its sender sent it, by the sender's own clock."""

    def __init__(self, rank, size, boxes, clock):
        self.rank, self.size, self._boxes, self._clock = rank, size, boxes, clock

    def receive(self, shape, peer, direction, micro_batch):
        def wait():
            sent = self._boxes[peer, self.rank, direction, micro_batch].get(timeout=120)
            self._clock.now = max(self._clock.now, sent)
            return direction, micro_batch

        return SimpleNamespace(wait=wait)

    def send(self, tensor, peer, direction, micro_batch):
        self._boxes[self.rank, peer, direction, micro_batch].put(self._clock.now)

    def flush(self):
        pass


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_paced_stages_take_what_the_event_simulator_says(schedule, monkeypatch):
    """The executor itself, its action lists, waits and links; time alone is not the machine's."""
    clock = OwnTime()
    monkeypatch.setattr(pacing, "time", clock)
    monkeypatch.setattr(stage_module, "time", clock)
    generator = np.random.default_rng(3)
    for num_stages, m in ((1, 3), (2, 5), (4, 6), (5, 3)):
        passes = generator.uniform(0.1, 2.0, (2, num_stages, m))
        links = generator.uniform(0.1, 1.5, (2, num_stages - 1, m))
        times = StageTimes(*passes, *links, passes[1] * generator.uniform(0.0, 1.0, (num_stages, m)))
        pace, boxes = Pace.of(times, 0.0, 1.0), collections.defaultdict(queue.SimpleQueue)
        todo = order((1,) * m, schedule, pace=pace)
        for i in range(m):
            boxes[0, 1, FORWARD, i].put(0.0)
        last = {}

        def run(rank, last=last, todo=todo, boxes=boxes, size=num_stages + 1):
            clock.now = 0.0
            last[rank] = run_actions(Computed(), TimedWire(rank, size, boxes, clock), todo)[-1].end

        def answer(boxes=boxes, size=num_stages + 1, m=m):
            for i in range(m):
                boxes[0, size - 1, BACKWARD, i].put(boxes[size - 1, 0, FORWARD, i].get(timeout=120))

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(1, num_stages + 1)]
        threads.append(threading.Thread(target=answer, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert max(last.values()) == pytest.approx(simulate_pipeline(schedule, *times).makespan, rel=1e-9)


def test_a_pace_is_the_clusters_times_scaled_and_each_link_is_its_senders():
    forward, backward = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0]])
    sent_on, sent_back = np.array([[0.5, 0.25]]), np.array([[0.75, 1.5]])
    times = StageTimes(forward, backward, sent_on, sent_back, backward / 2)
    pace = Pace.of(times, uplink_s=10.0, scale=2.0)
    assert pace.uplink_s == 20.0
    assert pace.stages == [
        StagePace([2.0, 4.0], [10.0, 12.0], [1.0, 0.5], [0.0, 0.0], [5.0, 6.0]),
        StagePace([6.0, 8.0], [14.0, 16.0], [0.0, 0.0], [1.5, 3.0], [7.0, 8.0]),
    ]
    assert Pace.from_dict(pace.to_dict()) == pace
