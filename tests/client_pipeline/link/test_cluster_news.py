"""News of control units in a round in progress: read back, or refused."""

import json

import pytest

from client_pipeline.link.cluster_news import MOST_NEWS_BYTES, ClusterNews, LifeSign
from client_pipeline.runtime.transport.faults import FaultRecord
from strategies.printable import printable


def fault(**changes):
    record = FaultRecord(kind="device", cluster=1, round=3, device=2, step=4, recovered=False, reason="killed")
    return record.to_dict() | changes


def news(**changes):
    told = {"round": 3, "faults": [fault()], "signs": [LifeSign(0, "silent", 1.5), LifeSign(2, "ended", 0.2)]}
    return ClusterNews(**told | changes)


def read(text, cluster=1):
    return ClusterNews.from_text(text, cluster, printable)


def test_news_are_read_as_they_were_told():
    for told in (news(), ClusterNews(round=1, is_over=True), news(faults=[fault(seconds=0.5, recovered=True)])):
        heard = read(told.to_text())
        assert (heard.round, heard.is_over) == (told.round, told.is_over)
        assert (list(heard.faults), list(heard.signs)) == (list(told.faults), list(told.signs))


def test_very_many_faults_and_very_long_reasons_become_the_newest_and_short_ones():
    faults = [fault(device=n, reason="\x1b[31m" * 1000) for n in range(1000)]
    text = news(faults=faults, signs=[LifeSign(n, "silent", 1.0) for n in range(1000)]).to_text()
    heard = read(text)
    assert len(text) < 2 * MOST_NEWS_BYTES and heard.faults[-1]["device"] == 999 and len(heard.signs) == 64
    assert all(one["reason"].isprintable() for one in heard.faults)


@pytest.mark.parametrize("length", [199, 200, 201])
def test_a_reason_has_at_most_two_hundred_characters(length):
    (heard,) = read(news(faults=[fault(reason="x" * length)]).to_text()).faults
    assert heard["reason"] == "x" * min(length, 200)
    told = changed(faults=[fault(reason="x" * length)])
    if length <= 200:
        assert read(told).faults[0]["reason"] == "x" * length
    else:
        with pytest.raises(ValueError, match="a short reason"):
            read(told)


def changed(**changes):
    return json.dumps(json.loads(news().to_text()) | changes)


HOSTILE = [
    "",
    "[]",
    "null",
    "[" * 10_000,
    "{}",
    changed(more=1),
    changed(round=0),
    changed(round=True),
    changed(round=10**12),
    changed(is_over=1),
    changed(faults={}),
    changed(faults=[fault()] * 21),
    changed(faults=[1]),
    changed(faults=[fault(cluster=0)]),
    changed(faults=[fault(device="0")]),
    changed(faults=[fault(device=-1)]),
    changed(faults=[fault(kind="\x1b[31m")]),
    changed(faults=[fault(kind="k" * 30)]),
    changed(faults=[fault(recovered="no")]),
    changed(faults=[fault(seconds=float("nan"))]),
    changed(faults=[fault(seconds=-1)]),
    changed(faults=[fault(reason="x" * 300)]),
    changed(faults=[fault(extra=1)]),
    changed(signs=[[0, "silent"]]),
    changed(signs=[[0, "gone", 1.0]]),
    changed(signs=[[0, ["silent"], 1.0]]),
    changed(signs=[[-1, "silent", 1.0]]),
    changed(signs=[[0, "silent", float("inf")]]),
    changed(signs=[[0, "silent", 1.0]] * 65),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_news_is_refused_and_not_repeated(text):
    with pytest.raises(ValueError, match="^news: expected") as refused:
        read(text)
    assert len(str(refused.value)) < 100 and str(refused.value).isprintable()
