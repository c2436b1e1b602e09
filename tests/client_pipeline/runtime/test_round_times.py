"""Times of a round, read from events whose true times are known: two machines whose clocks differ by an hour."""

import pytest

from client_pipeline.partition.plan import Segment
from client_pipeline.runtime.control_unit.round_report import medians, round_times, timeline
from client_pipeline.runtime.devices.batch_run import ExchangeTimes
from client_pipeline.runtime.devices.device import StepReport
from client_pipeline.runtime.devices.step_outcome import StepOutcome
from client_pipeline.runtime.stage.stage import DoneAction

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


def one_stage():
    """One device with two TEBs and three micro-batches, of which the last is never waited for."""
    actions = [
        DoneAction("F", 0, 1.0, 2.0, 0.5, 1.0),
        DoneAction("F", 1, 2.1, 2.4, 2.0, 2.1),
        DoneAction("F", 2, 2.4, 3.4, 2.4, 2.4),
        DoneAction("B", 0, 3.9, 5.9, 3.6, 3.9),
        DoneAction("B", 1, 6.1, 7.0, 5.9, 6.1),
        DoneAction("B", 2, 7.0, 7.5, 7.0, 7.0001),
    ]
    exchange = [ExchangeTimes(0.9, 2.2, 3.2), ExchangeTimes(2.2, 2.9, 4.5), ExchangeTimes(3.6, 3.6001, 5.0)]
    return StepOutcome(
        loss_sum=0.0,
        weight=1,
        devices={3: StepReport(actions=actions, norm_sq=0.0)},
        link_bytes=0,
        decoder_norm_sq=None,
        segments=[Segment(3, 0, 1)],
        sizes=[4, 2, 3],
        exchange=exchange,
    )


def test_all_times_of_a_batch_by_hand():
    def entries(times):
        return [[samples, 1, pytest.approx(seconds)] for samples, seconds in times]

    # The clocks differ by a quarter of a second: activations are under way for 0.2 s at least, gradients for 0.7 s.
    # The second activation waits until the first has arrived; the first gradient is away for 3.9 - 0.25 - 3.2 s.
    of_four, of_two = (2.2 + 0.25 - 2.0) + 0.45, (2.9 + 0.25 - 2.45) + (6.1 - 0.25 - 4.5)
    assert round_times([outcome(), one_stage()]) == {
        "tebs": {"3": entries([(2, (0.3 + 0.9) / 2), (3, (1.0 + 0.5) / 2), (4, (1.0 + 2.0) / 2)])},
        "links": {"3": entries([(2, of_two), (4, of_four)])},
        "inlets": {"3": entries([(2, 2.1 - 1.0)])},
        "stream": entries([(2, 4.5 - 3.2), (3, 5.0 - 4.5), (4, 3.2 - 2.2)]),
        "pipeline_s": 7.5 - 1.0,
    }


def test_a_timeline_is_of_the_last_batch_and_begins_at_its_first_action():
    step = outcome(m=2, batches=2)
    lines = timeline(step)
    assert [line[:3] for line in lines[:3]] == [["F", 0, 0], ["B", 0, 0], ["F", 0, 1]]
    assert len(lines) == 2 * 2 * 2 and lines[0][3:] == [0.0, pytest.approx(2 * TEB_S)]
    # The second machine's clock is an hour ahead.
    assert [line[:3] for line in lines[4:]] == [[kind, 1, i] for i in (0, 1) for kind in "FB"]
    assert lines[4][3] == pytest.approx(HOUR + 2 * TEB_S + LINK_S)
