"""A deadline that follows the progress it has seen."""

import pytest

from client_pipeline.runtime.deadline import ProgressDeadline


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def after(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def seen(clock, intervals, **bounds):
    deadline = ProgressDeadline(**{"most_s": 100.0, "least_s": 1.0, **bounds}, clock=clock)
    for interval in intervals:
        clock.after(interval)
        deadline.progress()
    return deadline


def test_before_anything_was_seen_only_the_upper_bound_holds(clock):
    deadline = seen(clock, [])
    assert deadline.allowance_s == 100.0
    clock.after(99.9)
    assert not deadline.overdue and deadline.left_s == pytest.approx(0.1)
    clock.after(0.1)
    assert deadline.overdue and deadline.expired and deadline.left_s == 0


def test_a_first_allowance_may_be_shorter(clock):
    assert seen(clock, [], first_s=7.0).allowance_s == 7.0


def test_an_even_rhythm_is_held_to_and_an_uneven_one_is_given_more(clock):
    assert seen(clock, [3.0] * 9).allowance_s == pytest.approx(3.0)
    # Median 3, median difference 1: 3 + 8 * 1.4826.
    assert seen(clock, [1.0, 2.0, 3.0, 4.0, 5.0]).allowance_s == pytest.approx(3.0 + 8 * 1.4826)


def test_one_wait_of_many_minutes_does_not_make_the_next_ones_long(clock):
    assert seen(clock, [2.0] * 20 + [90.0]).allowance_s == pytest.approx(2.0)


def test_the_allowance_stays_between_its_bounds(clock):
    assert seen(clock, [0.001] * 5).allowance_s == 1.0
    assert seen(clock, [90.0] * 5, most_s=30.0).allowance_s == 30.0
    assert seen(clock, [0.001] * 5, most_s=0.2).allowance_s == 0.2


def test_what_is_overdue_may_be_extended_but_not_beyond_the_end(clock):
    deadline = seen(clock, [10.0] * 5)
    for waited, overdue in ((9.9, False), (0.2, True)):
        clock.after(waited)
        assert deadline.overdue is overdue
    deadline.extend()
    assert not deadline.overdue and not deadline.expired
    clock.after(10.0)
    assert deadline.overdue
    for _ in range(9):
        deadline.extend()
    assert not deadline.overdue
    clock.after(80.0)
    assert deadline.overdue and deadline.expired


def test_progress_ends_an_extension_and_a_pause_is_no_progress(clock):
    deadline = seen(clock, [2.0] * 5)
    clock.after(3.0)
    deadline.extend()
    deadline.progress()
    clock.after(2.5)
    assert deadline.overdue
    clock.after(50.0)
    deadline.begin()
    assert not deadline.overdue and deadline.allowance_s == pytest.approx(2.0)
