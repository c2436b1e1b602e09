"""A device that is lost in the middle of a step costs seconds, and not one bit of the result."""

import pytest
from recovery_cases import assert_equal, control_unit, faults, initial, kill, once, train, within

HANG_S = 120.0


@pytest.fixture(scope="module")
def units(local_ray):
    made = []

    def make(**more):
        made.append(control_unit(f"recovery-{len(made)}", **more))
        return made[-1]

    yield make
    for unit in made:
        unit.close()


@pytest.fixture(scope="module")
def undisturbed(units):
    """Weights and losses of two rounds without a fault."""
    unit = units()
    weights, results = train(unit, initial())
    unit.close()
    assert faults(results) == []
    return weights, results


@pytest.mark.parametrize(
    ("kind", "micro_batch", "device"),
    [("F", 1, 1), ("F", 3, 2), ("G", 2, 0), ("B", 0, 0)],
    ids=["in-forward", "the-last-stage", "in-backward", "when-others-may-have-stepped"],
)
def test_a_device_killed_in_a_step_changes_nothing(units, undisturbed, kind, micro_batch, device):
    expected, results = undisturbed
    unit = units()
    struck = once(unit, round_=2, step=2, kind=kind, micro_batch=micro_batch, act=lambda: kill(unit, device))
    weights, disturbed = within(HANG_S, train, unit, initial())
    assert struck
    assert_equal(weights, expected)
    assert [r.loss for r in disturbed] == [r.loss for r in results]
    [(what, who, round_, step)] = faults(disturbed)
    assert (what, who, round_) == ("device", device, 2)
    # One that had done its work already is missed when the next thing is asked of it.
    assert step == 2 if kind != "B" else step in (2, 3)
    [fault] = disturbed[1].report["faults"]
    assert fault["recovered"] and 0 < fault["seconds"] < HANG_S and fault["bytes"] > 0
    # Two devices have done the work of three.
    assert device not in [segment.device for segment in unit.pipeline.segments]
    unit.close()
