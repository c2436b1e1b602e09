"""``collapipe reproduce`` starts the experiments of a checkout, and refuses elsewhere."""

import os
import subprocess
import sys

import pytest

from helpers.repository import ROOT

pytestmark = pytest.mark.slow


def reproduce(root, folder, *arguments):
    command = [sys.executable, "-m", "flower_app.cli", "reproduce", *arguments]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


def test_in_a_checkout_arguments_and_exit_code_are_those_of_the_program(tmp_path):
    done = reproduce(ROOT, tmp_path, "drift", "--smoke", "--set", "num-rounds=3", "--out", "figures", "--json")
    assert done.returncode == 0 and done.stdout.startswith('{"drift": [')
    assert (tmp_path / "figures" / "drift" / "findings.json").is_file()
    refused = reproduce(ROOT, tmp_path, "fig3")
    assert refused.returncode == 2 and "expected all or one of fig4" in refused.stderr


def test_without_a_checkout_it_says_what_it_needs(tmp_path):
    for package in ("client_pipeline", "strategies", "flower_app", "configs"):
        (tmp_path / package).symlink_to(ROOT / package)
    done = reproduce(tmp_path, tmp_path, "fig4")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "expected a checkout of the source" in done.stderr
