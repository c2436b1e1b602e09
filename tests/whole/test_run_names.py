"""Run directories whose names have spaces and letters of any script."""

import pytest

from helpers.command_line import collapipe, rounds, sets


@pytest.mark.slow
def test_a_run_in_a_directory_with_a_space_and_an_umlaut_trains_and_goes_on(tmp_path):
    run_dir = tmp_path / "my größe"
    small = sets(num_clusters=1, num_rounds=1, name="größe", run_dir=run_dir)
    first = collapipe("run", *small, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    more = collapipe("run", "--resume", run_dir, "--set", "num-rounds=2", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert [line["round"] for line in rounds(run_dir)] == [1, 2]
    assert (run_dir / "clusters" / "cluster-0").is_dir()
