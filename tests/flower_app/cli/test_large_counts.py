"""Counts of options that no command would come to an end with are refused before it starts."""

import pytest
from typer.testing import CliRunner

from flower_app.cli.main import app

TIMETABLE = "--segments, --micro-batches and --token-slices: expected a product of at most 10,000, found "


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ("schedule --segments 101 --micro-batches 100", TIMETABLE + "10,100; draw a smaller timetable"),
        ("schedule --segments 1 --micro-batches 10001", TIMETABLE + "10,001"),
        ("schedule --segments 2 --micro-batches 100 --token-slices 100", TIMETABLE + "20,000"),
        ("verify --batch-size 100001 --segments 9", "--batch-size: expected at most 100,000, found 100001"),
        ("profile --batch-size 100001 --measured none.json", "--batch-size: expected at most 100,000, found 100001"),
        ("profile --devices 1000000000 --measured none.json", "--devices: expected at most 100,000, found 1000000000"),
        ("compare --policies nobody --seeds 1001", "--seeds: expected at most 1,000, found 1001"),
        ("compare --train --policies nobody --seeds 1001", "--seeds: expected at most 1,000, found 1001"),
    ],
)
def test_a_count_without_an_end_is_refused_by_its_option(arguments, mistake):
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2 and result.stderr.splitlines()[-1].startswith(f"error: {mistake}")
