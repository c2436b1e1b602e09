"""The virtual clock against closed forms and against the longest path."""

import itertools

import numpy as np
import pytest

from client_pipeline.system.latency import flow_shop_latency
from client_pipeline.timetable.event_simulator import StageTimes, simulate_pipeline, stage_times
from client_pipeline.timetable.schedules import SCHEDULES, actions, splits_backward
from helpers.oracles import gpipe_latency, makespan

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (3, 8), (5, 2), (6, 14)]


def equal_times(generator, num_stages, m):
    """Every micro-batch takes the same time."""
    return tuple(np.repeat(t[:, None], m, axis=1) for t in _columns(generator, num_stages))


def _columns(generator, num_stages):
    passes = generator.uniform(0.1, 2.0, (2, num_stages))
    links = generator.uniform(0.0, 1.5, (2, num_stages - 1))
    return passes[0], passes[1], links[0], links[1]


def own_times(generator, num_stages, m):
    """Every action has its own time; some links take none."""
    passes = generator.uniform(0.1, 2.0, (2, num_stages, m))
    weights = passes[1] * generator.uniform(0.0, 1.0, (num_stages, m))
    links = generator.uniform(0.1, 1.5, (2, num_stages - 1, m)) * (generator.random((2, num_stages - 1, 1)) < 0.8)
    return StageTimes(passes[0], passes[1], links[0], links[1], weights)


@pytest.mark.parametrize(("num_stages", "m"), SIZES)
def test_fused_chunks_with_busy_senders_are_a_flow_shop(num_stages, m):
    generator = np.random.default_rng(num_stages * 100 + m)
    for _ in range(10):
        forward, backward, z, g = equal_times(generator, num_stages, m)
        stages = forward[:, 0] + backward[:, 0]
        stages[:-1] += z[:, 0] + g[:, 0]
        found = simulate_pipeline("fused", forward, backward, z, g).makespan
        assert found == pytest.approx(flow_shop_latency(list(stages), m), rel=1e-12)


@pytest.mark.parametrize(("num_stages", "m"), SIZES)
def test_gpipe_with_busy_senders_has_its_closed_form(num_stages, m):
    generator = np.random.default_rng(num_stages * 100 + m)
    for _ in range(10):
        forward, backward, z, g = equal_times(generator, num_stages, m)
        z_link, g_link = [*z[:, 0], 0.0], [*g[:, 0], 0.0]
        expected = gpipe_latency(list(forward[:, 0]), list(backward[:, 0]), z_link, g_link, m)
        assert simulate_pipeline("gpipe", forward, backward, z, g).makespan == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "fused"])
@pytest.mark.parametrize("links", ["blocking", "overlapping"])
def test_the_makespan_is_the_longest_path(schedule, links):
    generator = np.random.default_rng(1)
    for num_stages, m in itertools.product((1, 2, 3, 5), (1, 2, 4, 7)):
        times = own_times(generator, num_stages, m)
        decoder = 0.0 if schedule == "fused" else 0.7
        found = simulate_pipeline(schedule, *times, links=links, decoder_s=decoder).makespan
        expected = makespan(schedule, *(t.tolist() for t in times), links=links, decoder=decoder)
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "fused"])
def test_a_shared_medium_sends_one_message_at_a_time_first_ready_first(schedule):
    generator = np.random.default_rng(2)
    for num_stages, m in itertools.product((2, 3, 5), (1, 3, 6)):
        times = own_times(generator, num_stages, m)
        found = simulate_pipeline(schedule, *times, links="shared")
        messages = [e for e in found.events if e.kind in ("z", "g", "zg")]
        ready = {_message(e): e.end for e in found.events if e.kind in ("F", "B", "FB")}
        for first, second in itertools.pairwise(messages):
            assert second.start >= first.end
            assert ready[second[:3]] >= ready[first[:3]]
            # The medium never rests while a message waits.
            assert second.start == pytest.approx(max(first.end, ready[second[:3]]))
        order = [e[:3] for e in messages]
        expected = makespan(schedule, *(t.tolist() for t in times), links="shared", medium=order)
        assert found.makespan == pytest.approx(expected, rel=1e-12)


def _message(event):
    """The message that an action makes, as in its event; something else at the pipeline's ends."""
    place = event.place - 1 if event.kind == "B" else event.place
    return {"F": "z", "B": "g", "FB": "zg"}[event.kind], place, event.micro_batch


