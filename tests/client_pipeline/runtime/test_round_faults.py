"""A control unit's records of one round: of its devices, of its stream, of itself."""

from types import SimpleNamespace

import pytest

from client_pipeline.link.base import Cut, LinkError, NotFiniteLink
from client_pipeline.link.cluster_news import ClusterNews, LifeSign
from client_pipeline.runtime.control_unit import round_faults
from client_pipeline.runtime.control_unit.round_faults import RoundFaults
from client_pipeline.runtime.transport.faults import NotFinite, PipelineError

ROUND = 5


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=50.0)
    clocks = SimpleNamespace(monotonic=lambda: made.now, time=lambda: 1000.0 + made.now)
    monkeypatch.setattr(round_faults, "time", clocks)
    return made


def begun(folder=None, lost_at=None):
    faults = RoundFaults(2, folder, lost_at)
    faults.begin_round(ROUND)
    faults.begin_step(3)
    return faults


class Link:
    def __init__(self, *cuts):
        self.cuts, self.news = list(cuts), []

    def tell(self, text):
        self.news.append(ClusterNews.from_text(text, 2, str))


def cut(noticed, resent_bytes=0):
    return Cut(noticed=noticed, seconds=0.5, resent_bytes=resent_bytes)


def test_a_cut_lasts_until_the_next_finished_micro_batch_of_its_own_round(clock):
    faults, link = begun(lost_at=1038.0), Link(cut(46.0, 700))
    faults.begin_link(link)
    faults.finished_micro_batch()
    clock.now = 60.0
    link.cuts += [cut(57.5, 10), cut(59.0)]
    for _ in range(2):
        faults.finished_micro_batch()
    link.cuts.append(cut(60.0, 3))
    # A control unit that was lost is back with its first micro-batch.
    back, *records = faults.end_round(recovered=True)
    assert (back.kind, back.device, back.step, back.seconds, back.recovered) == ("joined", None, 3, 12.0, True)
    assert [(r.seconds, r.bytes) for r in records] == [(4.0, 700), (2.5, 10), (1.0, 0), (None, 3)]
    assert {(r.kind, r.cluster, r.round, r.recovered, r.device) for r in records} == {("stream", 2, ROUND, True, None)}
    faults.begin_round(ROUND + 1)
    assert faults.end_round(recovered=True) == [] and (faults.round, faults.step) == (ROUND + 1, 0)


def test_news_go_out_after_a_change_or_as_a_heartbeat_until_the_round_is_over(clock):
    faults, link = begun(), Link()
    faults.tell([])
    faults.begin_link(link)
    told = []
    for seconds, signs in ((0.0, []), (0.375, []), (0.125, []), (0.125, [LifeSign(1, "ended", 1.0)]), (0.25, [])):
        clock.now += seconds
        faults.tell(signs)
        told.append(len(link.news))
    assert told == [1, 1, 2, 3, 4]
    faults.open("device", 1, "gone", began=48.0)
    faults.tell([])
    assert [fault["device"] for fault in link.news[-1].faults] == [1] and link.news[-1].round == ROUND
    for seconds in (1.0, 1.25):
        faults.tell([LifeSign(0, "silent", seconds)])
    faults.tell_end()
    faults.tell([LifeSign(1, "ended", 1.0)])
    faults.begin_round(ROUND + 1)
    faults.begin_link(link)
    faults.tell([])
    assert [(news.is_over, news.round) for news in link.news[5:]] == [(False, 5), (True, 5), (False, 6)]


@pytest.mark.parametrize(
    "error", [PipelineError("x\ny"), LinkError("x" * 1000), NotFinite("Inf"), NotFiniteLink("Inf")]
)
def test_a_round_that_failed_has_a_record_that_is_not_recovered(error):
    faults, kind = begun(), "nan" if "Inf" in str(error) else "cluster"
    faults.close("device", 1, "gone")
    failed = faults.failed_round(error)
    last = failed.faults[1]
    assert str(failed) == str(error) and failed.faults[0]["recovered"] and not last["recovered"]
    assert (last["kind"], last["cluster"], last["round"], last["step"], last["device"]) == (kind, 2, ROUND, 3, None)
    assert last["reason"] == str(error).splitlines()[0][:300]
    faults.close("joined", 1, "back")
    faults.open("device", 1, "gone", began=0.0)
    assert [entry["recovered"] for entry in faults.failed_round(error).faults] == [True, False]
