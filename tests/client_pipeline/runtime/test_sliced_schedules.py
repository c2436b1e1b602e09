"""Token slices in schedules and on the virtual clock: literal lists, and the longest path written by hand."""

import itertools

import numpy as np
import pytest

from client_pipeline.timetable.event_simulator import StageTimes, simulate_pipeline, stage_times
from client_pipeline.timetable.schedules import SCHEDULES, Action, splits_backward, timetable, unit_timetable
from helpers.sliced_pipelines import pairs_seen, sliced_makespan


def test_gpipe_of_two_micro_batches_in_two_slices_is_the_documented_timetable():
    assert timetable("gpipe", 3, 2, 2).splitlines() == [
        "stage 0 | F0 F1 F2 F3 .. .. .. .. B1 B0 B3 B2",
        "stage 1 | .. F0 F1 F2 F3 .. .. B1 B0 B3 B2 ..",
        "stage 2 | .. .. F0 F1 F2 F3 B1 B0 B3 B2 .. ..",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_slice_goes_each_way_once_and_no_schedule_waits_for_itself(schedule):
    for num_stages, m, num_slices in itertools.product(range(1, 5), range(1, 5), (1, 2, 3)):
        rows = unit_timetable(schedule, num_stages, m, num_slices)
        for row in rows:
            done = [action for action in row if action]
            kinds = "FBW" if splits_backward(schedule) else "FB"
            assert sorted(done) == sorted(Action(kind, i) for kind in kinds for i in range(m * num_slices))
            for i, q in itertools.product(range(m), range(num_slices - 1)):
                first, second = i * num_slices + q, i * num_slices + q + 1
                assert done.index(Action("F", first)) < done.index(Action("F", second))
                assert done.index(Action("B", second)) < done.index(Action("B", first))


def own_times(generator, num_stages, columns):
    passes = generator.uniform(0.1, 2.0, (2, num_stages, columns))
    links = generator.uniform(0.0, 1.5, (2, num_stages - 1, columns))
    return StageTimes(*passes, *links, passes[1] * generator.uniform(0.0, 1.0, (num_stages, columns)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_makespan_of_slices_is_the_longest_path(schedule):
    generator = np.random.default_rng(1)
    for num_stages, m, num_slices in itertools.product((1, 2, 4), (1, 3), (1, 2, 4)):
        times = own_times(generator, num_stages, m * num_slices)
        found = simulate_pipeline(schedule, *times, decoder_s=0.7, num_slices=num_slices)
        expected = sliced_makespan(schedule, times, num_slices, decoder=0.7)
        assert found.makespan == pytest.approx(expected, rel=1e-12)


def test_the_decoder_answers_a_micro_batch_when_it_has_had_its_last_slice():
    """A decoder as the last stage takes the micro-batches one after the other, too."""
    ones = np.ones((2, 4))
    found = simulate_pipeline(
        "gpipe", ones, ones, np.zeros((1, 4)), np.zeros((1, 4)), answers_at_once=True, num_slices=2
    )
    decoder = [(e.kind, e.micro_batch, e.start) for e in found.events if e.place == 1 and e.kind in "FB"]
    assert [start for _, _, start in decoder] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert " ".join(f"{kind}{i}" for kind, i, _ in decoder) == "F0 F1 B1 B0 F2 F3 B3 B2"


CLUSTER = dict(
    num_blocks=[2, 1],
    speed=[10.0, 5.0],
    link_rate=[4.0, 1.0],
    micro_batches=[3, 2],
    o_f=20.0,
    o_b=10.0,
    o_b_scaling="sample",
    t0=0.2,
    z_bits=8.0,
    g_bits=4.0,
    act_scaling="sample",
    lat=1.0,
)


def test_attention_grows_along_the_sequence_as_the_pairs_of_tokens_do():
    bare = CLUSTER | {"t0": 0.0, "lat": 0.0}
    whole = stage_times(**bare).forward_s
    for num_slices in (1, 2, 4, 8):
        attention, linear, mixed = (
            stage_times(**bare, num_slices=num_slices, attention_share=share).forward_s for share in (1.0, 0.0, 0.25)
        )
        pairs = pairs_seen(16, num_slices)
        np.testing.assert_allclose(attention, np.kron(whole, pairs))
        np.testing.assert_allclose(linear, np.kron(whole, np.full(num_slices, 1 / num_slices)))
        np.testing.assert_allclose(mixed, 0.25 * attention + 0.75 * linear)
