"""Plans: the file, every refusal with its message, and the uniform plan against its definition."""

import dataclasses
import itertools
import json
import math

import pytest

from client_pipeline.partition.plan import (
    PLAN_FORMAT,
    ClusterPlan,
    read_plans,
    uniform_plan,
    write_plans,
)

PLAN = ClusterPlan(delta=(2, 0, 3), order=(2, 0), m=4)
GB = 1e9


def check(plan=PLAN, **changes):
    given = {"num_blocks": 5, "batch_size": 8, "num_devices": 3, **changes}
    plan.check(**given)


# Segments and the file.


def test_a_plan_file_reads_back_as_it_was_written(tmp_path):
    plans = [
        PLAN,
        ClusterPlan(delta=(0, 5), order=(1,), m=3, schedule="1f1b", token_slices=4, channel=2, power_w=0.25),
        ClusterPlan(delta=(5,), order=(0,), m=1, selected=False),
    ]
    path = tmp_path / "plan.json"
    write_plans(path, plans)
    assert read_plans(path) == plans
    document = json.loads(path.read_text())
    assert document["format"] == PLAN_FORMAT == "collapipe-plan/1"
    keys = {"selected", "delta", "order", "m", "schedule", "token_slices", "channel", "power_w"}
    assert [set(cluster) for cluster in document["clusters"]] == [keys] * 3


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([1, 2], r"here: expected an object with delta and m, found list"),
        ({"delta": [1], "m": 1, "detla": 2}, r"here: unknown key 'detla'; expected channel, delta, m, order, power_w"),
        ({"m": 1}, r"here: delta: expected a list of integers, found None"),
        ({"delta": [1, 2.5], "m": 1}, r"here: delta: expected a list of integers, found \[1, 2\.5\]"),
        ({"delta": [True], "m": 1}, r"here: delta: expected a list of integers, found \[True\]"),
        ({"delta": [1], "order": "0", "m": 1}, r"here: order: expected a list of integers, found '0'"),
        ({"delta": [1]}, r"here: m: expected an integer, found None"),
        ({"delta": [1], "m": 2.0}, r"here: m: expected an integer, found 2\.0"),
        ({"delta": [1], "m": True}, r"here: m: expected an integer, found True"),
        ({"delta": [1], "m": 1, "token_slices": "2"}, r"here: token_slices: expected an integer, found '2'"),
        ({"delta": [1], "m": 1, "selected": 1}, r"here: selected: expected true or false, found 1"),
        ({"delta": [1], "m": 1, "channel": "a"}, r"here: channel: expected an integer or null, found 'a'"),
        ({"delta": [1], "m": 1, "power_w": -0.5}, r"here: power_w: expected a number of watts of at least 0 .* -0\.5"),
        ({"delta": [1], "m": 1, "power_w": math.inf}, r"here: power_w: .* found inf"),
    ],
)
def test_a_plan_of_wrong_form_is_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        ClusterPlan.from_dict(raw, "here")


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"plan: no file .*nowhere\.json; create it, or leave plan empty"):
        read_plans(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"plan\.json: expected JSON, "),
        ("[]", r"plan\.json: format: expected 'collapipe-plan/1', found 'list'"),
        ('{"format": "collapipe-plan/2", "clusters": []}', r"plan\.json: format: .* found 'collapipe-plan/2'"),
        ('{"format": "collapipe-plan/1"}', r"plan\.json: clusters: expected a list with one plan .* found None"),
        ('{"format": "collapipe-plan/1", "clusters": []}', r"plan\.json: clusters: expected a list .* found \[\]"),
        (
            '{"format": "collapipe-plan/1", "clusters": [{"delta": [1], "m": 1}, {"delta": [1]}]}',
            r"plan\.json: clusters\[1\]: m: expected an integer",
        ),
    ],
)
def test_a_plan_file_of_wrong_form_is_refused(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_plans(path)


# Plans that do not fit.


def test_a_plan_that_fits_is_accepted():
    check()
    check(memory=[2 * GB, 0.0, 3 * GB], block_memory=GB)
    check(dataclasses.replace(PLAN, order=(1, 2, 0)))
    check(dataclasses.replace(PLAN, m=1))
    check(dataclasses.replace(PLAN, m=8))


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, {"num_devices": 4}, r"plan: delta has 3 entries, expected one for each of the K = 4 devices"),
        ({"delta": (6, -1, 0)}, {}, r"plan: delta \[6, -1, 0\] has a negative entry"),
        ({}, {"num_blocks": 6}, r"plan: delta \[2, 0, 3\] sums to 5, expected the model's L = 6 TEBs; change delta"),
        ({"delta": (0, 0, 0), "order": ()}, {}, r"plan: delta \[0, 0, 0\] sums to 0, expected the model's L = 5"),
        ({"order": (2,)}, {}, r"plan: order \[2\] must name each device with delta > 0, \[0, 2\], once, as an index"),
        ({"order": (2, 0, 2)}, {}, r"plan: order \[2, 0, 2\] must name .* once, as an index"),
        ({"order": (2, 0, 3)}, {}, r"plan: order \[2, 0, 3\] .* as an index from 0 to 2"),
        ({"order": (2, 0, -1)}, {}, r"plan: order \[2, 0, -1\] .* as an index from 0 to 2"),
        ({"m": 0}, {}, r"plan: m = 0 micro-batches, expected 1 <= m <= b = 8; change m or batch-size"),
        ({"m": 9}, {}, r"plan: m = 9 micro-batches, expected 1 <= m <= b = 8"),
        ({"schedule": "zigzag"}, {}, r"plan: schedule 'zigzag', expected one of gpipe, 1f1b"),
        ({"token_slices": 0}, {}, r"plan: token_slices = 0, expected 1, for whole micro-batches, to 64"),
        ({"token_slices": 65}, {}, r"plan: token_slices = 65, expected 1"),
        (
            {},
            {"memory": [2 * GB, GB, 2.5 * GB], "block_memory": GB},
            r"plan: device 2 holds 3 TEBs of 1 GB = 3 GB, but has 2\.5 GB \(C7\); give it fewer TEBs",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(changes, given, message):
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(PLAN, **changes), **given)


