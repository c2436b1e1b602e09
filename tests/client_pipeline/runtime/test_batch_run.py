"""One batch as the control unit sees it: what it waits for, and what ends a wait."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from client_pipeline.link.base import Gradient, LinkError
from client_pipeline.partition.families import build_embedding
from client_pipeline.partition.micro_batches import StepId
from client_pipeline.runtime import batch_run
from client_pipeline.runtime.batch_run import BatchRun
from client_pipeline.runtime.faults import KILLED, DeviceFault, PipelineError
from client_pipeline.runtime.stage import StepOrder
from client_pipeline.runtime.transport import BACKWARD, FORWARD
from helpers.recovery_cases import SPEC, within

SIZES = [2, 2, 1]
SECONDS = 60.0


class Ring:
    """Two devices that hand on what they get; a test may hold them up, or have them fail."""

    size = 3

    def __init__(self):
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.error = None
        self.sent = []
        self._more = threading.Condition()

    def send(self, tensor, peer, direction, micro_batch):
        with self._more:
            self.sent.append((peer, direction, micro_batch, tuple(tensor.shape), tensor))
            self._more.notify_all()

    def _has_gone(self, direction, micro_batch):
        return any(entry[1:3] == (direction, micro_batch) for entry in self.sent)

    def receive(self, shape, peer, direction, micro_batch):
        def wait():
            assert self.goes_on.wait(SECONDS)
            if self.error:
                raise self.error
            # Nothing comes out that has not gone in.
            with self._more:
                assert self._more.wait_for(lambda: self._has_gone(direction, micro_batch), SECONDS)
            return torch.full(shape, 1.0 + micro_batch)

        assert (peer, direction) in ((2, FORWARD), (1, BACKWARD))
        return SimpleNamespace(wait=wait)


class Decoder:
    """Answers each micro-batch with a gradient of twos."""

    def __init__(self):
        self.received = []
        self.tied_asked = 0
        self.dropped = 0
        self.gradient = lambda i: torch.full((SIZES[i], 5, 16), 2.0)
        self.tied = {}
        self._answers = []
        self._more = threading.Condition()

    def send(self, micro_batch, hidden_BTD, mask_BT, targets):
        with self._more:
            self.received.append((micro_batch, hidden_BTD, mask_BT, sorted(targets)))
            self._answers.append(len(self.received) - 1)
            self._more.notify_all()

    def receive(self):
        with self._more:
            assert self._more.wait_for(lambda: self._answers, SECONDS)
            i = self._answers.pop(0)
        if isinstance(gradient := self.gradient(i), Exception):
            raise gradient
        return Gradient(micro_batch=i, tensor=gradient, loss_sum=10.0**i, norm_sq=7.0 if i == 2 else None)

    def receive_tied(self):
        self.tied_asked += 1
        return self.tied

    def drop_step(self):
        self.dropped += 1


class Pool:
    """Devices that are there, unless a test says what is wrong."""

    name = "cluster"

    def __init__(self):
        self.fault = None
        self.asked = []
        self.overdue = None

    def fault_of(self, reports, failed):
        self.asked.append(failed)
        return self.fault

    def look_after(self, reports, deadline, what):
        if self.overdue:
            raise self.overdue(f"{sorted(reports)} {deadline} {what}")


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(batch_run, "WATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(batch_run, "GRACE_S", 1.0)
    made = SimpleNamespace(ring=Ring(), link=Decoder(), pool=Pool(), arrived=[], embedding=build_embedding(SPEC))
    made.threads = ThreadPoolExecutor(3)

    def start(shared=(), first=0):
        ids = torch.arange(25).reshape(5, 5) + 3
        mask_BT = torch.ones(5, 5, dtype=torch.bool)
        order = StepOrder(
            step=StepId(seed=0, round=1, step=1, cluster=0, first=first),
            schedule="gpipe",
            sizes=SIZES,
            mask_BT=mask_BT,
            width=16,
        )
        run = BatchRun(
            order=order,
            batch={"input_ids": ids, "attention_mask": mask_BT, "labels": ids.flip(1)},
            embedding=made.embedding,
            transport=made.ring,
            link=made.link,
            tied_parameters=dict(shared),
            precision="float32",
            progress=lambda kind, i: made.arrived.append((kind, i)),
            threads=made.threads,
        )
        run.start()
        return run

    made.start = start
    yield made
    made.ring.goes_on.set()
    made.threads.shutdown(wait=False)


def watch(parts, run, deadline=None):
    return within(SECONDS, run.watch, parts.pool, {0: "report", 4: "report"}, deadline)


def test_a_batch_goes_round_the_ring_in_micro_batches(parts):
    answer = watch(parts, parts.start(first=3))
    assert (answer.loss_sum, answer.norm_sq, answer.tied) == (111.0, 7.0, {})
    places = [(peer, direction, i, shape) for peer, direction, i, shape, _ in parts.ring.sent]
    to_first = [place for place in places if place[1] == FORWARD]
    to_last = [place for place in places if place[1] == BACKWARD]
    shapes = [(size, 5, 16) for size in SIZES]
    assert to_first == [(1, FORWARD, i, shape) for i, shape in enumerate(shapes)]
    assert to_last == [(2, BACKWARD, i, shape) for i, shape in enumerate(shapes)]
    assert all(bool((tensor == 2.0).all()) for _, direction, _, _, tensor in parts.ring.sent if direction == BACKWARD)
    # The decoder counts the step's micro-batches over all of its batches, and gets what the last device has made.
    assert [(i, float(hidden.mean()), len(mask), names) for i, hidden, mask, names in parts.link.received] == [
        (3 + i, 1.0 + i, size, ["labels"]) for i, size in enumerate(SIZES)
    ]
    for kind in "FGB":
        assert [i for what, i in parts.arrived if what == kind] == [0, 1, 2]
    assert all(p.grad is not None for p in parts.embedding.parameters())
    assert parts.link.tied_asked == 0


def test_the_gradient_of_tied_matrices_is_asked_for_once_and_checked(parts):
    matrix = torch.nn.Parameter(torch.zeros(3, 2))
    parts.link.tied = {"out": torch.ones(3, 2)}
    answer = watch(parts, parts.start({"out": matrix}))
    assert answer.tied.keys() == {"out"} and parts.link.tied_asked == 1
    # What the first batch has sent would pass for the second's.
    parts.ring, parts.link = Ring(), Decoder()
    parts.link.tied = {"out": torch.ones(2, 3)}
    with pytest.raises(LinkError, match="the decoder's gradient of the tied matrix out: expected shape"):
        watch(parts, parts.start({"out": matrix}))


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        (torch.zeros(2, 5, 8), r"torch\.float32 of shape \[2, 5, 8\]"),
        (torch.zeros(2, 5, 16, dtype=torch.float64), r"torch\.float64 of shape \[2, 5, 16\]"),
    ],
)
def test_a_gradient_that_does_not_fit_is_the_links_error(parts, gradient, found):
    parts.link.gradient = lambda i: gradient
    with pytest.raises(LinkError, match=rf"gradient of micro-batch 3 is {found}, expected float32 of \[2, 5, 16\]"):
        watch(parts, parts.start(first=3))
    # No device is asked: it is none of theirs.
    assert parts.pool.asked == [] or all(failed is None for failed in parts.pool.asked)


def test_a_device_at_fault_comes_before_what_the_thread_has_met(parts):
    parts.ring.error = RuntimeError("connection closed")
    parts.pool.fault = DeviceFault("device 4 is gone", KILLED, (4,))
    with pytest.raises(DeviceFault, match="device 4 is gone") as error:
        watch(parts, parts.start())
    assert error.value.__cause__ is parts.ring.error and parts.pool.asked[-1] is parts.ring.error


def test_what_a_thread_has_met_is_named_where_no_device_is_at_fault(parts):
    parts.ring.error = RuntimeError("connection closed")
    with pytest.raises(PipelineError, match="^cluster: connection closed$") as error:
        watch(parts, parts.start())
    assert not isinstance(error.value, DeviceFault)


def test_a_fault_is_found_while_the_threads_wait(parts):
    parts.ring.goes_on.clear()
    parts.pool.fault = DeviceFault("device 4 is gone", KILLED, (4,))
    with pytest.raises(DeviceFault, match="device 4 is gone"):
        watch(parts, parts.start())
    assert parts.pool.asked == [None]


def test_devices_are_looked_after_while_the_threads_wait(parts):
    parts.ring.goes_on.clear()
    parts.pool.overdue = PipelineError
    with pytest.raises(PipelineError, match=r"^\[0, 4\] soon a step was running$"):
        watch(parts, parts.start(), "soon")


def test_after_a_batch_was_given_up_nothing_is_added_to_the_embeddings_gradients(parts):
    parts.ring.goes_on.clear()
    parts.pool.overdue = PipelineError
    run = parts.start()
    with pytest.raises(PipelineError):
        watch(parts, run)
    threading.Timer(0.1, parts.ring.goes_on.set).start()
    run.abandon()
    # The threads had their time to end.
    assert parts.link.dropped == 1
    assert all(future.done() for future in run._futures)
