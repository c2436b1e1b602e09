import json

from flower_app.report.chrome_trace import chrome_trace, write_trace

TIMELINE = {
    "round": 7,
    "clusters": [
        {
            "cluster": 1,
            "order": [4, 0],
            "modelled": [
                ["F", 0, 0, 0.0, 2.0],
                ["z", 0, 0, 2.0, 2.5],
                ["F", 1, 0, 2.5, 3.5],
                ["B", 1, 0, 3.5, 5.5],
                ["g", 0, 0, 5.5, 6.0],
                ["B", 0, 0, 6.0, 10.0],
            ],
            "measured": [["F", 0, 0, 0.0, 0.25], ["F", 1, 0, 0.25, 0.5], ["B", 1, 0, 0.5, 1.0], ["B", 0, 0, 1.0, 2.0]],
        }
    ],
}


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace, what):
    return {
        (e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == what
    }


def test_every_event_keeps_its_start_and_duration_in_microseconds():
    events = complete(chrome_trace(TIMELINE))
    cluster = TIMELINE["clusters"][0]
    expected = [(f"{kind}{i}", 1e6 * start, 1e6 * (end - start)) for clock in ("modelled", "measured")
                for kind, _, i, start, end in cluster[clock]]  # fmt: skip
    assert [(e["name"], e["ts"], e["dur"]) for e in events] == expected


def test_modelled_and_measured_are_processes_and_devices_are_threads():
    trace = chrome_trace(TIMELINE)
    processes = names(trace, "process_name")
    assert sorted(processes.values()) == ["cluster 1, measured", "cluster 1, modelled"]
    pid = next(p for (p, _), name in processes.items() if name.endswith("modelled"))
    threads = {name for (p, _), name in names(trace, "thread_name").items() if p == pid}
    assert threads == {"stage 0, device 4", "stage 1, device 0", "link 0 to 1", "link 1 to 0"}
    assert {(e["pid"], e["tid"]) for e in complete(trace)} == set(names(trace, "thread_name"))


def test_the_trace_is_written_beside_the_timeline(tmp_path):
    assert write_trace(tmp_path) is None
    (tmp_path / "timeline.json").write_text(json.dumps(TIMELINE))
    path = write_trace(tmp_path)
    assert path == tmp_path / "trace.json"
    assert json.loads(path.read_text()) == chrome_trace(TIMELINE)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["timeline.json", "trace.json"]
