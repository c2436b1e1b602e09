"""Schedules are data: literal timetables, and what every schedule must keep over a grid of sizes."""

import itertools

import pytest

from client_pipeline.timetable.schedules import (
    SCHEDULES,
    Action,
    actions,
    held_at_backward,
    schedules_of,
    splits_backward,
    timetable,
    unit_timetable,
)

GRID = [(s, m) for s in range(1, 7) for m in range(1, 10)]


def test_gpipe_of_three_stages_is_the_documented_timetable():
    assert timetable("gpipe", 3, 3).splitlines() == [
        "stage 0 | F0 F1 F2 .. .. .. .. B0 B1 B2",
        "stage 1 | .. F0 F1 F2 .. .. B0 B1 B2 ..",
        "stage 2 | .. .. F0 F1 F2 B0 B1 B2 .. ..",
    ]


def test_1f1b_of_three_stages_alternates_after_its_warm_up():
    assert timetable("1f1b", 3, 4).splitlines() == [
        "stage 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3",
        "stage 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..",
        "stage 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..",
    ]


def test_zb_h1_of_three_stages_fills_the_waits_with_weight_gradients():
    assert timetable("zb-h1", 3, 4).splitlines() == [
        "stage 0 | F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "stage 1 | .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "stage 2 | .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_zb_h1_waits_for_a_third_of_the_time_of_1f1b_and_holds_no_more():
    for num_stages, m in GRID:
        # Of 3 m units of work; a backward pass in one is two units long, which a timetable of units cannot show.
        length = len(unit_timetable("zb-h1", num_stages, m)[0])
        assert length == 3 * m + (num_stages - 1) + max(0, num_stages - m)
        for stage in range(num_stages):
            held = {s: max(h.total for h in held_at_backward(s, stage, num_stages, m)) for s in SCHEDULES}
            assert held["zb-h1"] == min(num_stages, m)
            assert held["1f1b"] == min(num_stages - stage, m)
            assert held["gpipe"] == m


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_goes_forward_once_and_then_backward_once(schedule):
    for stage, num_stages, m in [(stage, s, m) for s, m in GRID for stage in range(s)]:
        listed = actions(schedule, stage, num_stages, m)
        kinds = "FBW" if splits_backward(schedule) else "FB"
        assert sorted(listed) == sorted(Action(kind, i) for kind in kinds for i in range(m))
        for first, second in itertools.pairwise(kinds):
            assert all(listed.index(Action(first, i)) < listed.index(Action(second, i)) for i in range(m))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_end_without_dead_lock_and_without_idle_time_beyond_the_pipelines(schedule):
    for num_stages, m in GRID:
        rows = unit_timetable(schedule, num_stages, m)
        if not splits_backward(schedule):
            assert {len(row) for row in rows} == {2 * (num_stages + m - 1)}
        for stage, row in enumerate(rows):
            assert [action for action in row if action] == actions(schedule, stage, num_stages, m)


def test_1f1b_never_holds_more_than_s_activations():
    for stage, num_stages, m in [(stage, s, m) for s, m in GRID for stage in range(s)]:
        held, most = 0, 0
        for kind, _ in actions("1f1b", stage, num_stages, m):
            held += 1 if kind == "F" else -1
            most = max(most, held)
        assert most == min(num_stages - stage, m)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_neighbours_agree_on_the_order_in_which_tensors_cross_a_link(schedule):
    # gloo's tags would hide a difference; a sender that runs ahead of its reader would cost memory, though.
    for num_stages, m in GRID:
        for kind in "FB":
            orders = {
                tuple(a.micro_batch for a in actions(schedule, s, num_stages, m) if a.kind == kind)
                for s in range(num_stages)
            }
            assert orders == {tuple(range(m))}


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"schedule: expected one of gpipe, 1f1b, zb-h1, found 'zigzag'"):
        actions("zigzag", 0, 2, 4)
    with pytest.raises(ValueError, match="found 'zigzag'"):
        timetable("zigzag", 2, 4)


@pytest.mark.parametrize(
    ("name", "allowed"), [("auto", SCHEDULES), *((schedule, (schedule,)) for schedule in SCHEDULES)]
)
def test_a_setting_allows_one_schedule_or_all(name, allowed):
    assert schedules_of(name) == allowed
