"""A control unit's records of one round: its devices', its stream's, its own."""

import time
from types import SimpleNamespace

import pytest

from client_pipeline.link.base import Cut, LinkError, NotFiniteLink
from client_pipeline.link.cluster_news import LifeSign
from client_pipeline.runtime import fault_files, round_faults
from client_pipeline.runtime.fault_files import recorded_faults, recorded_signs
from client_pipeline.runtime.faults import FaultRecord, NotFinite, PipelineError
from client_pipeline.runtime.recovery import Recovery
from client_pipeline.runtime.round_faults import RoundFaults
from helpers.fake_pipeline import FakePipeline
from helpers.recovery_cases import THREE

ROUND = 5


@pytest.fixture
def recovery():
    made = Recovery(FakePipeline(), cluster=2)
    made.begin_round(ROUND, THREE, None, 0.0)
    made.begin_step(3, replayable=True)
    return made


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=50.0)
    monkeypatch.setattr(
        round_faults, "time", SimpleNamespace(monotonic=lambda: made.now, time=lambda: 1000.0 + made.now)
    )
    return made


def round_of(recovery, folder=None, lost_at=None):
    faults = RoundFaults(recovery, 2, folder, lost_at)
    faults.begin_round(ROUND)
    return faults


def of_device(device, **more):
    return FaultRecord(**{"kind": "device", "cluster": 2, "round": ROUND, "device": device, "recovered": True, **more})


def link(*cuts):
    return SimpleNamespace(cuts=list(cuts))


def cut(noticed, resent_bytes=0):
    return Cut(noticed=noticed, seconds=0.5, resent_bytes=resent_bytes)


def test_a_cut_lasts_from_when_it_was_noticed_to_the_next_finished_micro_batch(recovery, clock):
    faults, stream = round_of(recovery), link(cut(46.0, 700))
    faults.begin_link(stream)
    faults.finished_micro_batch()
    clock.now = 60.0
    # A second cut of which no micro-batch came through has no end.
    stream.cuts += [cut(57.5, 10), cut(59.0)]
    faults.finished_micro_batch()
    faults.finished_micro_batch()
    stream.cuts.append(cut(60.0, 3))
    records = faults.end_round(recovered=True)
    assert [(r.seconds, r.bytes) for r in records] == [(4.0, 700), (2.5, 10), (1.0, 0), (None, 3)]
    assert {(r.kind, r.cluster, r.round, r.recovered, r.device) for r in records} == {("stream", 2, ROUND, True, None)}


def test_a_link_counts_for_its_own_round_alone(recovery, clock):
    faults = round_of(recovery)
    faults.begin_link(link(cut(46.0)))
    faults.finished_micro_batch()
    faults.end_link()
    assert faults.end_round(recovered=True) == []
    faults.begin_link(link(cut(46.0)))
    faults.begin_round(ROUND + 1)
    assert faults.end_round(recovered=True) == []
    # The times of the round before are not those of this one's cuts.
    faults.begin_link(link(cut(49.0)))
    faults.finished_micro_batch()
    assert [record.seconds for record in faults.end_round(recovered=True)] == [1.0]


def test_a_control_unit_that_was_lost_is_back_with_its_first_micro_batch(recovery, clock):
    faults = round_of(recovery, lost_at=1000.0 + 38.0)
    for _ in range(2):
        faults.finished_micro_batch()
    [back] = faults.end_round(recovered=True)
    assert (back.kind, back.cluster, back.device, back.round, back.step) == ("joined", 2, None, ROUND, 3)
    assert back.recovered and back.seconds == 12.0


def test_a_finished_micro_batch_ends_what_was_wrong_with_devices(recovery):
    faults = round_of(recovery)
    recovery._open = [(of_device(1, recovered=False), time.monotonic() - 2.0)]
    faults.finished_micro_batch()
    [record] = faults.end_round(recovered=False)
    assert record.recovered and 2.0 <= record.seconds < 60.0


