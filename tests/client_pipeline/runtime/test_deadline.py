"""A deadline that follows the progress it has seen."""

import pytest

from client_pipeline.runtime.transport.deadline import ProgressDeadline
from helpers.clocks import Clock


@pytest.fixture
def clock():
    return Clock()


def seen(clock, intervals, **bounds):
    deadline = ProgressDeadline(**{"most_s": 100.0, "least_s": 1.0, **bounds}, clock=clock.monotonic)
    for interval in intervals:
        clock.sleep(interval)
        deadline.progress()
    return deadline


def test_before_anything_was_seen_only_the_upper_bound_holds(clock):
    deadline = seen(clock, [])
    assert deadline.allowance_s == 100.0
    clock.sleep(99.9)
    assert not deadline.overdue
    clock.sleep(0.1)
    assert deadline.overdue and deadline.expired


def test_an_even_rhythm_is_held_to_and_an_uneven_one_is_given_more(clock):
    assert seen(clock, [3.0] * 9).allowance_s == pytest.approx(3.0)
    # Median 3, median difference 1: 3 + 8 * 1.4826.
    assert seen(clock, [1.0, 2.0, 3.0, 4.0, 5.0]).allowance_s == pytest.approx(3.0 + 8 * 1.4826)


def test_the_allowance_stays_between_its_bounds(clock):
    assert seen(clock, [0.001] * 5).allowance_s == 1.0
    assert seen(clock, [90.0] * 5, most_s=30.0).allowance_s == 30.0
    assert seen(clock, [0.001] * 5, most_s=0.2).allowance_s == 0.2


def test_what_is_overdue_may_be_extended_but_not_beyond_the_end(clock):
    deadline = seen(clock, [10.0] * 5)
    for waited, overdue in ((9.9, False), (0.2, True)):
        clock.sleep(waited)
        assert deadline.overdue is overdue
    deadline.extend()
    assert not deadline.overdue and not deadline.expired
    clock.sleep(10.0)
    assert deadline.overdue
    for _ in range(9):
        deadline.extend()
    assert not deadline.overdue
    clock.sleep(80.0)
    assert deadline.overdue and deadline.expired
