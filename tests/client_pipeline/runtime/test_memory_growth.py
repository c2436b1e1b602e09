"""Freed memory that a training device keeps: it neither grows with the rounds nor lies between the tensors."""

import json
import subprocess
import sys

import pytest

from helpers.repository import ROOT

pytestmark = pytest.mark.slow
ROUNDS = 20


def rows_of(freed):
    sizes = ["--width", "256", "--blocks", "3", "--rounds", str(ROUNDS)]
    command = [sys.executable, "benchmarks/memory_growth.py", "--base-dtype", "int8", "--freed", freed, *sizes]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=900)
    return [json.loads(line) for line in out.stdout.splitlines()]


def assert_rounds_begin_alike(rows):
    assert len(rows) == ROUNDS
    begins = [row["begin_mb"] for row in rows[2:]]
    # The same tensors are there: an activation, gradient or copy that stays would come once a round.
    assert max(begins) - begins[0] < 3


def test_a_device_begins_its_rounds_with_what_it_began_the_third_with():
    assert_rounds_begin_alike(rows_of("kept"))


def test_under_a_limit_a_device_has_little_but_its_tensors_also_while_it_trains():
    rows = rows_of("returned")
    held = max(row["end_mb"] for row in rows)
    # Kept as by default, freed memory adds tens of megabytes to this.
    assert held < rows[0]["tensors_mb"] + 15
    # Lengths and the heap's order move what a round ends with by 10 MB and more; not what it begins with.
    assert_rounds_begin_alike(rows)