@pytest.mark.parametrize("schedule", [*SCHEDULES, "fused"])
@pytest.mark.parametrize("links", ["blocking", "overlapping", "shared"])
def test_a_device_does_one_thing_at_a_time_and_everything_once(schedule, links):
    times = own_times(np.random.default_rng(3), 4, 5)
    found = simulate_pipeline(schedule, *times, links=links)
    for stage in range(4):
        own = [e for e in found.events if e.kind in ("F", "B", "W", "FB") and e.place == stage]
        expected = 5 if schedule == "fused" else 15 if splits_backward(schedule) else 10
        assert len(own) == expected == len({e[:3] for e in own})
        if links == "blocking":
            own += [e for e in found.events if e.kind in ("z", "zg") and e.place == stage]
            own += [e for e in found.events if e.kind == "g" and e.place == stage - 1]
        own.sort(key=lambda e: (e.start, e.end))
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("schedule", [*SCHEDULES, "fused"])
@pytest.mark.parametrize("links", ["blocking", "overlapping", "shared"])
def test_every_action_starts_the_moment_its_device_and_its_input_allow(schedule, links):
    """So no device rests while it could work, and the timeline, not just its end, is the earliest one."""
    times, decoder = own_times(np.random.default_rng(7), 4, 5), 0.7
    found = simulate_pipeline(schedule, *times, links=links, decoder_s=decoder)
    end = {e[:3]: e.end for e in found.events}
    for stage in range(4):
        own = [e for e in found.events if e.kind in ("F", "B", "W", "FB") and e.place == stage]
        if schedule != "fused":
            assert [(e.kind, e.micro_batch) for e in own] == actions(schedule, stage, 4, 5)
        free = 0.0
        for event in own:
            kind, _, i = event[:3]
            if kind == "W":
                data = end["B", stage, i]
            elif kind == "B":
                data = end["F", 3, i] + decoder if stage == 3 else end["g", stage, i]
            else:
                data = end["z" if kind == "F" else "zg", stage - 1, i] if stage else 0.0
            assert event.start == max(free, data)
            later = times.weight_s if splits_backward(schedule) else 0 * times.weight_s
            seconds = {"F": times[0], "B": times[1] - later, "W": later, "FB": times[0] + times[1]}[kind][stage, i]
            late = decoder if (kind, stage) == ("FB", 3) else 0.0
            assert event.end == pytest.approx(event.start + seconds + late, rel=1e-12)
            sends = links == "blocking" and kind != "W"
            free = end.get(_message(event), event.end) if sends else event.end
    for event in found.events:
        if event.kind in ("z", "g", "zg"):
            z, g = (t[event.place, event.micro_batch] for t in times[2:4])
            assert event.end - event.start == pytest.approx({"z": z, "g": g, "zg": z + g}[event.kind], abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_links_of_several_modes_and_a_last_stage_that_answers_are_the_longest_path(schedule):
    """Devices wait for their links, as in the system, and a radio sends while the last device goes on."""
    generator = np.random.default_rng(9)
    for num_stages, m in itertools.product((2, 3, 5), (1, 4, 7)):
        times = own_times(generator, num_stages, m)
        modes = ["blocking"] * (num_stages - 2) + ["overlapping"]
        found = simulate_pipeline(schedule, *times, links=modes, answers_at_once=True).makespan
        expected = makespan(schedule, *(t.tolist() for t in times), links=modes, answers_at_once=True)
        assert found == pytest.approx(expected, rel=1e-12)


def test_links_that_overlap_are_never_slower_than_busy_senders():
    generator = np.random.default_rng(5)
    for schedule in (*SCHEDULES, "fused"):
        times = own_times(generator, 4, 6)
        assert (
            simulate_pipeline(schedule, *times, links="overlapping").makespan
            <= simulate_pipeline(schedule, *times).makespan + 1e-12
        )


def test_times_of_stages_follow_the_micro_batches():
    forward, backward, z, g, weights = stage_times(
        num_blocks=[2, 1],
        speed=[10.0, 5.0],
        link_rate=[4.0, 1.0],
        micro_batches=[3, 2],
        o_f=20.0,
        o_b=10.0,
        o_b_scaling="microbatch",
        t0=0.2,
        z_bits=8.0,
        g_bits=4.0,
        act_scaling="sample",
        lat=1.0,
    )
    assert forward.tolist() == [[2 * 6.1, 2 * 4.1], [12.1, 8.1]]
    assert backward.tolist() == [[2 * 1.1, 2 * 1.1], [2.1, 2.1]]
    # Half of the work of a backward pass, and nothing of what a TEB takes beside it.
    assert weights.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert z.tolist() == [[6.5, 4.5]]
    assert g.tolist() == [[3.5, 2.5]]


def test_mistakes_are_named():
    times = own_times(np.random.default_rng(6), 2, 3)
    with pytest.raises(ValueError, match="links: expected one of blocking, overlapping, shared, found 'fast'"):
        simulate_pipeline("gpipe", *times, links="fast")
    with pytest.raises(ValueError, match="links: expected one of blocking, overlapping, shared"):
        simulate_pipeline("gpipe", *times, links=["fast"])
    with pytest.raises(ValueError, match="links: expected one for each of 1 links, found 2"):
        simulate_pipeline("gpipe", *times, links=["blocking"] * 2)
    with pytest.raises(ValueError, match="schedule: expected one of gpipe, 1f1b"):
        simulate_pipeline("zigzag", *times)
    with pytest.raises(ValueError, match=r"times: found shapes .* expected"):
        simulate_pipeline("gpipe", times[0], times[1], times[2][:, :2], times[3])
    with pytest.raises(ValueError, match="weight_s: expected a part of each backward pass"):
        simulate_pipeline("gpipe", *times[:4], 2 * times[1])
