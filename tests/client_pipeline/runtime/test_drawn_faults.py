"""Faults on purpose: what is drawn, when it strikes and whom, and the files that speak of it."""

import json
import signal
from dataclasses import fields

import pytest
import torch

from client_pipeline.partition.dropout_seed import StepId
from client_pipeline.runtime.control_unit import fault_injection
from client_pipeline.runtime.control_unit.fault_files import forget, keep, note_injected, read_injected, recorded_faults
from client_pipeline.runtime.control_unit.fault_injection import FaultInjector, draw_faults, server_dies
from client_pipeline.runtime.fault_config import INJECTED_KINDS, FaultConfig
from client_pipeline.runtime.transport.faults import FaultRecord

PID = 1 << 30
"""A process that no system has."""
OF_CLUSTERS = [kind for kind in INJECTED_KINDS if kind != "server"]
ALL = FaultConfig(**dict.fromkeys(INJECTED_KINDS, 1.0), seed=3)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("freeze_seconds", 0.1, 0.0),
        ("partition_seconds", 0.1, 0.0),
        ("slow_factor", 1.1, 1.0),
        ("seed", 0, -1),
    ],
)
def test_how_long_and_how_slow_is_above_its_limit(key, good, bad):
    assert not FaultConfig(**{key: good}).any
    with pytest.raises(ValueError, match=rf"faults\.{key.replace('_', '-')}: expected .*, found {bad}"):
        FaultConfig(**{key: bad})


def test_a_draw_follows_from_seed_round_and_cluster_alone():
    drawn = draw_faults(ALL, 4, 2, 5)
    assert drawn == draw_faults(ALL, 4, 2, 5)
    assert [fault.kind for fault in drawn] == OF_CLUSTERS
    others = [
        draw_faults(FaultConfig(**dict.fromkeys(INJECTED_KINDS, 1.0), seed=4), 4, 2, 5),
        draw_faults(ALL, 5, 2, 5),
        draw_faults(ALL, 4, 3, 5),
    ]
    places = {tuple(fault.place for fault in faults) for faults in (drawn, *others)}
    assert len(places) == 4
    # Each kind has a draw of its own.
    assert len({fault.place for fault in drawn}) == len(drawn)


def test_faults_come_as_often_as_their_rate_says_in_any_step_and_at_any_moment():
    config = FaultConfig(device=0.25, seed=1)
    drawn = [draw_faults(config, round_, cluster, 3) for round_ in range(1, 201) for cluster in range(4)]
    struck = [fault for faults in drawn for fault in faults]
    assert all(len(faults) <= 1 for faults in drawn)
    # 800 draws: four standard deviations.
    assert abs(len(struck) / 800 - 0.25) < 4 * (0.25 * 0.75 / 800) ** 0.5
    assert {fault.step for fault in struck} == {1, 2, 3}
    assert {fault.moment for fault in struck} == {"F", "G", "B"}
    for where in ("place", "device_share"):
        values = sorted(getattr(fault, where) for fault in struck)
        assert 0 <= values[0] < 0.1 and 0.9 < values[-1] < 1
    # Who is struck does not follow from the place.
    assert len({(fault.place < 0.5, fault.device_share < 0.5) for fault in struck}) == 4


def test_the_server_dies_as_often_as_its_rate_says_and_clusters_do_not_draw_it():
    config = FaultConfig(server=0.25, seed=1)
    shares = [server_dies(config, round_) for round_ in range(1, 401)]
    died = [share for share in shares if share is not None]
    assert abs(len(died) / 400 - 0.25) < 4 * (0.25 * 0.75 / 400) ** 0.5
    assert 0 <= min(died) < 0.1 and 0.9 < max(died) < 1
    assert shares == [server_dies(config, round_) for round_ in range(1, 401)]
    assert draw_faults(FaultConfig(server=1.0), 1, 0, 1) == []
    assert server_dies(FaultConfig(device=1.0), 1) is None


# What strikes.


class Link:
    """Notes what is sent on it."""

    def __init__(self, is_remote=True):
        self.is_remote = is_remote
        self.calls = []

    def cut(self, for_s):
        self.calls.append(("cut", for_s))

    def begin_step(self, *arguments):
        self.calls.append(("begin", *arguments))

    def send(self, micro_batch, hidden_BTD, mask_BT, targets):
        self.calls.append(("send", micro_batch, hidden_BTD))


@pytest.fixture
def signals(monkeypatch):
    sent = []
    monkeypatch.setattr(fault_injection.os, "kill", lambda pid, number: sent.append((pid, number)))
    return sent


@pytest.fixture
def shells(monkeypatch):
    """Scripts that would run, with their arguments."""
    started = []

    class Shell:
        def __init__(self, script, arguments):
            self.script, self.arguments = script, arguments
            self.ended = False

        def terminate(self):
            self.ended = True

        def poll(self):
            return 0 if self.ended else None

    def start(script, *arguments):
        started.append(Shell(script, arguments))
        return started[-1]

    monkeypatch.setattr(fault_injection, "_shell", start)
    return started


def injector_of(tmp_path, *kinds, link=None, round_=6, **more):
    config = FaultConfig(**dict.fromkeys(kinds, 1.0), seed=3, **more)
    injector = FaultInjector(config, 1, 2, tmp_path)
    injector.begin_round(round_, link or Link())
    return injector


