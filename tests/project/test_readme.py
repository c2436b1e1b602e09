"""What the README shows really runs."""

import re
import subprocess
import sys

import pytest

from helpers.repository import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_the_python_example_runs():
    code, _task = blocks("python")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "Segment(device=0" in result.stdout


def test_the_plan_file_of_the_example_fits_its_format(tmp_path):
    from client_pipeline.partition.plan import read_plans

    (text,) = blocks("json")
    (tmp_path / "plan.json").write_text(text)
    (plan,) = read_plans(tmp_path / "plan.json")
    plan.check(num_blocks=4, batch_size=32, num_devices=6)


def test_both_set_up_commands_are_one_line_and_differ_in_their_last_word_alone():
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    run, test = (line.rsplit(" && ", 1) for line in lines)
    assert run[0] == test[0]
    assert (run[1], test[1]) == (".venv/bin/collapipe run", ".venv/bin/pytest")
