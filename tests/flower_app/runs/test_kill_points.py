"""Real processes that are killed between two system calls: what they have left is the old state, or the new one."""

import os

import numpy as np
import pytest
import torch

from client_pipeline.families.families import build_parts
from flower_app.node import kept_setup
from flower_app.runs.run_directory import append_round, read_rounds
from flower_app.saved_model import load_model, save_model
from helpers.cut_writes import calls_that_end
from helpers.tiny_models import SMALL_TRANSFORMER

CALLS = ("replace", "fsync", "unlink", "symlink", "rmdir")


def killed_at(number, work):
    """Do the work in a process of its own, killed at the given call; returns whether it got so far."""
    process = os.fork()
    if not process:
        for name, call in calls_that_end(CALLS, number, lambda: os._exit(9)).items():
            setattr(os, name, call)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 9


def each_kill(folder, before, after):
    """Yield the folder once for every call at which ``after`` may be killed."""
    number = 1
    while True:
        place = folder / str(number)
        place.mkdir()
        before(place)
        was_killed = killed_at(number, lambda place=place: after(place))
        yield place, was_killed
        if not was_killed:
            return
        number += 1


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 3])
def test_a_model_folder_is_there_whole_whenever_its_writer_is_killed(tmp_path, saves):
    """Between two renames there was no model at all."""
    parts = build_parts(SMALL_TRANSFORMER, 1).weights()

    def save(folder, seeds):
        for seed in seeds:
            weights = {name: torch.full_like(value, float(seed)) for name, value in parts.items()}
            save_model(folder, SMALL_TRANSFORMER, weights, str(seed), {"seed": seed})

    kills = 0
    later = range(2, 2 + saves)
    for folder, was_killed in each_kill(tmp_path, lambda place: save(place, [1]), lambda place: save(place, later)):
        kills += was_killed
        found = load_model(folder)
        seeds = {found.task["seed"], int(found.tokenizer_json), *(int(v.min()) for v in found.parts.weights().values())}
        assert len(seeds) == 1 and seeds < {1, *later}, f"kill {kills}: of versions {seeds}"
        if not was_killed:
            assert seeds == {later[-1]}
    assert kills > 3


def test_a_kept_set_up_is_never_of_two_runs(tmp_path):
    """The frozen weights of one run stood beside the values of another."""

    def keep(folder, run):
        kept_setup.write(folder, {"run": run}, {"w": np.full((3,), float(run))})

    kills = 0
    for folder, was_killed in each_kill(tmp_path, lambda place: keep(place, 1), lambda place: keep(place, 2)):
        kills += was_killed
        told, frozen = kept_setup.read(folder)
        assert told["run"] == int(frozen["w"][0]), f"kill {kills}"
        if not was_killed:
            assert told["run"] == 2
    assert kills > 1


def test_a_rounds_line_is_on_the_disk_before_a_commit_points_behind_it(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        fsync(descriptor)
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", noted)
    append_round(tmp_path, {"round": 1})
    size = (tmp_path / "rounds.jsonl").stat().st_size
    assert ("rounds.jsonl", size) in synced and tmp_path.name in dict(synced)
    assert read_rounds(tmp_path)[0] == [{"round": 1}]