def all_moments(injector, pids, num_micro_batches=4):
    """Everything that arrives in a round of two steps; returns where a line was added."""
    noted = []
    for step in (1, 2):
        for moment in "FGB":
            for micro_batch in range(num_micro_batches):
                before = len(read_injected(injector._folder))
                injector.arrived(step, moment, micro_batch, num_micro_batches, pids)
                if len(read_injected(injector._folder)) > before:
                    noted.append((step, moment, micro_batch))
    return noted


PIDS = {k: PID + k for k in range(3)}


@pytest.mark.parametrize("round_", range(1, 9))
def test_a_device_is_killed_once_at_the_moment_that_was_drawn(tmp_path, signals, round_):
    injector = injector_of(tmp_path, "device", round_=round_)
    [fault] = draw_faults(injector.config, round_, 1, 2)
    assert all_moments(injector, PIDS) == [(fault.step, fault.moment, int(4 * fault.place))]
    device = int(3 * fault.device_share)
    assert signals == [(PID + device, signal.SIGKILL)]
    [line] = read_injected(tmp_path)
    assert line.pop("time") > 0
    assert line == {"kind": "device", "round": round_, "cluster": 1, "device": device, "step": fault.step}
    assert injector.since(device) is not None and injector.since((device + 1) % 3) is None


def test_a_device_has_one_fault_in_a_round_and_none_is_left_for_more(tmp_path, signals, shells):
    injector = injector_of(tmp_path, "device", "freeze", "slow")
    all_moments(injector, {0: PID, 1: PID + 1})
    lines = read_injected(tmp_path)
    assert len(lines) == 2 and {line["device"] for line in lines} == {0, 1}
    # In the next round all of them can be struck again.
    injector.begin_round(7, Link())
    assert injector.since(0) is None and injector.since(1) is None
    assert all_moments(injector_of(tmp_path / "none", "device"), {}) == []


def test_a_device_freezes_for_the_time_that_is_set(tmp_path, shells):
    injector = injector_of(tmp_path, "freeze", freeze_seconds=2.5)
    all_moments(injector, {4: PID + 4})
    [shell] = shells
    assert shell.script == fault_injection._FREEZE and shell.arguments == (PID + 4, 2.5)
    # It goes on by itself, also after the round.
    injector.end_round()
    assert not shell.ended


@pytest.mark.parametrize(("kind", "for_s"), [("stream", 0.0), ("partition", 4.0)])
def test_a_stream_is_cut_where_there_is_one(tmp_path, kind, for_s):
    injector = injector_of(tmp_path, kind, link=(link := Link()), partition_seconds=4.0)
    all_moments(injector, PIDS)
    assert link.calls == [("cut", for_s)]
    assert len(read_injected(tmp_path)) == 1
    injector = injector_of(tmp_path / "alone", kind, link=(link := Link(is_remote=False)))
    all_moments(injector, PIDS)
    assert link.calls == [] and read_injected(tmp_path / "alone") == []


def test_the_activations_of_one_micro_batch_become_nan(tmp_path):
    link = Link()
    injector = FaultInjector(FaultConfig(nan=1.0, seed=3), 1, 2, tmp_path)
    used = injector.begin_round(6, link)
    [fault] = draw_faults(injector.config, 6, 1, 2)
    hidden, mask = torch.ones(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    for step in (1, 2):
        used.begin_step(StepId(seed=0, round=6, step=step, cluster=1), 4, 8.0)
        for micro_batch in range(4):
            used.send(micro_batch, hidden, mask, {})
    assert [call[3] for call in link.calls if call[0] == "begin"] == [8.0, 8.0]
    sent = [call[2] for call in link.calls if call[0] == "send"]
    poisoned = [i for i, tensor in enumerate(sent) if tensor.isnan().all()]
    assert poisoned == [4 * (fault.step - 1) + int(4 * fault.place)]
    assert all(torch.equal(tensor, hidden) for i, tensor in enumerate(sent) if i not in poisoned)
    assert torch.equal(hidden, torch.ones(2, 3, 4))
    assert [line["kind"] for line in read_injected(tmp_path)] == ["nan"]


# The files.


def record(**changes):
    return FaultRecord(**{"kind": "device", "cluster": 0, "round": 3, "recovered": False, **changes})


def test_records_of_the_round_in_progress_outlive_the_process(tmp_path):
    folder = tmp_path / "a" / "cluster-0"
    keep(folder, 3, [record(), record(device=1, kind="freeze")])
    keep(folder, 3, [record(device=1)])
    [found] = recorded_faults(folder, 3)
    assert found == {field.name: getattr(record(device=1), field.name) for field in fields(FaultRecord)}
    assert recorded_faults(folder, 4) == []
    keep(folder, 4, [])
    assert recorded_faults(folder, 4) == [] and recorded_faults(folder, 3) == []
    # Nothing stays aside.
    assert [path.name for path in folder.iterdir()] == ["faults.json"]


def test_a_new_run_forgets_both_files_of_an_older_one_and_no_other(tmp_path):
    note_injected(tmp_path, "device", 1)
    keep(tmp_path, 1, [record()])
    (tmp_path / "other.json").write_text(json.dumps({}))
    forget(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]
    forget(tmp_path)
