"""Rounds after one that failed, moves within one: no TEB is computed twice, no gradient or step counts twice."""

from dataclasses import replace

import numpy as np
import pytest

from client_pipeline.partition.plan import ClusterPlan
from client_pipeline.runtime.transport.faults import FailedRound
from client_pipeline.runtime.transport.transport import TransportError
from client_pipeline.timetable.pacing import Pace, StagePace
from helpers.recovery_cases import (
    LOCAL_STEPS,
    SPEC,
    THREE,
    assert_equal,
    control_units,
    faults,
    initial,
    once,
    train as train_weights,
    within,
)
from helpers.thread_ray import run_in_threads

PLAIN = replace(SPEC, config={**SPEC.config, "dropout": 0.0})
HANG_S = 60.0


@pytest.fixture
def units(monkeypatch):
    run_in_threads(monkeypatch)
    with control_units("doubt", spec=PLAIN) as make:
        yield make


def train(unit, rounds=(1, 2), plan=THREE, weights=None, **more):
    return within(HANG_S, lambda: train_weights(unit, weights or initial(PLAIN), rounds, plan, **more))


def plan_of(*delta):
    return ClusterPlan(delta=delta, order=tuple(k for k, d in enumerate(delta) if d), m=4)


def test_with_one_copy_a_round_a_device_lost_while_tebs_move_loses_the_round_and_says_so(units):
    """Put back to the copy of the round before, the first step would be gone without a word."""
    unit = units(runtime={"snapshots": "round"})
    weights, _ = train(unit, [1])
    placement, move = unit.pipeline.placement, unit.pipeline.placement._move

    def dying(owners):
        placement._move = move
        unit.pipeline.pool[0].end_process()
        move(owners)

    def observe(devices):
        placement._move = dying
        return {1: 3.0}

    unit.speed.observe = observe
    unit.recovery.relief_pays = lambda *arguments: True
    with pytest.raises(FailedRound, match="runtime.snapshots = round keeps no copy"):
        train(unit, [2], weights=weights)


def test_a_device_lost_after_the_last_commit_costs_nothing(units):
    expected, _ = train(units(runtime={"snapshots": "round"}))
    unit = units(runtime={"snapshots": "round"})
    weights, _ = train(unit, [1])
    memory, ended = unit.pipeline.memory, []

    def dying():
        if not ended:
            ended.append(unit.pipeline.pool[0])
            ended[0].end_process()
        return memory()

    unit.pipeline.memory = dying
    found, results = train(unit, [2], weights=weights)
    assert_equal(found, expected)
    assert [(kind, device) for kind, device, *_ in faults(results)] == [("device", 0)]
    steps = {int(value) for name, value in unit.optimizer.state().items() if name.endswith("/step")}
    assert steps == {2 * LOCAL_STEPS}


def test_a_device_that_ends_after_its_answer_is_recovered_where_what_was_sent_is_asked_for(units):
    """Over TLS a step ends with a byte back from each neighbour."""
    expected, _ = train(units())
    unit = units()
    weights, _ = train(unit, [1])
    pool, answers, ended = unit.pipeline.pool, unit.pipeline.pool.answers, []

    def answered(references, doing):
        result = answers(references, doing)
        if doing == "ending the step" and not ended:
            ended.append(pool[0])
            pool[0].end_process()
            flush = unit.pipeline.group.transport.flush

            def unanswered():
                unit.pipeline.group.transport.flush = flush
                raise TransportError("sending: the connection is cut")

            unit.pipeline.group.transport.flush = unanswered
        return result

    pool.answers = answered
    found, results = train(unit, [2], weights=weights)
    assert_equal(found, expected)
    assert ended and faults(results)[0][:2] in (("device", 0), ("link", None))


def stage(teb_s, blocks, first=False, last=False):
    link = [0.5] * 4
    compute, backward = [teb_s * blocks] * 4, [2 * teb_s * blocks] * 4
    return StagePace(compute, backward, [0.0] * 4 if last else link, [0.0] * 4 if first else link, compute)


def test_paced_devices_take_as_long_for_each_teb_under_another_plan():
    before = plan_of(1, 2, 1)
    pace = Pace([stage(1.0, 1, first=True), stage(3.0, 2), stage(2.0, 1, last=True)], 7.0)
    assert pace.moved(before, before) is pace
    moved = pace.moved(before, plan_of(0, 1, 3))
    assert moved == Pace([stage(3.0, 1, first=True), stage(2.0, 3, last=True)], 7.0)
    # Of who had none nobody knows what it takes: the mean of the others.
    both = Pace([stage(1.0, 2, first=True), stage(3.0, 2, last=True)], 7.0).moved(plan_of(2, 2, 0), plan_of(0, 2, 2))
    np.testing.assert_allclose([s.forward_s[0] for s in both.stages], [6.0, 4.0])
    alone = Pace([stage(1.0, 4, first=True, last=True)], 7.0).moved(plan_of(4, 0, 0), plan_of(0, 2, 2))
    assert [s.forward_s[0] for s in alone.stages] == [2.0, 2.0] and alone.stages[0].forward_link_s == [0.0] * 4


def test_a_paced_device_that_is_lost_gives_way_to_others(units):
    unit, plan = units(), plan_of(4, 0, 0)
    tiny = [0.001] * 4
    pace = Pace([StagePace(tiny, tiny, [0.0] * 4, [0.0] * 4, tiny)], 0.0)
    once(unit, round_=1, step=1, kind="F", micro_batch=0, act=lambda: unit.pipeline.pool[0].end_process())
    found, results = train(unit, [1], plan, pace=pace, replan=lambda *arguments: plan_of(0, 2, 2))
    assert_equal(found, train(units(), [1], plan)[0])
    assert [(kind, device) for kind, device, *_ in faults(results)] == [("device", 0)]
