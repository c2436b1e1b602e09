"""Times of a round, read from events whose true times are known: two machines whose clocks differ by an hour."""

import dataclasses

import pytest

from client_pipeline.partition.plan import Segment
from client_pipeline.runtime.batch_run import ExchangeTimes
from client_pipeline.runtime.device import StepReport
from client_pipeline.runtime.round_times import medians, round_times
from client_pipeline.runtime.stage import DoneAction
from client_pipeline.runtime.step_outcome import StepOutcome

HOUR = 3600.0
TEB_S, LINK_S, OUTLET_S, DECODER_S = 0.1, 0.05, 0.02, 0.3


def outcome(m=3, link_s=LINK_S, batches=1, blocks=(2, 1)):
    """Two stages and a decoder that work one micro-batch after the other; only the first stage's link is slow."""
    first, second, exchange = [], [], []
    now = 1000.0
    for _ in range(batches):
        for i in range(m):
            begun = now
            f0 = begun + blocks[0] * TEB_S
            at_second = f0 + link_s
            f1 = at_second + blocks[1] * TEB_S
            at_cu = f1 + OUTLET_S
            answered = at_cu + DECODER_S
            back_at_second = answered + OUTLET_S
            b1 = back_at_second + blocks[1] * TEB_S
            back_at_first = b1 + link_s
            b0 = back_at_first + blocks[0] * TEB_S
            first += [
                DoneAction("F", i, begun, f0, begun - 0.01, begun),
                DoneAction("B", i, back_at_first, b0, f0, back_at_first),
            ]
            second += [
                DoneAction("F", i, *(t + HOUR for t in (at_second, f1, begun, at_second))),
                DoneAction("B", i, *(t + HOUR for t in (back_at_second, b1, f1, back_at_second))),
            ]
            exchange.append(ExchangeTimes(begun, at_cu, answered))
            now = b0
    return StepOutcome(
        loss_sum=0.0,
        weight=1,
        devices={4: StepReport(actions=first, norm_sq=0.0), 1: StepReport(actions=second, norm_sq=0.0)},
        link_bytes=0,
        decoder_norm_sq=None,
        segments=[Segment(4, 0, blocks[0] - 1), Segment(1, blocks[0], sum(blocks) - 1)],
        sizes=[3, 3, 2][:m] * batches,
        exchange=exchange,
    )


def test_every_time_is_found_whatever_the_clocks_say():
    measured = round_times([outcome(link_s=9.0), outcome(), outcome()])
    both = {3: 4, 2: 2}
    assert {n: count for n, count, _ in measured["tebs"]["4"]} == both
    for device in ("4", "1"):
        assert [seconds for *_, seconds in measured["tebs"][device]] == pytest.approx([2 * TEB_S] * 2)
    assert [seconds for *_, seconds in measured["links"]["4"]] == pytest.approx([2 * LINK_S] * 2, abs=1e-6)
    assert [seconds for *_, seconds in measured["links"]["1"]] == pytest.approx([2 * OUTLET_S] * 2, abs=1e-6)
    assert [seconds for *_, seconds in measured["stream"]] == pytest.approx([DECODER_S] * 2, abs=1e-6)


def test_a_step_of_several_batches_is_cut_into_them():
    one, two = round_times([outcome(m=2)]), round_times([outcome(m=2, batches=2)])
    assert two["pipeline_s"] == pytest.approx(one["pipeline_s"])
    assert [[n, 2 * count] for n, count, _ in one["tebs"]["4"]] == [[n, count] for n, count, _ in two["tebs"]["4"]]


def test_who_never_waited_does_not_know_when_a_message_came():
    step = outcome()
    second = [action._replace(asked=action.arrived) for action in step.devices[1].actions]
    measured = round_times(
        [StepOutcome(**vars(step) | {"devices": step.devices | {1: StepReport(actions=second, norm_sq=0.0)}})]
    )
    assert "4" not in measured["links"] and "4" in measured["tebs"]


def test_a_message_that_waits_for_another_on_the_link_counts_from_its_arrival():
    """Three messages leave at once; the link takes 0.05 s for each, one after the other."""
    step = outcome()
    first = {(a.kind, a.micro_batch): a for a in step.devices[4].actions}
    left = first["F", 0].end
    sent = [
        first[kind, i]._replace(end=left) if kind == "F" else first[kind, i] for i in range(3) for kind in ("F", "B")
    ]
    second = [
        action._replace(asked=left + HOUR, arrived=left + HOUR + LINK_S * (1 + action.micro_batch))
        if action.kind == "F"
        else action
        for action in step.devices[1].actions
    ]
    devices = {4: StepReport(actions=sent, norm_sq=0.0), 1: StepReport(actions=second, norm_sq=0.0)}
    measured = round_times([StepOutcome(**vars(step) | {"devices": devices})])
    assert [seconds for *_, seconds in measured["links"]["4"]] == pytest.approx([2 * LINK_S] * 2, abs=1e-6)


def test_steps_whose_backward_passes_are_in_two_have_three_actions_for_each_micro_batch():
    step = outcome()
    for report in step.devices.values():
        report.actions.extend(DoneAction("W", i, HOUR, HOUR + 0.01) for i in range(3))
    measured = round_times([step])
    # The gradients of weights count for the TEBs of their micro-batch.
    assert {samples: count for samples, count, _ in measured["tebs"]["4"]} == {3: 2, 2: 1}


def test_a_step_that_is_not_whole_tells_nothing():
    step = outcome()
    broken = StepOutcome(**vars(step) | {"exchange": step.exchange[:1]})
    assert round_times([broken]) == {"tebs": {}, "links": {}, "inlets": {}, "stream": [], "pipeline_s": 0.0}


def test_medians_are_taken_size_by_size():
    assert medians([(2, 1.0), (4, 9.0), (2, 3.0), (2, 2.0), (4, -1.0)]) == [[2, 3, 2.0], [4, 2, 4.5]]


def test_the_way_in_is_the_time_between_inputs_that_the_first_device_waited_for():
    one = outcome()
    report = one.devices[4]
    # The second input was there already, so that nobody knows since when; the third one came 0.7 s after it.
    arrivals = {0: (0.0, 1.0), 1: (5.0, 5.0), 2: (5.0, 5.7)}
    passes = [a._replace(asked=arrivals[a.micro_batch][0], arrived=arrivals[a.micro_batch][1]) for a in report.actions]
    assert round_times([with_first(one, passes)])["inlets"] == {}
    arrivals[1] = (1.2, 5.0)
    passes = [a._replace(asked=arrivals[a.micro_batch][0], arrived=arrivals[a.micro_batch][1]) for a in report.actions]
    [small, large] = round_times([with_first(one, passes)])["inlets"]["4"]
    assert small == [2, 1, pytest.approx(0.7)] and large == [3, 1, pytest.approx(4.0)]


def with_first(one, actions):
    """Give the outcome with other actions of the first device."""
    return dataclasses.replace(one, devices=one.devices | {4: dataclasses.replace(one.devices[4], actions=actions)})