# The uniform plan.


def uniform_by_definition(speed, cap, num_blocks, batch_size):
    """S = min(K, L, ceil(L / cap) + 1) fastest devices, even parts, larger ones to faster devices; None: no fit.

    All even deltas over any set of devices are listed, and the one that the definition describes is picked out.
    """
    num_devices = len(speed)
    if cap == 0:
        return None
    fewest = next(s for s in range(1, num_blocks + 1) if s * cap >= num_blocks)
    num_segments = min(num_devices, num_blocks, fewest + 1)
    fits = [
        delta
        for delta in itertools.product(range(cap + 1), repeat=num_devices)
        if sum(delta) == num_blocks
        and sum(d > 0 for d in delta) == num_segments
        # Parts differ by at most one.
        and max(delta) - min(d for d in delta if d) <= 1
        # A device that holds more than another is at least as fast; all speeds differ here.
        and all(speed[i] > speed[j] for i in range(num_devices) for j in range(num_devices) if delta[i] > delta[j])
    ]
    assert len(fits) <= 1
    return (fits[0], min(8, batch_size)) if fits else None


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_blocks", [1, 2, 4, 5, 7])
def test_uniform_plan_is_the_one_of_its_definition(num_devices, num_blocks):
    speed = [3.0, 9.0, 1.0, 7.0, 5.0][:num_devices]
    for cap, batch_size in itertools.product((0, 1, 2, 3, 7), (5, 64)):
        given = {"memory": [cap * 0.375 * GB + 1.0] * num_devices, "block_memory": 0.375 * GB, "num_blocks": num_blocks}
        expected = uniform_by_definition(speed, cap, num_blocks, batch_size)
        if expected is None:
            with pytest.raises(ValueError, match=rf"{num_blocks} TEBs of 0\.375 GB do not fit {num_devices} devices"):
                uniform_plan(speed=speed, batch_size=batch_size, **given)
            continue
        plan = uniform_plan(speed=speed, batch_size=batch_size, **given)
        assert (plan.delta, plan.m) == expected
        plan.check(num_devices=num_devices, batch_size=batch_size, **given)


def test_uniform_plan_fits_devices_of_unequal_memory():
    for caps in itertools.product(range(4), repeat=4):
        given = {"memory": [c + 0.5 for c in caps], "block_memory": 1.0, "num_blocks": 5, "batch_size": 8}
        try:
            plan = uniform_plan(speed=[4.0, 3.0, 2.0, 1.0], **given)
        except ValueError as error:
            assert "do not fit 4 devices" in str(error)
            continue
        plan.check(num_devices=4, **given)
        parts = [plan.delta[k] for k in plan.order]
        assert plan.order == tuple(range(len(parts)))
        assert parts == sorted(parts, reverse=True) and parts[0] - parts[-1] <= 1


def test_uniform_plan_without_devices_is_refused():
    with pytest.raises(ValueError, match="do not fit 0 devices"):
        uniform_plan(speed=[], memory=[], block_memory=GB, num_blocks=4, batch_size=4)
