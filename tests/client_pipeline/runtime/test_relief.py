"""Less for slow devices within a round: only where the waits that are left take surely longer than the move."""

from types import SimpleNamespace

import pytest

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.control_unit.recovery import num_moved, saved_s
from client_pipeline.runtime.devices.block_moves import FIRST_BYTES_S, FIRST_MOVE_S, BlockPlacement

OLD = ClusterPlan(delta=(4, 2, 0), order=(0, 1), m=2)
NEW = ClusterPlan(delta=(1, 3, 2), order=(0, 1, 2), m=2)


def outcome(*busy_s, plan=OLD):
    devices = {s.device: SimpleNamespace(busy_s=busy_s[s.device]) for s in plan.segments()}
    return SimpleNamespace(devices=devices, segments=plan.segments())


def test_a_step_is_as_much_shorter_as_its_slowest_stage():
    # Device 0 takes 3 s a TEB, device 1 takes 1 s, and device 2, which has none yet, is taken to be like device 1.
    assert saved_s(outcome(12.0, 2.0), NEW, {0}) == pytest.approx(12.0 - 3.0)
    # Nobody else is known: the idle one is as slow.
    one = ClusterPlan(delta=(6, 0, 0), order=(0,), m=2)
    assert saved_s(outcome(18.0, plan=one), NEW, {0}) == pytest.approx(18.0 - 9.0)
    # Less for the slow one can be more for who is slower yet.
    assert saved_s(outcome(4.0, 8.0), NEW, {0}) < 0


def test_tebs_that_another_device_has_are_moved():
    assert num_moved(OLD.segments(), OLD.segments()) == 0
    assert num_moved(OLD.segments(), NEW.segments()) == 5


def test_a_move_takes_what_moves_have_taken_or_else_what_its_bytes_may():
    placement = BlockPlacement(SimpleNamespace(runtime=SimpleNamespace(timeout=1.0)), {})
    assert placement.seconds_of_move(3) == FIRST_MOVE_S
    placement.snapshots.bytes, placement.snapshots.taken = int(8 * FIRST_BYTES_S), 2
    placement._owner = {0: 0, 1: 0, 2: 1, 3: 1}
    assert placement.seconds_of_move(3) == pytest.approx(FIRST_MOVE_S + 3.0)
    placement.moved_blocks, placement.move_s = 4, 10.0
    assert placement.seconds_of_move(2) == pytest.approx(5.0)
