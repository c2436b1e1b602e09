"""Whoever follows a run's rounds while a resumed run takes some of them back and writes them anew."""

import pytest

from flower_app.runs.followed_rounds import FollowedRounds
from flower_app.runs.run_directory import append_round, reopen, rounds_mark


def write(run_dir, *numbers, seconds=1.0):
    for number in numbers:
        append_round(run_dir, {"round": number, "wall_s": seconds})


def numbers(lines):
    return [line["round"] for line in lines]


def test_lines_come_once_each(tmp_path):
    followed = FollowedRounds(tmp_path)
    assert followed.read() == (0, [])
    write(tmp_path, 1, 2)
    kept, lines = followed.read()
    assert (kept, numbers(lines)) == (0, [1, 2])
    assert followed.read() == (2, [])
    write(tmp_path, 3)
    kept, lines = followed.read()
    assert (kept, numbers(lines)) == (2, [3])


@pytest.mark.parametrize("seconds", [1.0, 2.0, 12.345678], ids=["equal lines", "as long", "longer"])
@pytest.mark.parametrize("looks", [True, False], ids=["in between", "when it has grown past"])
def test_rounds_that_were_taken_back_are_replaced(tmp_path, seconds, looks):
    followed = FollowedRounds(tmp_path)
    write(tmp_path, 1, 2)
    size = rounds_mark(tmp_path)["rounds-size"]
    write(tmp_path, 3, 4)
    shown = followed.read().lines
    reopen(tmp_path, size)
    if looks:
        kept, lines = followed.read()
        shown = shown[:kept] + lines
        assert (kept, numbers(shown)) == (2, [1, 2])
    write(tmp_path, 3, 4, 5, seconds=seconds)
    kept, lines = followed.read()
    shown = shown[:kept] + lines
    assert numbers(shown) == [1, 2, 3, 4, 5]
    assert [line["wall_s"] for line in shown] == [1.0, 1.0, seconds, seconds, seconds]