def test_records_are_written_when_they_change_and_not_each_time(recovery, tmp_path, monkeypatch):
    faults, written = round_of(recovery, tmp_path), []
    write = fault_files.keep
    monkeypatch.setattr(fault_files, "keep", lambda *arguments: (written.append(arguments), write(*arguments)))
    faults.keep()
    assert written == []
    recovery.note(of_device(1))
    faults.keep()
    faults.keep()
    assert len(written) == 1
    recovery._open = [(of_device(0, recovered=False), 0.0)]
    faults.begin_link(link(cut(1.0, 9)))
    faults.keep()
    assert len(written) == 2
    found = [(entry["kind"], entry["device"], entry["recovered"]) for entry in recorded_faults(tmp_path, ROUND)]
    assert found == [("device", 1, True), ("device", 0, False), ("stream", None, True)]


def test_who_gives_no_sign_of_life_is_written_when_that_changes_and_forgotten_with_the_round(recovery, tmp_path):
    faults = round_of(recovery, tmp_path)
    faults.tell([LifeSign(1, "silent", 2.0)])
    [sign] = recorded_signs(tmp_path, ROUND)
    assert (sign["device"], sign["state"]) == (1, "silent") and 2.0 <= time.time() - sign["since"] < 60.0
    before = (tmp_path / "faults.json").stat().st_mtime_ns
    # The seconds that go on are no change, and a record leaves the sign as it is.
    faults.tell([LifeSign(1, "silent", 2.5)])
    assert (tmp_path / "faults.json").stat().st_mtime_ns == before
    recovery.note(of_device(1))
    faults.keep()
    assert len(recorded_signs(tmp_path, ROUND)) == len(recorded_faults(tmp_path, ROUND)) == 1
    faults.tell([])
    assert recorded_signs(tmp_path, ROUND) == [] != recorded_faults(tmp_path, ROUND)
    faults.tell([LifeSign(1, "ended", 0.0)])
    faults.begin_round(ROUND + 1)
    assert recorded_signs(tmp_path, ROUND) == recorded_signs(tmp_path, ROUND + 1) == []


def test_a_new_round_forgets_the_records_of_the_one_before(recovery, tmp_path):
    faults = round_of(recovery, tmp_path)
    recovery.note(of_device(1))
    faults.keep()
    faults.begin_round(ROUND + 1)
    assert recorded_faults(tmp_path, ROUND) == [] and recorded_faults(tmp_path, ROUND + 1) == []
    # The same record again is a new one there.
    faults.keep()
    assert len(recorded_faults(tmp_path, ROUND)) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PipelineError("device 1: it failed\nat length"), "cluster"),
        (LinkError("the decoder said no"), "cluster"),
        (NotFinite("Inf"), "nan"),
        (NotFiniteLink("Inf"), "nan"),
    ],
)
def test_a_round_that_failed_has_a_record_that_says_so(recovery, error, kind):
    faults = round_of(recovery)
    recovery.note(of_device(1))
    failed = faults.failed_round(ROUND, error)
    assert str(failed) == str(error)
    mended, last = failed.faults
    assert (mended["device"], mended["recovered"]) == (1, True)
    assert (last["kind"], last["cluster"], last["round"], last["step"]) == (kind, 2, ROUND, 3)
    assert not last["recovered"] and last["reason"] == str(error).splitlines()[0]


def test_a_long_reason_is_cut(recovery):
    [record] = round_of(recovery).failed_round(ROUND, PipelineError("x" * 1000)).faults
    assert record["reason"] == "x" * 300


def test_a_fault_that_was_not_mended_is_the_reason_itself(recovery):
    faults = round_of(recovery)
    recovery._open = [(of_device(1, recovered=False), 0.0)]
    failed = faults.failed_round(ROUND, PipelineError("device 1 is gone"))
    assert [(entry["device"], entry["recovered"]) for entry in failed.faults] == [(1, False)]


def test_what_is_open_at_the_end_is_over_with_a_round_that_went_well(recovery):
    faults = round_of(recovery)
    recovery._open = [(of_device(1, recovered=False), 0.0)]
    assert [record.recovered for record in faults.end_round(recovered=True)] == [True]
    assert faults.end_round(recovered=True) == []
